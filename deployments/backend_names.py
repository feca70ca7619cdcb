"""What may compute a network, as users write it (docs/backends.md)."""

from typing import Literal

Backend = Literal["auto", "torch", "graphs", "onnx", "onnx-graphs"]
