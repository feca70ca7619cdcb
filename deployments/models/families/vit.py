"""Vision transformers: patches as tokens, pre-normalised layers, a linear head on the class token.

DeiT has a second token, which learned from another network, with its own head; the answer is the mean of both heads.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isobatch.deployments.models.anatomy import Anatomy, Family, call_transformer_layer, pool_tokens


def dissect(model: Any) -> Anatomy:
    base = model.base_model
    return Anatomy(
        embed=lambda arrays: base.embeddings(arrays["pixel_values"]),
        blocks=[call_transformer_layer(layer) for layer in base.layers],
        head=_head(model),
        pool=pool_tokens,
        pooled_widths=[2 * model.config.hidden_size] * len(base.layers),
    )


def _head(model: Any) -> Callable[[Tensor], Tensor]:
    norm = model.base_model.layernorm
    if not hasattr(model, "distillation_classifier"):
        return lambda hidden: model.classifier(norm(hidden)[:, 0])

    def mean_of_both(hidden: Tensor) -> Tensor:
        last = norm(hidden)
        both: Tensor = (model.cls_classifier(last[:, 0]) + model.distillation_classifier(last[:, 1])) / 2
        return both

    return mean_of_both


FAMILY = Family(("vit", "deit"), "image", dissect)
