"""A tiny SegFormer that labels every pixel of small drawn scenes, trained in seconds."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from experiments.shared.scenes import NAMES, SIDE, drawn, scene_network

GRID = SIDE // 2


@cache
def pixel_network(steps: int = 150) -> Path:
    """The directory of the trained network: a Hugging Face checkpoint without ramps."""
    folder = Path(mkdtemp(prefix="tiny-pixels-"))
    scene_network(folder, steps)
    return folder


@cache
def hugging_face() -> Any:
    from transformers import AutoModelForSemanticSegmentation

    return AutoModelForSemanticSegmentation.from_pretrained(pixel_network()).eval()


@torch.inference_mode()
def reference_logits(pictures: np.ndarray) -> torch.Tensor:
    """Those of the plain network in transformers: pictures x labels x height x width."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(pixel_network())
    arrays = processor(images=list(pictures[..., None]), return_tensors="pt", input_data_format="channels_last")
    logits: torch.Tensor = hugging_face()(**arrays).logits
    return logits


def rows_of(logits: torch.Tensor) -> torch.Tensor:
    """A row for each pixel."""
    return logits.permute(0, 2, 3, 1).flatten(0, 2)


__all__ = ["GRID", "NAMES", "drawn", "hugging_face", "pixel_network", "reference_logits", "rows_of"]
