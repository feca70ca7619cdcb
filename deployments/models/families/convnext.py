"""ConvNeXt and ConvNeXt V2: each residual layer is a block; the first block of a stage includes its downsampling."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family
from isobatch.deployments.models.spans import Spans


def dissect(model: Any) -> Anatomy:
    base = model.base_model
    stages = base.encoder.stages
    blocks = [
        _block(stage.downsampling_layer if first else (), layer)
        for stage in stages
        for first, layer in zip((True, *[False] * (len(stage.layers) - 1)), stage.layers, strict=True)
    ]
    widths = [width for stage, width in zip(stages, model.config.hidden_sizes, strict=True) for _ in stage.layers]
    return Anatomy(
        embed=lambda arrays: base.embeddings(arrays["pixel_values"]),
        blocks=blocks,
        head=lambda hidden: model.classifier(base.layernorm(hidden.mean([-2, -1]))),
        pool=lambda hidden, _: hidden.float().mean(dim=(2, 3)),
        pooled_widths=widths,
    )


def _block(downsampling: Any, layer: nn.Module) -> Callable[[Tensor, Spans | None], Tensor]:
    def run(hidden: Tensor, spans: Spans | None) -> Tensor:
        for step in downsampling:
            hidden = step(hidden)
        after: Tensor = layer(hidden)
        return after

    return run


FAMILY = Family(("convnext", "convnextv2"), "image", dissect)
