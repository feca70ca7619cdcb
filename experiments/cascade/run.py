"""Claim: a small network before a large one answers sooner and more, at what is promised of accuracy.

On virtual devices with Tabi's own latencies and shares; and really computed: MiniLM's first two layers before all six,
in turns. The control is the large network alone; beside it, exits inside the large network, with and without the small
one.
"""

from rich.console import Console

from experiments.cascade import compute, tabi
from isobatch.deployments.progress import show
from isobatch.profiles.errors import UserError

console = Console(stderr=True)


def measure(sets: int = 3) -> dict[str, float]:
    """`sets`: how many are really computed: SST-2, then AG News, then its titles alone, as short as questions."""
    figures = dict(tabi.measured())
    try:
        figures |= dict(show(compute.measured(sets), "computing"))
    except UserError as error:
        console.print(f"nothing is really computed: {error}", markup=False)
        return figures
    for name, worst in (("over_large", min), ("lost", max)):
        for way in compute.WAYS:
            result = [value for figure, value in figures.items() if figure.startswith(f"{way}_{name}_")]
            figures[f"{way}_{name}"] = worst(result)
    return figures
