"""The weights of a graph's dense layers as 8-bit integers, for CPUs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def in_8_bits(graph: Path) -> None:
    """Turn the weights of the blocks' dense layers into 8-bit integers with one scale per channel.

    Activations are scaled at run time. Ramps and head stay as they are: they decide, and cost next to nothing. A ramp's
    weights include the scales of its features, whose range is so wide that 8 bits would round the small ones to zero.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    exact = graph.with_name("exact.onnx")
    graph.rename(exact)
    nodes = onnx.load(exact, load_external_data=False).graph.node
    # Layers that do not run per token are Gemm nodes in the graph; the quantiser renames them to MatMul first.
    heads = [f"{node.name}{suffix}" for node in nodes if node.op_type == "Gemm" for suffix in ("", "_MatMul")]
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


@contextmanager
def _without_advice() -> Iterator[None]:
    """Hide the quantiser's advice to preprocess graphs, which brings nothing here. It goes to the root logger."""
    root = logging.getLogger()
    root.addFilter(_is_no_advice)
    try:
        yield
    finally:
        root.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "pre-processing before quantization" not in record.getMessage()
