"""MPNet: BERT's layers, with a bias by how far two tokens lie apart."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deployments.models.anatomy import Anatomy, Family, pool_tokens
from deployments.models.attention import attended
from deployments.models.families.encoder import embedding
from deployments.models.spans import Spans


def dissect(model: Any) -> Anatomy:
    encoder = model.base_model.encoder
    return Anatomy(
        embed=embedding(model.base_model),
        blocks=[_block(encoder, layer) for layer in encoder.layer],
        head=lambda hidden: model.classifier(hidden),
        pool=pool_tokens,
        pooled_widths=[2 * model.config.hidden_size] * len(encoder.layer),
    )


def _block(encoder: Any, layer: Any) -> Callable[[Tensor, Spans | None], Tensor]:
    attention = layer.attention.attn
    heads = (attention.num_attention_heads, attention.attention_head_size)

    def bias(query: Tensor, key: Tensor, apart: Tensor) -> Tensor:
        buckets = encoder.relative_position_bucket(-apart)
        of_pairs: Tensor = encoder.relative_attention_bias(buckets).permute(2, 0, 1)
        return of_pairs.unsqueeze(0)

    def run(hidden: Tensor, spans: Spans | None) -> Tensor:
        assert spans, "This is a bug: texts have spans."
        query, key, value = (
            torch.unflatten(part(hidden), -1, heads) for part in (attention.q, attention.k, attention.v)
        )
        seen = attended((query, key, value), spans, bias=bias)
        after = layer.attention.LayerNorm(attention.o(seen) + hidden)
        output: Tensor = layer.output(layer.intermediate(after), after)
        return output

    return run


FAMILY = Family(("mpnet",), "text", dissect)
