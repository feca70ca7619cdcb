"""ModernBERT: rotary position embeddings, and most layers attend to a window of neighbours only."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isobatch.deployments.models.anatomy import Anatomy, Family, first_tokens, pool_tokens
from isobatch.deployments.models.attention import replace_attention
from isobatch.deployments.models.spans import Spans


def dissect(model: Any) -> Anatomy:
    replace_attention(model)
    base = model.base_model
    return Anatomy(
        embed=lambda arrays: base.embeddings(arrays["input_ids"]),
        blocks=[_block(base, layer) for layer in base.layers],
        head=lambda hidden: model.classifier(model.head(hidden[:, 0])),
        pool=pool_tokens,
        pooled_widths=[2 * model.config.hidden_size] * len(base.layers),
        gather=_mean if model.config.classifier_pooling == "mean" else first_tokens,
    )


def _block(base: Any, layer: Any) -> Callable[[Tensor, Spans | None], Tensor]:
    last = layer is base.layers[-1]

    def run(hidden: Tensor, spans: Spans | None) -> Tensor:
        assert spans, "This is a bug: texts have spans."
        row = hidden.unsqueeze(0)
        rotary = base.rotary_emb(row, spans.positions.unsqueeze(0), layer.attention_type)
        after: Tensor = layer(row, attention_mask=spans, position_embeddings=rotary).squeeze(0)
        return base.final_norm(after) if last else after

    return run


def _mean(hidden: Tensor, spans: Spans) -> Tensor:
    return spans.mean(hidden).unsqueeze(1)


FAMILY = Family(("modernbert",), "text", dissect)
