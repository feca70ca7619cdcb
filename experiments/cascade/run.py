"""Claim: a small network before a large one answers sooner and more, at the promised accuracy; exits gain more.

Tabi's cascades run on virtual devices with its own latencies and shares. MiniLM's first two layers before all six are
really computed, beside exits inside the six layers, with and without the small network. The control is the large
network alone.
"""

from rich.console import Console

from experiments.cascade import compute, tabi
from isobatch.profiles.errors import UserError

console = Console(stderr=True)


def measure() -> dict[str, float]:
    figures = dict(tabi.measured())
    try:
        return figures | dict(compute.measured())
    except UserError as error:
        console.print(f"nothing is really computed: {error}", markup=False)
        return figures
