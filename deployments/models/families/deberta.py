"""DeBERTa V2 and V3: attention scores have a bias of content with relative position, in both directions."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from isobatch.deployments.models.anatomy import Anatomy, Family, pool_tokens
from isobatch.deployments.models.attention import packed_attention
from isobatch.deployments.models.spans import Spans
from isobatch.profiles.errors import UserError


def dissect(model: Any) -> Anatomy:
    base = model.base_model
    if base.encoder.conv is not None:
        raise UserError("DeBERTa with a convolution after its first layer (conv_kernel_size) is not supported")

    def embed(arrays: Mapping[str, Tensor]) -> Tensor:
        inputs = {"token_type_ids": torch.zeros_like(arrays["input_ids"]), **arrays}
        hidden: Tensor = base.embeddings(**{name: tensor.unsqueeze(0) for name, tensor in inputs.items()})
        return hidden.squeeze(0)

    return Anatomy(
        embed=embed,
        blocks=[_block(base.encoder, layer) for layer in base.encoder.layer],
        head=lambda hidden: model.classifier(model.pooler(hidden)),
        pool=pool_tokens,
        pooled_widths=[2 * model.config.hidden_size] * len(base.encoder.layer),
    )


def _block(encoder: Any, layer: Any) -> Callable[[Tensor, Spans | None], Tensor]:
    attention = layer.attention.self
    scaling = (attention.attention_head_size * (1 + len(attention.pos_att_type))) ** -0.5
    bias = _Bias(encoder, attention, scaling) if encoder.relative_attention else None

    def run(hidden: Tensor, spans: Spans | None) -> Tensor:
        assert spans, "This is a bug: texts have spans."
        query, key, value = (
            _by_head(attention, part(hidden))
            for part in (attention.query_proj, attention.key_proj, attention.value_proj)
        )
        context = packed_attention((query, key, value), spans, scaling, bias)
        after = layer.attention.output(context, hidden)
        output: Tensor = layer.output(layer.intermediate(after), after)
        return output

    return run


class _Bias:
    """Scores of queries with relative positions of keys (c2p), and of keys with those of queries (p2c).

    The arithmetic is that of Hugging Face's implementation.
    """

    def __init__(self, encoder: Any, attention: Any, scaling: float) -> None:
        # Imported late: the import takes seconds, and the file of every family is read, whichever family is served.
        from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

        self._bucket = make_log_bucket_position
        self._encoder, self._attention, self._scaling = encoder, attention, scaling
        shared, kinds = attention.share_att_key, attention.pos_att_type
        self._key_projection = (attention.key_proj if shared else attention.pos_key_proj) if "c2p" in kinds else None
        self._query_projection = (
            (attention.query_proj if shared else attention.pos_query_proj) if "p2c" in kinds else None
        )

    def __call__(self, query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
        buckets, most = self._attention.position_buckets, self._attention.max_relative_positions
        offset = self._bucket(distance, buckets, most).long() if buckets > 0 and most > 0 else distance
        bias = torch.zeros((), dtype=query.dtype, device=query.device)
        if self._key_projection:
            bias = bias + self._position_scores(query, self._key_projection, offset)
        if self._query_projection:
            bias = bias + self._position_scores(key, self._query_projection, -offset).transpose(-1, -2)
        return bias * self._scaling

    def _position_scores(self, rows: Tensor, projection: Any, offset: Tensor) -> Tensor:
        """The score of each row with the projected embedding of each relative position in `offset`."""
        span = self._attention.pos_ebd_size
        positions = _by_head(self._attention, projection(self._position_embeddings(rows.device)[: 2 * span]))
        scores = rows @ positions.transpose(0, 1).transpose(-1, -2)
        index = (offset + span).clamp(0, 2 * span - 1)
        return scores.gather(
            -1, index + (0 * rows[..., :1]).long()
        )  # the sum repeats the index for all texts and heads

    def _position_embeddings(self, device: torch.device) -> Tensor:
        table = self._encoder.rel_embeddings
        embeddings: Tensor = table(torch.arange(table.num_embeddings, device=device))
        return self._encoder.LayerNorm(embeddings) if "layer_norm" in self._encoder.norm_rel_ebd else embeddings


def _by_head(attention: Any, rows: Tensor) -> Tensor:
    return torch.unflatten(rows, -1, (attention.num_attention_heads, attention.attention_head_size))


FAMILY = Family(("deberta-v2",), "text", dissect)
