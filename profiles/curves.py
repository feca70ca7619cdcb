"""Latency tables of devices that were not measured: curves fitted to published latencies.

A launch takes `call + sum over layers of max(floor of the framework, weights + work)`. The floor is a framework's least
time for the kernels of a layer, however few inputs there are; it limits the savings of shrinking batches. A curve is
`published` if latencies of this kind of device, framework and family of networks are known, and `estimated` if its
constants come from other devices. docs/profiles.md shows how far off they are. A measured table beats both.
"""

import csv
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np

from isobatch.profiles.datasheet import BATCH_SIZES, BYTES, Kernel, Shape, derived_table
from isobatch.profiles.devices import GB, GBIT, DeviceKind, known_kind
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import ESTIMATED, PUBLISHED, LatencyTable

FILE = Path(__file__).with_name("curves.csv")
BACKENDS = ("torch", "graphs", "onnx", "tensorrt")
FUSED = ("graphs", "tensorrt")  # backends whose kernels keep intermediate values on the chip
DTYPES = tuple(BYTES)
# Four of five times of unknown devices lie between these quantiles of known devices' errors (bench-curves).
MOST_CASES = (0.025, 0.975)
# Devices with published latencies that are not in the catalogue. An RTX 3090 is twice as fast with sums in float16, as
# TensorRT keeps them; the devices of the catalogue are as fast with sums in float32.
NOT_FOR_HIRE = {"rtx3090": DeviceKind(24 * GB, 0.0, 35.6e12, 71e12, 936 * GB, 24 * GB, 10 * GBIT, 1395 / 1695)}
FLOAT16_SUMS = {("rtx3090", "tensorrt"): 2.0}


@dataclass(frozen=True)
class Curve:
    """The constants of launch times for one framework, one kind of device and one precision."""

    call_s: float  # of any launch
    floor_s: float  # of a kernel: a layer takes at least the floors of its kernels
    bytes_per_s: float  # rate of reading weights, once for a batch
    flops_per_s: float  # rate of arithmetic on inputs

    def layer_s(self, kernels: Sequence[Kernel], batch: float, dtype: str) -> float:
        """
        >>> curve = Curve(call_s=0, floor_s=1e-5, bytes_per_s=1e12, flops_per_s=1e12)
        >>> curve.layer_s([Kernel(flops=1e6, values=0)] * 10, 1, "float16")  # ten kernels' floors
        0.0001
        >>> curve.layer_s([Kernel(flops=1e6, values=0)] * 10, 1000, "float16")  # 10 Gflop
        0.01
        """
        weights_s = sum(kernel.weights for kernel in kernels) * BYTES[dtype] / self.bytes_per_s
        work_s = batch * sum(kernel.flops for kernel in kernels) / self.flops_per_s
        return max(len(kernels) * self.floor_s, weights_s + work_s)

    def whole_s(self, shape: Shape, batch: float, dtype: str) -> float:
        """A launch of the whole network, without ramps."""
        return self.call_s + sum(self.layer_s(block.kernels, batch, dtype) for block in shape.blocks)


@dataclass(frozen=True)
class Fitted:
    """A fitted curve: it has the median `error` on `rows` measured latencies of `networks`."""

    kind: str
    backend: str
    dtype: str
    family: str
    curve: Curve
    rows: int
    error: float
    networks: str
    frameworks: str


@cache
def fitted() -> tuple[Fitted, ...]:
    """All fitted curves, as `python -m experiments.curves.fit` wrote them."""
    with FILE.open(newline="") as file:
        return tuple(
            Fitted(
                row["kind"], row["backend"], row["dtype"], row["family"],
                Curve(
                    float(row["call_us"]) / 1e6, float(row["floor_us"]) / 1e6,
                    float(row["gbytes_per_s"]) * 1e9, float(row["tflops"]) * 1e12,
                ),
                int(row["rows"]), float(row["median_error"]), row["networks"], row["frameworks"],
            )
            for row in csv.DictReader(file)
        )  # fmt: skip


def curve_of(
    kind: str, backend: str, dtype: str, family: str, known: Collection[Fitted] | None = None
) -> tuple[Curve, str]:
    """The curve of a device and framework, and its origin: published or estimated.

    >>> curve_of("v100", "onnx", "float16", "encoder")[1], curve_of("h200", "onnx", "float16", "encoder")[1]
    ('published', 'estimated')
    """
    curves = fitted() if known is None else known
    for each in curves:
        if (each.kind, each.backend, each.dtype, each.family) == (kind, backend, dtype, family):
            return each.curve, PUBLISHED
    return estimated(kind, backend, dtype, family, curves), ESTIMATED


def estimated(kind: str, backend: str, dtype: str, family: str, known: Collection[Fitted]) -> Curve:
    """A curve for a device from those of others: their times, and their share of the printed pace.

    The weights take little time beside the rest of a layer at any batch size, so the time per parameter comes from the
    framework as well. No device gets a larger share of its steady rate than any known one has with the framework.
    """
    alike = _nearest(known, backend, dtype, family)
    share = geometric_mean(each.curve.flops_per_s / pace(each.kind, each.backend, each.dtype) for each in alike)
    return Curve(
        median(each.curve.call_s for each in alike),
        median(each.curve.floor_s for each in alike),
        BYTES[dtype] * median(each.curve.bytes_per_s / BYTES[each.dtype] for each in alike),
        min(share * pace(kind, backend, dtype), _most(known, backend, family) * steady(kind, backend, dtype)),
    )


@cache
def interval(shape: Shape, sizes: tuple[float, ...], known: tuple[Fitted, ...]) -> tuple[tuple[float, float], ...]:
    """For each batch size, two factors of an estimated time: the real time is between them in four of five cases.

    Each known device is estimated from the others, and its fitted times are compared with these.
    """
    ratios = []
    for each in known:
        others = [other for other in known if other.kind != each.kind]
        if any(other.backend == each.backend for other in others):
            guess = estimated(each.kind, each.backend, each.dtype, each.family, others)
            pairs = ((each.curve.whole_s(shape, n, each.dtype), guess.whole_s(shape, n, each.dtype)) for n in sizes)
            ratios.append([known_s / guessed_s for known_s, guessed_s in pairs])
    low, high = np.quantile(ratios, MOST_CASES, axis=0)
    return tuple(zip(low.tolist(), high.tolist(), strict=True))


def _most(known: Collection[Fitted], backend: str, family: str) -> float:
    here = [each for each in known if each.backend == backend]
    alike = [each for each in here if each.family == family] or here
    return max(each.curve.flops_per_s / steady(each.kind, each.backend, each.dtype) for each in alike)


def _nearest(known: Collection[Fitted], backend: str, dtype: str, family: str) -> list[Fitted]:
    """The curves of the same framework that are most alike: in family and precision, in precision, or in neither."""
    here = [each for each in known if each.backend == backend]
    if not here:
        raise UserError(f"there are no times of backend {backend!r}: choose among {', '.join(BACKENDS)}")
    precise = [each for each in here if each.dtype == dtype]
    return [each for each in precise if each.family == family] or precise or here


def pace(kind: str, backend: str, dtype: str) -> float:
    """The pace of a device with a framework's kernels, up to a factor that all devices share.

    Fused kernels keep intermediate values on the chip: their pace is the rate of arithmetic. Others write and read
    them: their pace is the geometric mean of that rate and the memory's.
    """
    rate = steady(kind, backend, dtype)
    return rate if backend in FUSED else sqrt(rate * _known(kind).memory_bytes_per_s)


def steady(kind: str, backend: str, dtype: str) -> float:
    """Operations per second at the clock of a device under load: the geometric mean of its base and its boost clock.

    The peak is printed at the boost clock, which cards with a low power limit hold only briefly: a T4's base clock is
    37 % of it, a V100's 90 %.
    """
    sums = FLOAT16_SUMS.get((kind, backend), 1.0) if dtype == "float16" else 1.0
    return sums * peak(kind, dtype) * sqrt(_known(kind).base_clock)


def peak(kind: str, dtype: str) -> float:
    """Operations per second, as the maker prints it."""
    return _known(kind).fp16_flops if dtype == "float16" else _known(kind).fp32_flops


def _known(kind: str) -> DeviceKind:
    return NOT_FOR_HIRE.get(kind) or known_kind(kind)


def curve_table(
    shape: Shape, kind: str, *, backend: str, dtype: str, batch_sizes: Iterable[float] = BATCH_SIZES
) -> LatencyTable:
    if dtype not in BYTES:
        raise UserError(f"unknown dtype {dtype!r}: choose among {', '.join(BYTES)}")
    curve, origin = curve_of(kind.lower(), backend, dtype, shape.family)
    sizes = tuple(batch_sizes)

    def seconds(kernels: Sequence[Kernel], batch: float) -> float:
        return curve.layer_s(kernels, batch, dtype)

    return derived_table(
        shape, kind, sizes, seconds, BYTES[dtype], launch_s=curve.call_s, backend=backend, dtype=dtype,
        source=f"{origin}: {shape.name}, {backend}, {dtype}",
        interval=interval(shape, sizes, fitted()) if origin == ESTIMATED else (),
    )  # fmt: skip
