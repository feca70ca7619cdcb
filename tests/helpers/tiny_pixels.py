"""A tiny SegFormer that labels every pixel of small drawn scenes, trained in seconds."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from experiments.shared.scenes import GRID, NAMES, SIDE, drawn, on_grid, scene_network


@cache
def pixel_network(steps: int = 150) -> Path:
    """The directory of the trained network: a Hugging Face checkpoint without ramps."""
    folder = Path(mkdtemp(prefix="tiny-pixels-"))
    scene_network(folder, steps)
    return folder


@cache
def upernet(over: str = "convnext") -> Path:
    """A UperNet over ConvNeXt or Swin with random weights, for the same pictures."""
    import transformers

    folder = Path(mkdtemp(prefix="tiny-upernet-"))
    own: dict[str, Any] = {"hidden_sizes": [8, 12, 16, 20], "layer_scale_init_value": 0.5}
    if over == "swin":
        own = {"embed_dim": 8, "num_heads": [1, 2, 2, 4], "window_size": 3, "image_size": SIDE, "patch_size": 4}
    kind = transformers.SwinConfig if over == "swin" else transformers.ConvNextConfig
    backbone = kind(
        num_channels=1,
        depths=[2, 1, 2, 1],
        drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
        **own,
    )
    torch.manual_seed(0)
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, pool_scales=[1, 2], num_labels=len(NAMES), auxiliary_channels=8
    )
    transformers.UperNetForSemanticSegmentation(config).save_pretrained(folder)
    transformers.SegformerImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=[0.25], image_std=[0.25]
    ).save_pretrained(folder)
    return folder


@cache
def hugging_face(folder: Path) -> Any:
    from transformers import AutoModelForSemanticSegmentation

    return AutoModelForSemanticSegmentation.from_pretrained(folder).eval()


@torch.inference_mode()
def reference_logits(pictures: np.ndarray, folder: Path | None = None) -> torch.Tensor:
    """Those of the plain network in transformers: pictures x labels x height x width."""
    from transformers import AutoImageProcessor

    folder = folder or pixel_network()
    processor = AutoImageProcessor.from_pretrained(folder)
    arrays = processor(images=list(pictures[..., None]), return_tensors="pt", input_data_format="channels_last")
    logits: torch.Tensor = hugging_face(folder)(**arrays).logits
    return logits


def rows_of(logits: torch.Tensor) -> torch.Tensor:
    """A row for each pixel."""
    return logits.permute(0, 2, 3, 1).flatten(0, 2)


__all__ = [
    "GRID",
    "NAMES",
    "SIDE",
    "drawn",
    "hugging_face",
    "on_grid",
    "pixel_network",
    "reference_logits",
    "rows_of",
    "upernet",
]
