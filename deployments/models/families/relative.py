"""Text encoders whose attention has a bias that depends on the distance of two tokens: MPNet, and DeBERTa V2 and V3."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family, transformer
from isobatch.deployments.models.attention import Bias, packed_attention
from isobatch.deployments.models.families.encoder import embedding
from isobatch.deployments.models.spans import Spans
from isobatch.profiles.errors import UserError

BUCKETS = 32  # of distances between tokens in MPNet: transformers reads as many, whatever a configuration says


def mpnet(model: Any) -> Anatomy:
    encoder = model.base_model.encoder
    if (buckets := model.config.relative_attention_num_buckets) < BUCKETS:
        raise UserError(
            f"relative_attention_num_buckets is {buckets}: transformers reads {BUCKETS}, so it must be {BUCKETS}"
        )

    def bias(query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
        buckets = encoder.relative_position_bucket(-distance)
        pair_bias: Tensor = encoder.relative_attention_bias(buckets).permute(2, 0, 1)
        return pair_bias.unsqueeze(0)

    def block(layer: Any) -> Callable[[Tensor, Spans | None], Tensor]:
        own = layer.attention.attn
        heads = (own.num_attention_heads, own.attention_head_size)

        def add(context: Tensor, hidden: Tensor) -> Tensor:
            after: Tensor = layer.attention.LayerNorm(own.o(context) + hidden)
            return after

        return _block(layer, (own.q, own.k, own.v), heads, add, None, bias)

    return transformer(
        model,
        embedding(model.base_model, nn.Identity()),
        [block(layer) for layer in encoder.layer],
        lambda hidden: model.classifier(hidden),
    )


def deberta(model: Any) -> Anatomy:
    """Attention scores have a bias of content with relative position, in both directions."""
    base = model.base_model
    if base.encoder.conv is not None:
        raise UserError("DeBERTa with a convolution after its first layer (conv_kernel_size) is not supported")

    def block(layer: Any) -> Callable[[Tensor, Spans | None], Tensor]:
        own = layer.attention.self
        kinds = {*own.pos_att_type} & {"c2p", "p2c"}  # a third one, p2p, is in some configurations but is ignored
        scaling = (own.attention_head_size * (1 + len(kinds))) ** -0.5
        bias = _DebertaBias(base.encoder, own, scaling) if base.encoder.relative_attention else None
        heads = (own.num_attention_heads, own.attention_head_size)
        return _block(
            layer, (own.query_proj, own.key_proj, own.value_proj), heads, layer.attention.output, scaling, bias
        )

    return transformer(
        model,
        embedding(base, nn.Identity()),
        [block(layer) for layer in base.encoder.layer],
        lambda hidden: model.classifier(model.pooler(hidden)),
    )


def _block(
    layer: Any,
    projections: Sequence[nn.Module],
    heads: tuple[int, int],
    add: Callable[[Tensor, Tensor], Tensor],
    scaling: float | None,
    bias: Bias | None,
) -> Callable[[Tensor, Spans | None], Tensor]:
    """A block with our attention between the layer's own modules; `add` adds its output to the hidden state."""

    def run(hidden: Tensor, spans: Spans | None) -> Tensor:
        assert spans, "This is a bug: texts have spans."
        row = hidden.unsqueeze(0)  # as one long row of tokens, dense layers become products that int8 knows
        query, key, value = (torch.unflatten(project(row).squeeze(0), -1, heads) for project in projections)
        after = add(packed_attention((query, key, value), spans, scaling, bias).unsqueeze(0), row)
        output: Tensor = layer.output(layer.intermediate(after), after)
        return output.squeeze(0)

    return run


class _DebertaBias:
    """Scores of queries with relative positions of keys (c2p), and of keys with relative positions of queries (p2c).

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
        encoder, attention, span = self._encoder, self._attention, self._attention.pos_ebd_size
        table = encoder.rel_embeddings
        embeddings = table(torch.arange(table.num_embeddings, device=rows.device))
        if "layer_norm" in encoder.norm_rel_ebd:
            embeddings = encoder.LayerNorm(embeddings)
        heads = (attention.num_attention_heads, attention.attention_head_size)
        positions = torch.unflatten(projection(embeddings[: 2 * span]), -1, heads)
        scores = rows @ positions.transpose(0, 1).transpose(-1, -2)
        index = (offset + span).clamp(0, 2 * span - 1)
        # The sum repeats the index for all texts and heads.
        return scores.gather(-1, index + (0 * rows[..., :1]).long())


FAMILIES = (Family(("mpnet",), "text", mpnet), Family(("deberta-v2",), "text", deberta))
