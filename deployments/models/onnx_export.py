"""Exports a block range of a network on torch as one ONNX graph, which includes its ramps and the head.

The exporter is torch's older one, which traces TorchScript: on BERT, ViT and ResNet it took half as long as the newer
one or less, its graphs ran as fast or faster, and it needs `onnx` only.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.deployments.models.served_model import BlockRange, RangeOutput
from isobatch.deployments.models.spans import PLACES, POSITIONS, MaskOf, Spans, example, is_of_spans
from isobatch.profiles.measure import modules_run

OPSET = 17  # the version of ONNX operators that graphs are written in
# Names of a graph's inputs and outputs: the hidden state before its blocks, the one after them, the head's logits.
HIDDEN = "hidden"
AFTER = "after"
HEAD = "head"
OF_TEXTS = ("starts", "order")  # inputs that only ramps and heads read: the place of each text
Compute = Callable[[BlockRange, Mapping[str, Tensor], Spans | None, MaskOf], RangeOutput]

# Exports run one at a time: the exporter keeps its state in globals, and so does the hook that records modules.
_EXPORTING = Lock()


def ramp_name(block: int) -> str:
    return f"ramp{block}"


def export(compute: Compute, block_range: BlockRange, inputs: Mapping[str, Tensor], path: Path) -> None:
    """Write the graph. `inputs` is an example of its inputs: only the numbers of inputs and tokens may vary later."""
    inputs = _generic_example(inputs)
    with _EXPORTING, torch.no_grad(), warnings.catch_warnings():
        with modules_run() as modules:
            outputs = named_outputs(_call(compute, block_range, inputs))
        traced = _Traced(compute, block_range, list(inputs), list(modules))
        warnings.simplefilter("ignore")  # the exporter warns of tracing and of its own deprecation
        torch.onnx.export(
            traced,
            tuple(inputs.values()),
            path,
            dynamo=False,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=_free_axes({**inputs, **outputs}, texts=_has_texts(inputs)),
        )


def named_outputs(output: RangeOutput) -> dict[str, Tensor]:
    hidden = {} if output.hidden is None else {AFTER: output.hidden}
    head = {} if output.head is None else {HEAD: output.head}
    return hidden | {ramp_name(block): logits for block, logits in output.ramps.items()} | head


class _Traced(nn.Module):
    """Owns the modules that run, so that their weights become initializers of the graph instead of constants."""

    def __init__(self, compute: Compute, block_range: BlockRange, names: list[str], modules: list[nn.Module]) -> None:
        super().__init__()
        self.owned = nn.ModuleList(modules)
        self._compute, self._block_range, self._names = compute, block_range, names
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(self._names, tensors, strict=True))
        return tuple(named_outputs(_call(self._compute, self._block_range, inputs)).values())


def _call(compute: Compute, block_range: BlockRange, inputs: Mapping[str, Tensor]) -> RangeOutput:
    return compute(block_range, *split_graph_inputs(inputs), _additive_mask)


def graph_inputs(arrays: Mapping[str, Tensor], spans: Spans | None) -> Mapping[str, Tensor]:
    return arrays if spans is None else {**arrays, **spans.tensors()}


def split_graph_inputs(inputs: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Spans | None]:
    """Arrays and spans from the inputs of a graph: the inverse of `graph_inputs`."""
    arrays = {name: tensor for name, tensor in inputs.items() if not is_of_spans(name)}
    return arrays, Spans.of(inputs) if _has_texts(inputs) else None


def _has_texts(inputs: Mapping[str, Tensor]) -> bool:
    return any(is_of_spans(name) for name in inputs)


def _generic_example(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """An example without special cases that the tracer would freeze: no batch of one, no empty band."""
    if not _has_texts(inputs):
        return {name: torch.cat((tensor, tensor)) for name, tensor in inputs.items()}
    arrays, _ = split_graph_inputs(inputs)
    count = sum(name.startswith(PLACES) for name in inputs)
    spans, tokens = example(next(iter(arrays.values())).device, count)
    return graph_inputs({name: torch.cat([each[:1]] * tokens) for name, each in arrays.items()}, spans)


def _additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to the scores, as the exporter turns a boolean mask into float32 in any network."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


def _free_axes(tensors: Mapping[str, Tensor], texts: bool) -> dict[str, dict[int, str]]:
    """The axes whose size may vary: axis 0 counts tokens or inputs, and images may have any height and width."""
    axes, tokens = {}, len(tensors[POSITIONS]) if texts else None
    for name, tensor in tensors.items():
        axes[name] = {0: "tokens" if len(tensor) == tokens else "inputs"}
        if is_of_spans(name) and tensor.ndim == 2:
            axes[name] = {0: f"inputs{name[-1]}", 1: f"longest{name[-1]}"}
        elif tensor.ndim == 4:
            axes[name] |= {2: f"{name}_height", 3: f"{name}_width"}
    return axes


def in_8_bits(graph: Path) -> None:
    """Turn the weights of the blocks' dense layers into 8-bit integers with one scale per channel.

    Activations are scaled at run time. Ramps and head stay as they are, since they decide on exits and cost little. A
    ramp's weights include the scales of its features, whose range is so wide that 8 bits would round the small ones to
    zero.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    exact = graph.with_name("exact.onnx")
    graph.rename(exact)
    model = onnx.load(exact, load_external_data=False)
    _read_weights_directly(model.graph)
    onnx.save(model, exact)
    # The quantiser renames a Gemm to MatMul first.
    heads = [f"{node.name}{suffix}" for node in _of_heads(model.graph.node) for suffix in ("", "_MatMul")]
    with _without_advice():
        quantize_dynamic(
            exact,
            graph,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=["MatMul"],
            nodes_to_exclude=heads,
        )
    exact.unlink()


def _read_weights_directly(graph: Any) -> None:
    """Where layers run repeatedly, the exporter writes their weights once, and Identity nodes that copy them. The
    quantiser would not take these copies for weights."""
    weights = {each.name for each in graph.initializer}
    copies = [node for node in graph.node if node.op_type == "Identity" and node.input[0] in weights]
    originals = {node.output[0]: node.input[0] for node in copies}
    for node in copies:
        graph.node.remove(node)
    for node in graph.node:
        node.input[:] = [originals.get(name, name) for name in node.input]


def _of_heads(nodes: Iterable[Any]) -> list[Any]:
    """The nodes of a graph that belong to ramps and head.

    Of texts they read what is gathered by the places of texts in the batch. Everywhere, their linear layers are Gemm
    nodes with transposed weights: blocks run layers per token, which become MatMul, or a Gemm of GPT-2's weights.
    """
    heads, gathered = list[Any](), set(OF_TEXTS)
    for node in nodes:
        if not gathered.isdisjoint(node.input):
            gathered.update(node.output)
            heads.append(node)
        elif node.op_type == "Gemm" and any(each.name == "transB" and each.i for each in node.attribute):
            heads.append(node)
    return heads


@contextmanager
def _without_advice() -> Iterator[None]:
    """Hide the quantiser's advice to preprocess graphs, which gains nothing here. It goes to the root logger."""
    root = logging.getLogger()
    root.addFilter(_is_no_advice)
    try:
        yield
    finally:
        root.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "pre-processing before quantization" not in record.getMessage()
