"""Latency tables from datasheets alone, by a roofline per kernel, for devices without any measurement.

A kernel has three times: its share of a launch, its arithmetic at the device's peak rate, and its traffic at the
memory's bandwidth. They overlap in part. The constants below were fitted to one device (an A100). A measured table
beats all of this.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from isobatch.profiles.devices import DeviceKind, known_kind
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import LatencyTable

KERNEL_S = 5e-6  # seconds: no kernel is faster
COMPUTE_SHARE = 0.75  # the share of the peak flops that a large matrix product reaches
MEMORY_SHARE = 0.80  # the share of the peak bandwidth that a stream reaches
# How the three times combine. 1: they add up; infinity: the longest one hides the others.
OVERLAP = 1.2
LAUNCH_S = 200e-6  # seconds to move a batch into and out of a device: an assumption, to be measured
BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
BYTES = {"float32": 4, "float16": 2}  # bytes of a number


@dataclass(frozen=True)
class Kernel:
    """One operation: arithmetic and moved numbers per input, and weights that are read once for a batch."""

    flops: float
    values: float
    weights: float = 0.0


@dataclass(frozen=True)
class Block:
    kernels: tuple[Kernel, ...]
    leaving: int  # numbers per input that the next block reads

    @property
    def weights(self) -> float:
        return sum(kernel.weights for kernel in self.kernels)


@dataclass(frozen=True)
class Shape:
    """A network's figures for a datasheet table; `ramps[k]` is the ramp after block k, empty for the last block."""

    name: str
    blocks: tuple[Block, ...]
    ramps: tuple[tuple[Kernel, ...], ...]
    length: int | None = None  # tokens per input; None where inputs have one size
    embedding: float = 0.0  # numbers in memory in addition to the blocks' weights
    family: str = "encoder"  # or "residual": networks of one family have similar kernels


def kernel_s(kernel: Kernel, batch: float, device: DeviceKind, dtype: str) -> float:
    """
    >>> from isobatch.profiles.devices import CATALOGUE
    >>> round(kernel_s(Kernel(0, 0), 1, CATALOGUE["v100"], "float16"), 9) == KERNEL_S
    True
    """
    peak = device.fp16_flops if dtype == "float16" else device.fp32_flops
    compute_s = batch * kernel.flops / (COMPUTE_SHARE * peak)
    traffic_bytes = (batch * kernel.values + kernel.weights) * BYTES[dtype]
    traffic_s = traffic_bytes / (MEMORY_SHARE * device.memory_bytes_per_s)
    seconds: float = sum(part**OVERLAP for part in (KERNEL_S, compute_s, traffic_s)) ** (1 / OVERLAP)
    return seconds


def datasheet_table(
    shape: Shape, kind: str, *, dtype: str | None = None, batch_sizes: Iterable[float] = BATCH_SIZES
) -> LatencyTable:
    """The latency table of `shape` by the datasheet of `kind`, in the best dtype of the device unless one is given."""
    device = known_kind(kind)
    dtype = dtype or device.best_dtype
    if dtype not in BYTES:
        raise UserError(f"unknown dtype {dtype!r}: choose among {', '.join(BYTES)}")

    def seconds(kernels: Sequence[Kernel], batch: float) -> float:
        return sum(kernel_s(kernel, batch, device, dtype) for kernel in kernels)

    source = f"datasheet: {shape.name} in {dtype}"
    return derived_table(shape, kind, batch_sizes, seconds, BYTES[dtype], launch_s=LAUNCH_S, source=source)


def derived_table(
    shape: Shape,
    kind: str,
    batch_sizes: Iterable[float],
    seconds: Callable[[Sequence[Kernel], float], float],
    number_bytes: int,
    **others: Any,
) -> LatencyTable:
    """The latency table of `shape`, given the seconds of kernels at a batch size; `others` are further fields of it."""
    sizes, embeddings = tuple(batch_sizes), [shape.embedding, *(0.0 for _ in shape.blocks[1:])]
    return LatencyTable(
        kind=kind.lower(),
        batch_sizes=sizes,
        block_s=tuple(tuple(seconds(block.kernels, batch) for block in shape.blocks) for batch in sizes),
        ramp_s=tuple(tuple(seconds(ramp, batch) for ramp in shape.ramps) for batch in sizes),
        hidden_bytes=tuple(block.leaving * number_bytes for block in shape.blocks),
        memory_bytes=tuple(
            int((block.weights + extra) * number_bytes) for block, extra in zip(shape.blocks, embeddings, strict=True)
        ),
        length=shape.length,
        **others,
    )


def linear(rows: int, into: int, out: int) -> Kernel:
    """A dense layer on `rows` vectors per input."""
    return Kernel(flops=2.0 * rows * into * out, values=rows * (into + out), weights=into * out)


def elementwise(values: int, reads: int = 1) -> Kernel:
    """A layer that moves numbers and hardly computes: norms, activations, sums."""
    return Kernel(flops=5.0 * values, values=(reads + 1) * values)


def conv(side: int, into: int, out: int, size: int, stride: int = 1) -> tuple[Kernel, Kernel]:
    """A square convolution on a `side` x `side` image, then its norm and activation."""
    after = side // stride
    weights = into * out * size * size
    product = Kernel(2.0 * after * after * weights, side * side * into + after * after * out, weights)
    return product, elementwise(after * after * out)


def encoder(
    name: str, *, layers: int, hidden: int, inner: int, length: int, vocabulary: int = 0, labels: int = 2
) -> Shape:
    """A transformer encoder on `length` tokens; every ramp is a pooled dense layer and a classifier."""
    tokens = length * hidden
    attention = Kernel(flops=4.0 * length * tokens, values=4 * tokens)
    layer = (
        *(linear(length, hidden, hidden) for _ in range(3)),
        attention,
        linear(length, hidden, hidden),
        elementwise(tokens, reads=2),
        linear(length, hidden, inner),
        elementwise(length * inner),
        linear(length, inner, hidden),
        elementwise(tokens, reads=2),
    )
    ramp = (linear(1, hidden, hidden), elementwise(hidden), linear(1, hidden, labels), elementwise(labels))
    embedding = (elementwise(tokens, reads=3), elementwise(tokens))
    blocks = [Block(layer, tokens) for _ in range(layers)]
    blocks[0] = Block(embedding + layer, tokens)
    blocks[-1] = Block(blocks[-1].kernels + ramp, labels)
    ramps = (*(ramp for _ in range(layers - 1)), ())
    return Shape(name, tuple(blocks), ramps, length, embedding=(vocabulary + length) * hidden)


def residual(
    name: str,
    *,
    stages: tuple[int, ...],
    widths: tuple[int, ...] = (64, 128, 256, 512),
    stem: int = 64,
    bottleneck: bool = True,
    side: int = 224,
    labels: int = 1000,
) -> Shape:
    """A residual network on square images: a stem, `stages[i]` blocks of `widths[i]` at each size, a classifier."""
    entering = side // 4
    first_kernels = (*conv(side, 3, stem, 7, stride=2), elementwise(entering * entering * stem, reads=4))
    grown = [stem, *(width * (4 if bottleneck else 1) for width in widths)]
    blocks: list[Block] = []
    ramps: list[tuple[Kernel, ...]] = []
    for stage, (count, (into, out)) in enumerate(zip(stages, pairwise(grown), strict=True)):
        side = entering // 2**stage
        for index in range(count):
            first = index == 0
            stride = 2 if first and stage else 1
            kernels = _residual(side * stride, into if first else out, widths[stage], out, stride, bottleneck)
            blocks.append(Block(kernels, side * side * out))
            ramps.append((elementwise(side * side * out), linear(1, out, labels), elementwise(labels)))
    blocks[0] = Block(first_kernels + blocks[0].kernels, blocks[0].leaving)
    blocks[-1] = Block(blocks[-1].kernels + ramps[-1], labels)
    return Shape(name, tuple(blocks), (*ramps[:-1], ()), family="residual")


def _residual(side: int, into: int, width: int, out: int, stride: int, bottleneck: bool) -> tuple[Kernel, ...]:
    after = side // stride
    if bottleneck:
        body: tuple[Kernel, ...] = (
            *conv(side, into, width, 1),
            *conv(side, width, width, 3, stride),
            *conv(after, width, out, 1),
        )
    else:
        body = (*conv(side, into, width, 3, stride), *conv(after, width, out, 3))
    shortcut = conv(side, into, out, 1, stride) if into != out else ()
    return (*body, *shortcut, elementwise(after * after * out, reads=2))
