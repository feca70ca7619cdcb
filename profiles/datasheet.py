"""Latency tables from datasheets alone, by a roofline per kernel, for devices without any measurement.

A kernel has three times: its share of a launch, its arithmetic at the device's peak rate, and its traffic at the
memory's bandwidth. They overlap in part. The constants below were fitted to one device (an A100) and are checked on
others in docs/profiles.md. A measured table beats all of this.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from profiles.devices import DeviceKind, known_kind
from profiles.errors import UserError
from profiles.latency import LatencyTable

KERNEL_S = 5e-6  # seconds: no kernel is faster
COMPUTE_SHARE = 0.75  # the share of the peak flops that a large matrix product reaches
MEMORY_SHARE = 0.80  # the share of the peak bandwidth that a stream reaches
# How the three times combine. 1: they add up; infinity: the longest one hides the others.
OVERLAP = 1.2
LAUNCH_S = 200e-6  # seconds for the way of a batch in and out of a device: an assumption, to be measured
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
    """A network as a datasheet table needs it; `ramps[k]` is the ramp after block k, empty for the last block."""

    name: str
    blocks: tuple[Block, ...]
    ramps: tuple[tuple[Kernel, ...], ...]
    length: int | None = None  # tokens per input; None where inputs have one size
    embedding: float = 0.0  # numbers in memory in addition to the blocks' weights
    family: str = "encoder"  # or "residual": networks of one family have similar kernels


def kernel_s(kernel: Kernel, batch: float, device: DeviceKind, dtype: str) -> float:
    """
    >>> from profiles.devices import CATALOGUE
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
