"""Attention among the tokens of each text of a packed batch, in place of Hugging Face's own."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deployments.models.spans import Band, Spans

NAME = "isobatch"
WHOLE = 8  # a fused kernel wants heads whose width is a multiple of this
AMPERE = (8, 0)  # the first CUDA devices that have it

Three = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


def replace_attention(model: Any) -> None:
    """From now on the model's blocks may be given `Spans` where they take a mask. Called whole, it does as before."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel that needs no padding at all."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    known = find_spec("torch.nn.attention.varlen") is not None
    return known and torch.cuda.get_device_capability(device) >= AMPERE


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """What Hugging Face's layers call: query, key and value are 1 x heads x tokens x width."""
    if not isinstance(attention_mask, Spans):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **told
        )
        return whole
    tokens = _each(lambda given: given.transpose(1, 2).squeeze(0), (query, key, value))
    return _attended(tokens, attention_mask, scaling).unsqueeze(0), None


def _each(made: Callable[[Tensor], Tensor], given: Three) -> Three:
    query, key, value = given
    return made(query), made(key), made(value)


def _attended(tokens: Three, spans: Spans, scaling: float | None) -> Tensor:
    """Queries, keys and values are tokens x heads x width; what comes out is tokens x (heads * width)."""
    if spans.edges is not None and tokens[0].shape[-1] % WHOLE == 0:
        return varlen(tokens, spans.edges, spans.longest, scaling).flatten(1)
    if not spans.bands:
        side_by_side = _each(lambda each: torch.unflatten(each, 0, (spans.count, -1)), tokens)
        return _among_texts(side_by_side, None, scaling).flatten(0, 1)
    rows = [_in_band(tokens, band, scaling) for band in spans.bands]
    assert spans.back is not None, "This is a bug: bands have a way back."
    return functional.embedding(spans.back, rows[0] if len(rows) == 1 else torch.cat(rows))


def _in_band(tokens: Three, band: Band, scaling: float | None) -> Tensor:
    heads = tokens[0].shape[1:]
    padded = _each(lambda each: torch.unflatten(functional.embedding(band.places, each.flatten(1)), -1, heads), tokens)
    return _among_texts(padded, band.mask, scaling).flatten(0, 1)


def _among_texts(padded: Three, mask: Tensor | None, scaling: float | None) -> Tensor:
    """From texts x tokens x heads x width to texts x tokens x (heads * width)."""
    query, key, value = _each(lambda each: each.transpose(1, 2), padded)
    seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return seen.transpose(1, 2).flatten(2)


def varlen(tokens: Three, edges: Tensor, longest: int, scaling: float | None) -> Tensor:
    """Torch's kernel for texts of any lengths, one after another."""
    from torch.nn.attention.varlen import varlen_attn

    found = varlen_attn(*tokens, edges, edges, longest, longest, scale=scaling)
    assert isinstance(found, Tensor), "This is a bug: nothing else was asked for."
    return found
