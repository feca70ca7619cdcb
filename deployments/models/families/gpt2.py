"""GPT-2 as a classifier: a token sees those before it, so the head and the ramps read the last token of each text."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isobatch.deployments.models.anatomy import Anatomy, Family, transformer
from isobatch.deployments.models.attention import hides, packed_attention
from isobatch.deployments.models.spans import Spans


def gpt2(model: Any) -> Anatomy:
    base = model.base_model

    def embed(arrays: Mapping[str, Tensor]) -> Tensor:
        hidden: Tensor = base.wte(arrays["input_ids"]) + base.wpe(arrays["position_ids"])
        if (types := arrays.get("token_type_ids")) is not None:  # of BERT's tokenizer, as in Chinese networks
            hidden = hidden + base.wte(types)
        return hidden

    def block(layer: Any) -> Callable[[Tensor, Spans | None], Tensor]:
        own, is_last = layer.attn, layer is base.h[-1]

        def run(hidden: Tensor, spans: Spans | None) -> Tensor:
            assert spans, "This is a bug: texts have spans."
            parts = own.c_attn(layer.ln_1(hidden)).split(own.split_size, dim=-1)
            query, key, value = (torch.unflatten(part, -1, (own.num_heads, own.head_dim)) for part in parts)
            hidden = hidden + own.c_proj(packed_attention((query, key, value), spans, own.scaling, _hide_later))
            after: Tensor = hidden + layer.mlp(layer.ln_2(hidden))
            return base.ln_f(after) if is_last else after

        return run

    anatomy = transformer(
        model,
        embed,
        [block(layer) for layer in base.h],
        lambda hidden: model.score(hidden[:, 0]),
        lambda hidden, spans: spans.last(hidden).unsqueeze(1),
    )
    return replace(anatomy, pool=_last_and_mean)


def _hide_later(query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
    return hides(distance < 0, query.dtype)


def _last_and_mean(hidden: Tensor, spans: Spans | None) -> Tensor:
    assert spans, "This is a bug: texts have spans."
    hidden = hidden.float()
    return torch.cat((spans.last(hidden), spans.mean(hidden)), dim=1)


FAMILIES = (Family(("gpt2",), "text", gpt2, reads_last=True, reads_types=True),)
