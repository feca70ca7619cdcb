"""ViTPose: a vision transformer whose head reads the tokens after its last layer, and gives a heat map for each point.

All blocks are alike, so a bridge is a copy of the last norm and of the head.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.deployments.map_tasks import Keypoints
from isobatch.deployments.models.anatomy import Anatomy, Family
from isobatch.deployments.models.regions import as_map
from isobatch.deployments.models.spans import Spans

HEAD_SCALE = 4  # of heat maps over tokens, where the head is the classic one: two convolutions that double the sides


def sides_of(config: Any) -> tuple[int, int]:
    inner = config.backbone_config
    height, width = (side // patch for side, patch in zip(inner.image_size, inner.patch_size, strict=True))
    return height, width


def task_of(config: Any) -> Keypoints:
    (height, width), scale = sides_of(config), config.scale_factor if config.use_simple_decoder else HEAD_SCALE
    return Keypoints((height * scale, width * scale), tuple(config.backbone_config.image_size))


class _Head(nn.Module):
    """From tokens to a row for each point, its heat map."""

    def __init__(self, norm: nn.Module, decode: nn.Module, sides: tuple[int, int]) -> None:
        super().__init__()
        self.norm, self.decode, self._sides = norm, decode, sides

    def forward(self, tokens: Tensor) -> Tensor:
        maps: Tensor = self.decode(as_map(self.norm(tokens), self._sides))
        return maps.flatten(2).flatten(0, 1)


def _block(layer: Any, hidden: Tensor, _: Spans | None) -> Tensor:
    """Of ViTPose++ the experts for COCO's points, its first data set."""
    of_data_set = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device) if layer.num_experts > 1 else None
    after: Tensor = layer(hidden, of_data_set)
    return after


def vitpose(model: Any) -> Anatomy:
    """A layer is a block, up to the one that the head reads."""
    backbone, inner = model.backbone, model.config.backbone_config
    layers = backbone.encoder.layer[: backbone.stage_names.index(backbone.out_features[-1])]
    height, width = sides_of(model.config)
    head = _Head(backbone.layernorm, model.head, (height, width))
    return Anatomy(
        embed=lambda arrays: backbone.embeddings(arrays["pixel_values"]),
        blocks=[partial(_block, layer) for layer in layers],
        head=head,
        pool=lambda hidden, _: hidden.float(),
        pooled_widths=[height * width * inner.hidden_size] * len(layers),
        task=task_of(model.config),
        bridge=lambda block: _bridge(model, head),
    )


def _bridge(model: Any, head: _Head) -> nn.Module:
    inner = model.config.backbone_config
    norm = nn.LayerNorm(inner.hidden_size, eps=inner.layer_norm_eps)
    bridge = _Head(norm, type(model.head)(model.config), sides_of(model.config))
    bridge.load_state_dict(head.state_dict())
    return bridge


FAMILIES = (Family(("vitpose",), "image", vitpose, map_task=task_of),)
