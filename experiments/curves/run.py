"""Claim: curves fitted to published latencies tell those of networks and devices that they have not seen.

Held out one network at a time (the curve of the device is fitted to its other networks), one device at a time (its
curve is estimated from the others'), and one device with all its frameworks. The facts are in profiles/published.csv;
nothing else is needed.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.curves.fit import fit, key_of, ratios
from experiments.curves.gains import gains
from profiles.curves import BACKENDS, SPANS_FILE, curve_of, fitted
from profiles.latency import ESTIMATED, PUBLISHED
from profiles.published import Published, published

Ratios = dict[str, list[float]]  # of measured to expected times, by backend
HELD_OUT = 0.05, 0.95  # the quantiles between which nine of ten ratios are
FEW = 20  # ratios of a backend, with which those of all backends stand in for it


def measure() -> dict[str, float]:
    found = {
        "other_networks": _by_backend(_other_networks()),
        "other_devices": _by_backend(_other_devices()),
        "unseen_devices": _by_backend(_unseen_devices()),
    }
    # The two together; a device that nothing was seen on is harder, and told by itself.
    found["held_out"] = {each: found["other_networks"][each] + found["other_devices"][each] for each in BACKENDS}
    table = Table("framework", *found, title="held-out error: median, p95")
    figures = {"rows": float(sum(len(series.seconds) for series in published())), "curves": float(len(fitted()))}
    for backend in (*BACKENDS, ""):
        cells = []
        for name, by_backend in found.items():
            held_out = by_backend[backend] if backend else [ratio for each in by_backend.values() for ratio in each]
            if held_out:
                missed = [abs(1 / ratio - 1) for ratio in held_out]
                of = f"_{backend}" if backend else ""
                figures[f"{name}_error_median{of}"] = median = float(np.median(missed))
                figures[f"{name}_error_p95{of}"] = p95 = float(np.quantile(missed, 0.95))
            cells.append(f"{median:.0%}, {p95:.0%}" if held_out else "-")
        table.add_row(backend or "all", *cells)
    Console(stderr=True).print(table)
    return figures | gains()


def _by_backend(found: Iterator[tuple[Published, list[float]]]) -> Ratios:
    result: Ratios = defaultdict(list)
    for series, found_ratios in found:
        result[series.backend] += found_ratios
    return result


def _other_networks() -> Iterator[tuple[Published, list[float]]]:
    """A network that a framework has not been seen to run, on a device that it has been seen on."""
    for key in sorted({(series.network, series.backend) for series in published()}):
        rest = [series for series in published() if (series.network, series.backend) != key]
        seen = {key_of(series) for series in rest}
        yield from _told([each for each in _of(key, "network", "backend") if key_of(each) in seen], rest)


def _other_devices() -> Iterator[tuple[Published, list[float]]]:
    """A device that a framework has not been seen on; others may have been."""
    for key in sorted({(series.kind, series.backend) for series in published()}):
        rest = [series for series in published() if (series.kind, series.backend) != key]
        yield from _told(_of(key, "kind", "backend"), rest)


def _unseen_devices() -> Iterator[tuple[Published, list[float]]]:
    """A device that nothing has been seen on."""
    for kind in sorted({series.kind for series in published()}):
        yield from _told(_of((kind,), "kind"), [series for series in published() if series.kind != kind])


def _of(key: tuple[str, ...], *names: str) -> list[Published]:
    return [series for series in published() if tuple(getattr(series, name) for name in names) == key]


def _told(asked: Sequence[Published], rest: Sequence[Published]) -> Iterator[tuple[Published, list[float]]]:
    curves = fit(rest)
    for series in asked:
        if any(each.backend == series.backend for each in curves):
            yield series, ratios(curve_of(*key_of(series), curves)[0], series).tolist()


def write_spans() -> None:
    """Write profiles/curve_spans.csv: how far off the times of tables are that were not measured."""
    with SPANS_FILE.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["origin", "backend", "low", "high", "rows"])
        for origin, found in ((PUBLISHED, _other_networks()), (ESTIMATED, _unseen_devices())):
            by_backend = _by_backend(found)
            by_backend[""] = [ratio for each in by_backend.values() for ratio in each]
            for backend, held_out in sorted(by_backend.items()):
                if len(held_out) >= FEW:
                    low, high = np.quantile(held_out, HELD_OUT)
                    out.writerow([origin, backend, f"{low:.3g}", f"{high:.3g}", len(held_out)])


if __name__ == "__main__":
    write_spans()
