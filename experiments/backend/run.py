"""Claim: ONNX Runtime is faster than torch on this machine, and on one device constant batches beat both alternatives.

Speed of a backend does not depend on what weights mean: four families run at their true shapes, untrained. What exits
are worth does: the demo, and MiniLM on SST-2 where it is at hand, each in float32 and compressed to 8 bits.
"""

import torch
from rich.console import Console

from experiments.backend import exits, minilm, speed
from experiments.backend.families import own_cache
from isobatch.profiles.errors import UserError

console = Console(stderr=True)


def measure() -> dict[str, float]:
    torch.set_num_threads(1)
    figures = dict[str, float]()
    with own_cache():
        for family in speed.FAMILIES:
            console.print(f"{family}: torch, ONNX Runtime")
            figures |= speed.of_family(family)
    console.print("the demo")
    return figures | exits.of_demo() | _minilm()


def _minilm() -> dict[str, float]:
    try:
        minilm.prepared()
        minilm.test_file()
    except UserError as error:
        console.print(f"minilm_* left out ({error}): they need {minilm.NEEDS}", highlight=False, soft_wrap=True)
        return {}
    console.print("MiniLM on SST-2")
    return exits.of_minilm()
