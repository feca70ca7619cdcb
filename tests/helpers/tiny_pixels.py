"""A tiny SegFormer that labels every pixel of small drawn scenes, trained in seconds."""

from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from experiments.shared.scenes import GRID as GRID
from experiments.shared.scenes import NAMES, SIDE, scene_network
from experiments.shared.scenes import drawn as drawn
from experiments.shared.scenes import on_grid as on_grid
from tests.helpers.made_once import made_once


@made_once
def pixel_network(folder: Path) -> None:
    """The trained network: a Hugging Face checkpoint without ramps."""
    scene_network(folder, steps=20)


@made_once
def upernet(folder: Path, over: str) -> None:
    """A UperNet over ConvNeXt, ResNet or Swin with random weights, for the same pictures."""
    import transformers

    sizes = {"hidden_sizes": [8, 12, 16, 20]}
    swin = {"embed_dim": 8, "num_heads": [1, 2, 2, 4], "window_size": 3, "image_size": SIDE, "patch_size": 4}
    kind, own = {
        "convnext": (transformers.ConvNextConfig, {**sizes, "layer_scale_init_value": 0.5, "drop_path_rate": 0.0}),
        "resnet": (transformers.ResNetConfig, {**sizes, "embedding_size": 8}),
        "swin": (transformers.SwinConfig, {**swin, "drop_path_rate": 0.0}),
    }[over]
    stages = ["stage1", "stage2", "stage3", "stage4"]
    backbone = kind(num_channels=1, depths=[2, 1, 2, 1], out_features=stages, **own)
    torch.manual_seed(0)
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, pool_scales=[1, 2], num_labels=len(NAMES), auxiliary_channels=8
    )
    _save(transformers.UperNetForSemanticSegmentation(config), folder)


@made_once
def beit(folder: Path, shared: bool) -> None:
    """A BEiT with random weights, for the same pictures. `shared`: all layers have one bias of positions."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BeitConfig(
        num_channels=1, image_size=SIDE, patch_size=16, hidden_size=16, num_hidden_layers=7, num_attention_heads=2,
        intermediate_size=24, out_indices=[2, 3, 5, 7], pool_scales=[1, 2], num_labels=len(NAMES),
        use_relative_position_bias=not shared, use_shared_relative_position_bias=shared, use_auxiliary_head=False,
        initializer_range=0.1, layer_scale_init_value=0.5,
    )  # fmt: skip
    _save(transformers.BeitForSemanticSegmentation(config), folder)


def _save(model: Any, folder: Path) -> None:
    import transformers

    model.save_pretrained(folder)
    sides = {"height": SIDE, "width": SIDE}
    transformers.SegformerImageProcessorPil(size=sides, image_mean=[0.25], image_std=[0.25]).save_pretrained(folder)


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


def png(picture: np.ndarray) -> bytes:
    content = BytesIO()
    Image.fromarray(picture).save(content, "PNG")
    return content.getvalue()
