"""The built-in demo: a small vision transformer that reads handwritten digits, shipped with the package.

It is a checkpoint like any other, with ramps made by `isobatch prepare`. `make demo` makes it anew
(deployments/prepare/demo.py); serving it needs none of that.
"""

from pathlib import Path

from deployments.models.ramps import RampDtype


def demo_directory(dtype: RampDtype = "float32") -> Path:
    """The demo's checkpoint. In int8 it is the same network, with ramps made for 8-bit blocks."""
    return Path(__file__).with_name(f"demo-{dtype}")
