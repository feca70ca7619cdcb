"""The built-in demos, shipped with the package: checkpoints like any other.

A small vision transformer reads handwritten digits; `make demo` makes it again (experiments/demos/digits.py). A small
Llama writes sums as words; `make llm-demo` makes it again (experiments/demos/sums.py). Ramps come from `isobatch
prepare`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isobatch.deployments.models.ramps import RampDtype

# The digit eight from digits.npz: 8 x 8 pixels, values 0..16.
A_DIGIT = (
    (0, 0, 10, 14, 8, 1, 0, 0),
    (0, 2, 16, 14, 6, 1, 0, 0),
    (0, 0, 15, 15, 8, 15, 0, 0),
    (0, 0, 5, 16, 16, 10, 0, 0),
    (0, 0, 12, 15, 15, 12, 0, 0),
    (0, 4, 16, 6, 4, 16, 6, 0),
    (0, 8, 16, 10, 8, 16, 8, 0),
    (0, 1, 8, 12, 14, 12, 1, 0),
)


def demo_directory(dtype: RampDtype = "float32") -> Path:
    """The demo's checkpoint. The int8 one is the same network with ramps that were made for 8-bit blocks."""
    return Path(__file__).with_name(f"demo-{dtype}")


def llm_demo_directory() -> Path:
    """The checkpoint of the demo's language model."""
    return Path(__file__).with_name("demo-llama")
