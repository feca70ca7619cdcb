"""Attention among the tokens of each text of a packed batch, in place of Hugging Face's own."""

from collections.abc import Callable
from functools import partial
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
# What is added to the scores of texts side by side, from their queries and keys (texts x heads x tokens x width), and
# from how far each token stands behind each other one (tokens x tokens).
Bias = Callable[[Tensor, Tensor, Tensor], Tensor]


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
    window = told.get("sliding_window")
    bias = None if window is None else partial(_outside, window)
    return attended(tokens, attention_mask, scaling, bias).unsqueeze(0), None


def _outside(window: int, query: Tensor, key: Tensor, apart: Tensor) -> Tensor:
    """Tokens do not see those that lie so far from them, or further."""
    return (apart.abs() >= window).to(query.dtype) * _unseen(query.dtype)


def _unseen(dtype: torch.dtype) -> float:
    """What is added to a score that must not count; the sum of two is still a number."""
    return torch.finfo(dtype).min / 2


def _each(made: Callable[[Tensor], Tensor], given: Three) -> Three:
    query, key, value = given
    return made(query), made(key), made(value)


def attended(tokens: Three, spans: Spans, scaling: float | None = None, bias: Bias | None = None) -> Tensor:
    """Queries, keys and values are tokens x heads x width; what comes out is tokens x (heads * width)."""
    if bias is None and spans.edges is not None and tokens[0].shape[-1] % WHOLE == 0:
        return varlen(tokens, spans.edges, spans.longest, scaling).flatten(1)
    if not spans.bands:
        side_by_side = _each(lambda each: torch.unflatten(each, 0, (spans.count, -1)), tokens)
        added = _placed(bias, side_by_side[0][0, :, 0, 0])
        return _among_texts(side_by_side, None, scaling, added).flatten(0, 1)
    rows = [_in_band(tokens, band, scaling, bias) for band in spans.bands]
    assert spans.back is not None, "This is a bug: bands have a way back."
    return functional.embedding(spans.back, rows[0] if len(rows) == 1 else torch.cat(rows))


def _in_band(tokens: Three, band: Band, scaling: float | None, bias: Bias | None) -> Tensor:
    heads = tokens[0].shape[1:]
    padded = _each(lambda each: torch.unflatten(functional.embedding(band.places, each.flatten(1)), -1, heads), tokens)
    added = _placed(bias, band.present[0])
    return _among_texts(padded, band.mask, scaling, added).flatten(0, 1)


def _placed(bias: Bias | None, row: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The bias of texts as long as this row. Places are counted up, since exporters take a size for a constant."""
    if bias is None:
        return None
    places = torch.ones_like(row, dtype=torch.int64).cumsum(0)
    apart = places[:, None] - places
    return lambda query, key: bias(query, key, apart)


def _among_texts(
    padded: Three, mask: Tensor | None, scaling: float | None, bias: Callable[[Tensor, Tensor], Tensor] | None
) -> Tensor:
    """From texts x tokens x heads x width to texts x tokens x (heads * width)."""
    query, key, value = _each(lambda each: each.transpose(1, 2), padded)
    if bias:
        mask = _biased(mask, bias(query, key))
    seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return seen.transpose(1, 2).flatten(2)


def _biased(mask: Tensor | None, bias: Tensor) -> Tensor:
    """A bias where a mask lets a token be seen. Backends have masks of truths, or of what is added to scores."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, _unseen(bias.dtype)) if mask.dtype == torch.bool else bias + mask


def varlen(tokens: Three, edges: Tensor, longest: int, scaling: float | None) -> Tensor:
    """Torch's kernel for texts of any lengths, one after another."""
    from torch.nn.attention.varlen import varlen_attn

    found = varlen_attn(*tokens, edges, edges, longest, longest, scale=scaling)
    assert isinstance(found, Tensor), "This is a bug: nothing else was asked for."
    return found
