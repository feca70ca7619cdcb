"""Residual convolutional networks: each residual layer is a block, and blocks differ in shape."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family
from isobatch.deployments.models.spans import Spans


def dissect(model: Any) -> Anatomy:
    base = model.base_model
    layers = [layer for stage in base.encoder.stages for layer in stage.layers]
    return Anatomy(
        embed=lambda arrays: base.embedder(arrays["pixel_values"]),
        blocks=[_block(layer) for layer in layers],
        head=lambda hidden: model.classifier(base.pooler(hidden)),
        pool=lambda hidden, _: hidden.float().mean(dim=(2, 3)),
        pooled_widths=[layer.layer[-1].convolution.out_channels for layer in layers],
    )


def _block(layer: nn.Module) -> Callable[[Tensor, Spans | None], Tensor]:
    return lambda hidden, _: layer(hidden)


FAMILY = Family(("resnet",), "image", dissect)
