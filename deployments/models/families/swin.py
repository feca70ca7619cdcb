"""Swin transformers: attention inside windows; the last block of a stage includes the downsampling behind it."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family
from isobatch.deployments.models.spans import Spans

Size = tuple[int, int]
SwinBlock = Callable[[Tensor, Spans | None], Tensor]


def dissect(model: Any) -> Anatomy:
    base = model.base_model
    blocks, widths = zip(*_blocks(base), strict=True)
    return Anatomy(
        embed=lambda arrays: base.embeddings(arrays["pixel_values"])[0],
        blocks=blocks,
        head=lambda hidden: model.classifier(base.layernorm(hidden).mean(dim=1)),
        pool=lambda hidden, _: hidden.float().mean(dim=1),
        pooled_widths=widths,
    )


def _blocks(base: Any) -> Iterator[tuple[SwinBlock, int]]:
    """Every layer of every stage, with the width of its output."""
    height, width = base.embeddings.patch_grid
    for number, stage in enumerate(base.encoder.layers):
        channels = base.config.embed_dim * 2**number
        for layer in stage.blocks:
            downsampling = stage.downsample if layer is stage.blocks[-1] else None
            yield _block(layer, downsampling, (height, width)), channels * (1 if downsampling is None else 2)
        height, width = (height + 1) // 2, (width + 1) // 2


def _block(layer: nn.Module, downsampling: nn.Module | None, size: Size) -> SwinBlock:
    def run(hidden: Tensor, spans: Spans | None) -> Tensor:
        after: Tensor = layer(hidden, size)[0]
        return after if downsampling is None else downsampling(after, size)

    return run


FAMILY = Family(("swin",), "image", dissect)
