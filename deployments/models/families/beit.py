"""BEiT: a vision transformer whose attention has a bias for the relative positions of patches."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family, pool_tokens
from isobatch.deployments.models.spans import Spans


def dissect(model: Any) -> Anatomy:
    base = model.base_model
    return Anatomy(
        embed=lambda arrays: base.embeddings(arrays["pixel_values"]),
        blocks=[_block(base, layer) for layer in base.layers],
        head=lambda hidden: model.classifier(base.pooler(base.layernorm(hidden))),
        pool=pool_tokens,
        pooled_widths=[2 * model.config.hidden_size] * len(base.layers),
    )


def _block(base: Any, layer: nn.Module) -> Callable[[Tensor, Spans | None], Tensor]:
    size, patch = base.config.image_size, base.config.patch_size
    resolution = (size, size) if isinstance(size, int) else tuple(size)
    window = (resolution[0] // patch, resolution[1] // patch)

    def run(hidden: Tensor, spans: Spans | None) -> Tensor:
        shared = base.shared_position_bias and base.shared_position_bias(window, dim_size=hidden.shape[1])
        after: Tensor = layer(hidden, shared, resolution=resolution)
        return after

    return run


FAMILY = Family(("beit",), "image", dissect)
