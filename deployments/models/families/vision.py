"""Vision transformers (ViT, DeiT, Swin), and residual networks of convolutions (ResNet, ConvNeXt)."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family, call_transformer_layer, transformer
from isobatch.deployments.models.spans import Spans

ImageBlock = Callable[[Tensor, Spans | None], Tensor]


def vit(model: Any) -> Anatomy:
    """Patches as tokens, pre-normalised layers, a linear head on the class token.

    DeiT has a second token, which learned from another network, with its own head; the answer is the mean of both.
    """
    base, is_distilled = model.base_model, hasattr(model, "distillation_classifier")

    def head(hidden: Tensor) -> Tensor:
        last = base.layernorm(hidden)
        if is_distilled:
            both: Tensor = (model.cls_classifier(last[:, 0]) + model.distillation_classifier(last[:, 1])) / 2
            return both
        answer: Tensor = model.classifier(last[:, 0])
        return answer

    blocks = [call_transformer_layer(layer) for layer in base.layers]
    return transformer(model, lambda arrays: base.embeddings(arrays["pixel_values"]), blocks, head)


def swin(model: Any) -> Anatomy:
    """Attention inside windows; the last block of a stage includes the downsampling after it."""
    base = model.base_model
    blocks, widths = zip(*_swin_blocks(base), strict=True)
    return Anatomy(
        embed=lambda arrays: base.embeddings(arrays["pixel_values"])[0],
        blocks=blocks,
        head=lambda hidden: model.classifier(base.layernorm(hidden).mean(dim=1)),
        pool=lambda hidden, _: hidden.float().mean(dim=1),
        pooled_widths=widths,
    )


def _swin_blocks(base: Any) -> Iterator[tuple[ImageBlock, int]]:
    """Every layer of every stage, with the width of its output."""

    def block(layer: nn.Module, downsampling: nn.Module | None, size: tuple[int, int]) -> ImageBlock:
        def run(hidden: Tensor, _: Spans | None) -> Tensor:
            after: Tensor = layer(hidden, size)[0]
            return after if downsampling is None else downsampling(after, size)

        return run

    size = base.config.image_size
    sides, patches = (size, size) if isinstance(size, int) else size, base.embeddings.patch_embeddings.patch_size
    # Swin fills up the last patch of a row and of a column.
    height, width = (-(-side // patch) for side, patch in zip(sides, patches, strict=True))
    for number, stage in enumerate(base.encoder.layers):
        channels = base.config.embed_dim * 2**number
        for layer in stage.blocks:
            downsampling = stage.downsample if layer is stage.blocks[-1] else None
            yield block(layer, downsampling, (height, width)), channels * (1 if downsampling is None else 2)
        height, width = (height + 1) // 2, (width + 1) // 2


def convolutional(model: Any) -> Anatomy:
    """ResNet and ConvNeXt: each residual layer is a block."""
    base = model.base_model
    layers = [layer for stage in base.encoder.stages for layer in residual_layers(stage)]
    widths = [
        width for stage, width in zip(base.encoder.stages, model.config.hidden_sizes, strict=True) for _ in stage.layers
    ]
    embed = base.embedder if hasattr(base, "embedder") else base.embeddings

    def block(layer: nn.Module) -> ImageBlock:
        return lambda hidden, _: layer(hidden)

    def head(hidden: Tensor) -> Tensor:
        pooled = base.pooler(hidden) if hasattr(base, "pooler") else base.layernorm(hidden.mean([-2, -1]))
        answer: Tensor = model.classifier(pooled)
        return answer

    return Anatomy(
        embed=lambda arrays: embed(arrays["pixel_values"]),
        blocks=[block(layer) for layer in layers],
        head=head,
        pool=lambda hidden, _: hidden.float().mean(dim=(2, 3)),
        pooled_widths=widths,
    )


def residual_layers(stage: Any) -> list[nn.Module]:
    """The layers of a stage. The first one includes the stage's downsampling, which ConvNeXt has."""
    first, *others = stage.layers
    return [nn.Sequential(*getattr(stage, "downsampling_layer", ()), first), *others]


FAMILIES = (
    Family(("vit", "deit"), "image", vit),
    Family(("swin",), "image", swin),
    Family(("resnet", "convnext", "convnextv2"), "image", convolutional, any_size=True),
)
