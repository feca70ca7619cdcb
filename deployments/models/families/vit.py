"""Vision transformers: patches as tokens, pre-normalised layers, a linear head on the class token."""

from typing import Any

from deployments.models.anatomy import Anatomy, Family, call_transformer_layer, pool_tokens


def dissect(model: Any) -> Anatomy:
    base = model.base_model
    return Anatomy(
        embed=lambda arrays: base.embeddings(arrays["pixel_values"]),
        blocks=[call_transformer_layer(layer) for layer in base.layers],
        head=lambda hidden: model.classifier(base.layernorm(hidden)[:, 0]),
        pool=pool_tokens,
        pooled_widths=[2 * model.config.hidden_size] * len(base.layers),
    )


FAMILY = Family(("vit",), "image", dissect)
