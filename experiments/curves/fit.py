"""Fits curves to published latencies: `python -m experiments.curves.fit` writes profiles/curves.csv.

The fit minimizes squares of logarithms, so that an error of 10 % counts the same at 1 and at 1,000 ms, with less weight
for outliers. Constants that a device's measurements do not determine stay near those of the framework on other devices.
"""

import csv
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from experiments.curves.published import Published, published
from experiments.planner.networks import published_shape
from isobatch.profiles.curves import FILE, Curve, Fitted, estimated, peak
from isobatch.profiles.datasheet import Shape

Floats = NDArray[np.float64]
Key = tuple[str, str, str, str]  # kind, backend, dtype, family

FAR = 0.1  # relative errors beyond this count less
# A constant that differs from other devices by this factor weighs as much as an error of FAR.
NEAR = np.log([1.1, 1.6, 2.0, 1.6])
# First values: seconds of a call, a kernel's least seconds, bytes of weights per second, share of the peak rate.
START = {
    "torch": (2e-4, 5e-5, 300e9, 0.4),
    "graphs": (1e-4, 8e-6, 300e9, 0.5),
    "onnx": (1e-4, 1e-5, 300e9, 0.5),
    "tensorrt": (5e-5, 6e-6, 300e9, 0.5),
}


def shape_of(series: Published) -> Shape:
    return published_shape(series.network, series.length)


def key_of(series: Published) -> Key:
    return series.kind, series.backend, series.dtype, shape_of(series).family


def expected_s(curve: Curve, series: Published) -> Floats:
    """The times of a series' batches by a curve, as the clock of the series measures them."""
    blocks, call_s = shape_of(series).blocks, 0.0 if series.clock == "device" else curve.call_s
    return np.array([
        call_s + sum(curve.layer_s(block.kernels, batch, series.dtype) for block in blocks)
        for batch, _ in series.seconds
    ])  # fmt: skip


def errors(curve: Curve, series: Published) -> Floats:
    """The relative error at every batch that was measured."""
    measured = np.array([seconds for _, seconds in series.seconds])
    missed: Floats = np.abs(expected_s(curve, series) / measured - 1)
    return missed


def fit(rows: Collection[Published]) -> list[Fitted]:
    """A curve for each device, framework, precision and family: first fitted alone, then near the others."""
    groups: dict[Key, list[Published]] = {}
    for series in rows:
        groups.setdefault(key_of(series), []).append(series)
    alone = [_fitted(key, of, _start(key)) for key, of in sorted(groups.items())]
    return [_fitted(key, of, _elsewhere(key, alone)) for key, of in sorted(groups.items())]


def _start(key: Key) -> Curve:
    kind, backend, dtype, _ = key
    call_s, floor_s, bytes_per_s, share = START[backend]
    return Curve(call_s, floor_s, bytes_per_s, share * peak(kind, dtype))


def _elsewhere(key: Key, alone: Sequence[Fitted]) -> Curve:
    """The framework's constants on other devices, else in other precisions or families, else the first values."""
    kind, backend, dtype, family = key
    others = [each for each in alone if (each.kind, each.backend, each.dtype, each.family) != key]
    if not any(each.backend == backend for each in others):
        return _start(key)
    return replace(estimated(kind, backend, dtype, family, others), call_s=START[backend][0])


def _fitted(key: Key, rows: Sequence[Published], near: Curve) -> Fitted:
    prior = np.log([near.call_s, near.floor_s, near.bytes_per_s, near.flops_per_s])
    measured = np.log([seconds for series in rows for _, seconds in series.seconds])

    def misses(logs: Floats) -> Floats:
        curve = _curve(logs)
        predicted_s = np.concatenate([expected_s(curve, series) for series in rows])
        return np.concatenate([np.log(np.maximum(predicted_s, 1e-9)) - measured, FAR * (logs - prior) / NEAR])

    result = _curve(least_squares(misses, prior, loss="soft_l1", f_scale=FAR).x)
    missed = np.concatenate([errors(result, series) for series in rows])
    return Fitted(
        *key,
        result,
        len(missed),
        float(np.median(missed)),
        " ".join(sorted({series.network for series in rows})),
        "; ".join(sorted({series.framework for series in rows})),
    )


def _curve(logs: Floats) -> Curve:
    return Curve(*(float(value) for value in np.exp(logs)))


def write(result: Sequence[Fitted]) -> None:
    with FILE.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        names = ("kind", "backend", "dtype", "family", "call_us", "floor_us", "gbytes_per_s", "tflops")
        out.writerow([*names, "rows", "median_error", "networks", "frameworks"])
        for each in result:
            curve = each.curve
            constants = (curve.call_s * 1e6, curve.floor_s * 1e6, curve.bytes_per_s / 1e9, curve.flops_per_s / 1e12)
            key = (each.kind, each.backend, each.dtype, each.family)
            cells = [f"{value:.4g}" for value in constants]
            out.writerow([*key, *cells, each.rows, f"{each.error:.3f}", each.networks, each.frameworks])


if __name__ == "__main__":
    write(fit(published()))
    print(f"median error {median(each.error for each in fit(published())):.1%}")
