"""Attention inside each text of a packed batch, in place of Hugging Face's own attention."""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from isobatch.deployments.models.spans import Band, Spans

ATTENTION_NAME = "isobatch"  # the name under which Hugging Face knows our attention
FUSED_WIDTH_MULTIPLE = 8  # Torch's fused kernel needs heads whose width is a multiple of this
FUSED_CAPABILITY = (8, 0)  # Torch's fused kernel needs this compute capability (Ampere) or a newer one

QueryKeyValue = tuple[Tensor, Tensor, Tensor]
# Computes a bias for attention scores from queries and keys (texts x heads x tokens x width) and from the distance of
# each token to each other one (tokens x tokens).
Bias = Callable[[Tensor, Tensor, Tensor], Tensor]


def replace_attention(model: Any) -> None:
    """Let the model's blocks take `Spans` as their mask. Calls with any other mask work as before."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, attend)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    model.set_attn_implementation(ATTENTION_NAME)


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for this device and precision that needs no padding at all."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return has_kernel() and torch.cuda.get_device_capability(device) >= FUSED_CAPABILITY


@cache
def has_kernel(module: str = "torch.nn.attention.varlen") -> bool:
    """Whether this torch has the kernel, and the kernel takes the scale of the scores: that of torch 2.10 does not."""
    if find_spec(module) is None:
        return False
    return "scale" in signature(import_module(module).varlen_attn).parameters


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention that Hugging Face's layers call: query, key and value are 1 x heads x tokens x width."""
    if not isinstance(attention_mask, Spans):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output
    tokens = _mapped(lambda tensor: tensor.transpose(1, 2).squeeze(0), (query, key, value))
    window = options.get("sliding_window")
    bias = None if window is None else partial(_window_bias, window)
    return packed_attention(tokens, attention_mask, scaling, bias).unsqueeze(0), None


def _window_bias(window: int, query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
    """Hides tokens that are `window` or more positions away."""
    return hides(distance.abs() >= window, query.dtype)


def hides(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return hidden.to(dtype) * _masked_score(dtype)


def _masked_score(dtype: torch.dtype) -> float:
    """The addend that hides a score. Half of the smallest number, as two may be added without an overflow."""
    return torch.finfo(dtype).min / 2


def _mapped(function: Callable[[Tensor], Tensor], tensors: QueryKeyValue) -> QueryKeyValue:
    query, key, value = tensors
    return function(query), function(key), function(value)


def packed_attention(tokens: QueryKeyValue, spans: Spans, scaling: float | None, bias: Bias | None) -> Tensor:
    """Attention inside each text, from tokens x heads x width to tokens x (heads * width)."""
    if bias is None and spans.edges is not None and tokens[0].shape[-1] % FUSED_WIDTH_MULTIPLE == 0:
        return varlen(tokens, spans.edges, spans.longest, scaling).flatten(1)
    spans = spans.padded
    if not spans.bands:
        used = len(tokens[0]) - spans.spare
        side_by_side = _mapped(lambda tensor: torch.unflatten(tensor[:used], 0, (spans.count, -1)), tokens)
        text_bias = _with_distances(bias, side_by_side[0][0, :, 0, 0])
        output = _padded_attention(side_by_side, None, scaling, text_bias).flatten(0, 1)
        return functional.pad(output, (0, 0, 0, spans.spare)) if spans.spare else output
    rows = [_band_attention(tokens, band, scaling, bias) for band in spans.bands]
    assert spans.back is not None, "This is a bug: bands have a way back."
    return functional.embedding(spans.back, rows[0] if len(rows) == 1 else torch.cat(rows))


def _band_attention(tokens: QueryKeyValue, band: Band, scaling: float | None, bias: Bias | None) -> Tensor:
    heads = tokens[0].shape[1:]
    padded = _mapped(
        lambda tensor: torch.unflatten(functional.embedding(band.places, tensor.flatten(1)), -1, heads), tokens
    )
    text_bias = _with_distances(bias, band.present[0])
    return _padded_attention(padded, band.mask, scaling, text_bias).flatten(0, 1)


def _with_distances(bias: Bias | None, row: Tensor) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The bias for texts that are as long as this row. Positions are a running sum, as exporters freeze sizes."""
    if bias is None:
        return None
    positions = torch.ones_like(row, dtype=torch.int64).cumsum(0)
    distance = positions[:, None] - positions
    return lambda query, key: bias(query, key, distance)


def _padded_attention(
    padded: QueryKeyValue, mask: Tensor | None, scaling: float | None, bias: Callable[[Tensor, Tensor], Tensor] | None
) -> Tensor:
    """Attention from texts x tokens x heads x width to texts x tokens x (heads * width)."""
    query, key, value = _mapped(lambda tensor: tensor.transpose(1, 2), padded)
    if bias:
        mask = _biased(mask, bias(query, key))
    if is_one_node(query):
        if mask is not None and not bias:  # a row for each query; from the mask alone, so that all blocks share it
            mask = mask + torch.zeros_like(mask).transpose(2, 3)
        rows = _mapped(lambda tensor: tensor.flatten(2), padded)
        output: Tensor = _OneNode.apply(*rows, mask, int(query.shape[1]), scaling)  # type: ignore[no-untyped-call]
        return output
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.transpose(1, 2).flatten(2)


def is_one_node(query: Tensor) -> bool:
    """Whether attention becomes one node of an exported graph: not on a CPU, whose answers would change in rounding."""
    return torch.onnx.is_in_onnx_export() and query.is_cuda


class _OneNode(torch.autograd.Function):
    """Attention from texts x tokens x (heads * width) to the same, which ONNX Runtime has fused kernels for."""

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, heads: int, scaling: float | None
    ) -> Tensor:
        padded = _mapped(lambda tensor: torch.unflatten(tensor, 2, (heads, -1)).transpose(1, 2), (query, key, value))
        output = functional.scaled_dot_product_attention(*padded, attn_mask=mask, scale=scaling)
        return output.transpose(1, 2).flatten(2)

    @staticmethod
    def symbolic(graph: Any, query: Any, key: Any, value: Any, mask: Any, heads: int, scaling: float | None) -> Any:
        absent = graph.op("prim::Constant").setType(torch._C.OptionalType.ofTensor())
        inputs = [query, key, value] if mask is None else [query, key, value, absent, absent, mask]
        scale = {} if scaling is None else {"scale_f": scaling}
        node = graph.op("com.microsoft::MultiHeadAttention", *inputs, num_heads_i=heads, **scale)
        return node.setType(query.type())


def _biased(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Bias and mask in one. Some backends have boolean masks, others have masks that are added to the scores."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, _masked_score(bias.dtype)) if mask.dtype == torch.bool else bias + mask


def varlen(tokens: QueryKeyValue, edges: Tensor, longest: int, scaling: float | None) -> Tensor:
    """Torch's kernel for texts of different lengths that lie one after another."""
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(*tokens, edges, edges, longest, longest, scale=scaling)
    assert isinstance(output, Tensor), "This is a bug: only the output was requested."
    return output
