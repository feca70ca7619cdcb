"""DeBERTa, the second and the third: what a token is and where it stands meet in attention, each with the other."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deployments.models.anatomy import Anatomy, Family, pool_tokens
from deployments.models.attention import attended
from deployments.models.spans import Spans
from profiles.errors import UserError


def dissect(model: Any) -> Anatomy:
    base = model.base_model
    if base.encoder.conv is not None:
        raise UserError("DeBERTa with a convolution after its first layer (conv_kernel_size) is not supported")

    def embed(arrays: Mapping[str, Tensor]) -> Tensor:
        told = {"token_type_ids": torch.zeros_like(arrays["input_ids"]), **arrays}
        hidden: Tensor = base.embeddings(**{name: each.unsqueeze(0) for name, each in told.items()})
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
        seen = attended((query, key, value), spans, scaling, bias)
        after = layer.attention.output(seen, hidden)
        output: Tensor = layer.output(layer.intermediate(after), after)
        return output

    return run


class _Bias:
    """What queries make of where keys stand (c2p), and keys of where queries stand (p2c): as Hugging Face has it."""

    def __init__(self, encoder: Any, attention: Any, scaling: float) -> None:
        # Not above: the import takes seconds, and every family's file is read, whichever is served.
        from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

        self._bucket = make_log_bucket_position
        self._encoder, self._attention, self._scaling = encoder, attention, scaling
        shared, kinds = attention.share_att_key, attention.pos_att_type
        self._of_keys = (attention.key_proj if shared else attention.pos_key_proj) if "c2p" in kinds else None
        self._of_queries = (attention.query_proj if shared else attention.pos_query_proj) if "p2c" in kinds else None

    def __call__(self, query: Tensor, key: Tensor, apart: Tensor) -> Tensor:
        buckets, most = self._attention.position_buckets, self._attention.max_relative_positions
        away = self._bucket(apart, buckets, most).long() if buckets > 0 and most > 0 else apart
        found = torch.zeros((), dtype=query.dtype, device=query.device)
        if self._of_keys:
            found = found + self._looked_up(query, self._of_keys, away)
        if self._of_queries:
            found = found + self._looked_up(key, self._of_queries, -away).transpose(-1, -2)
        return found * self._scaling

    def _looked_up(self, rows: Tensor, part: Any, away: Tensor) -> Tensor:
        """Scores of rows against all places, and of these the one that lies so far away."""
        span = self._attention.pos_ebd_size
        places = _by_head(self._attention, part(self._places(rows.device)[: 2 * span])).transpose(0, 1)
        scores = rows @ places.transpose(-1, -2)
        at = (away + span).clamp(0, 2 * span - 1)
        return scores.gather(-1, at + (0 * rows[..., :1]).long())  # as many times as there are texts and heads

    def _places(self, device: torch.device) -> Tensor:
        table = self._encoder.rel_embeddings
        places: Tensor = table(torch.arange(table.num_embeddings, device=device))
        return self._encoder.LayerNorm(places) if "layer_norm" in self._encoder.norm_rel_ebd else places


def _by_head(attention: Any, rows: Tensor) -> Tensor:
    return torch.unflatten(rows, -1, (attention.num_attention_heads, attention.attention_head_size))


FAMILY = Family(("deberta-v2",), "text", dissect)
