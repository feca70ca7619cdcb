"""The weights of a graph's dense layers as 8-bit integers, for CPUs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def in_8_bits(graph: Path) -> None:
    """Weights of the blocks' dense layers become 8-bit integers, one scale a channel; activations scale at run time.

    Ramps and head stay as they are: they cost next to nothing, and decide. A ramp's weights hold the
    scales of its features, which lie so far apart that 8 bits would leave nothing of the small ones.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    exact = graph.with_name("exact.onnx")
    graph.rename(exact)
    nodes = onnx.load(exact, load_external_data=False).graph.node
    # What is not run by token is a Gemm here, and a MatMul of this name to the quantiser.
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
    """The quantiser recommends a preparation that brings nothing here, through everybody's logger."""
    root = logging.getLogger()
    root.addFilter(_is_no_advice)
    try:
        yield
    finally:
        root.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "pre-processing before quantization" not in record.getMessage()
