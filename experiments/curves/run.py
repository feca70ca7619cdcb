"""Claim: curves fitted to published latencies predict those of other networks and devices.

One network at a time is held out (the device's curve is fitted to its other networks), then one device at a time (its
curve is estimated from the framework's curves on other devices). The control is the published latency (published.csv).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.curves.fit import errors, expected_s, fit, key_of, shape_of
from experiments.curves.gains import gains
from experiments.curves.published import Published, published
from isobatch.profiles.curves import BACKENDS, curve_of, interval

Errors = dict[str, list[float]]  # by backend


def measure() -> dict[str, float]:
    missed_by = {"other_networks": _by_backend(_other_networks()), "other_devices": _by_backend(_other_devices())}
    missed_by["held_out"] = {
        each: missed_by["other_networks"][each] + missed_by["other_devices"][each] for each in BACKENDS
    }
    table = Table("framework", *missed_by, title="held-out error: median, p95")
    everything = {name: [error for each in of.values() for error in each] for name, of in missed_by.items()}
    for backend in BACKENDS:
        table.add_row(backend, *(_median_and_p95(of[backend]) for of in missed_by.values()))
    table.add_row("all", *map(_median_and_p95, everything.values()))
    Console(stderr=True).print(table)
    return {
        **{f"{name}_error_median": float(np.median(missed)) for name, missed in everything.items()},
        "held_out_error_p95": float(np.quantile(everything["held_out"], 0.95)),
        "unseen_devices_inside_interval": float(np.mean(list(_inside_intervals()))),
        **gains(),
    }


def _median_and_p95(missed: list[float]) -> str:
    return f"{np.median(missed):.0%}, {np.quantile(missed, 0.95):.0%}" if missed else "-"


def _by_backend(missed_by: Iterator[tuple[Published, list[float]]]) -> Errors:
    result: Errors = defaultdict(list)
    for series, missed in missed_by:
        result[series.backend] += missed
    return result


def _other_networks() -> Iterator[tuple[Published, list[float]]]:
    """Errors for networks that the framework's data lack, on devices that they have."""
    for key in sorted({(series.network, series.backend) for series in published()}):
        rest = [series for series in published() if (series.network, series.backend) != key]
        seen = {key_of(series) for series in rest}
        yield from _told([each for each in _of(key, "network", "backend") if key_of(each) in seen], rest)


def _other_devices() -> Iterator[tuple[Published, list[float]]]:
    """Errors for devices that the framework's data lack; other frameworks' times on the device are not used."""
    for key in sorted({(series.kind, series.backend) for series in published()}):
        rest = [series for series in published() if (series.kind, series.backend) != key]
        yield from _told(_of(key, "kind", "backend"), rest)


def _inside_intervals() -> Iterator[bool]:
    """For each time of a device that no data have, whether it lies in the interval of its estimate."""
    for kind in sorted({series.kind for series in published()}):
        curves = tuple(fit([series for series in published() if series.kind != kind]))
        for series in _of((kind,), "kind"):
            if any(each.backend == series.backend for each in curves):
                guessed_s = expected_s(curve_of(*key_of(series), curves)[0], series)
                ends = interval(shape_of(series), tuple(float(batch) for batch, _ in series.seconds), curves)
                for (_, measured_s), guess_s, (low, high) in zip(series.seconds, guessed_s, ends, strict=True):
                    yield bool(low <= measured_s / guess_s <= high)


def _of(key: tuple[str, ...], *names: str) -> list[Published]:
    return [series for series in published() if tuple(getattr(series, name) for name in names) == key]


def _told(chosen: Sequence[Published], rest: Sequence[Published]) -> Iterator[tuple[Published, list[float]]]:
    curves = fit(rest)
    for series in chosen:
        if any(each.backend == series.backend for each in curves):
            yield series, errors(curve_of(*key_of(series), curves)[0], series).tolist()
