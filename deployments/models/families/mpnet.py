"""MPNet: BERT's layers, with an attention bias that depends on the distance of two tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobatch.deployments.models.anatomy import Anatomy, Family, pool_tokens
from isobatch.deployments.models.attention import packed_attention
from isobatch.deployments.models.families.encoder import embedding
from isobatch.deployments.models.spans import Spans


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

    def bias(query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
        buckets = encoder.relative_position_bucket(-distance)
        pair_bias: Tensor = encoder.relative_attention_bias(buckets).permute(2, 0, 1)
        return pair_bias.unsqueeze(0)

    def run(hidden: Tensor, spans: Spans | None) -> Tensor:
        assert spans, "This is a bug: texts have spans."
        query, key, value = (
            torch.unflatten(part(hidden), -1, heads) for part in (attention.q, attention.k, attention.v)
        )
        context = packed_attention((query, key, value), spans, bias=bias)
        after = layer.attention.LayerNorm(attention.o(context) + hidden)
        output: Tensor = layer.output(layer.intermediate(after), after)
        return output

    return run


FAMILY = Family(("mpnet",), "text", dissect)
