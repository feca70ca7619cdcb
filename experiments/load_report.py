"""What a load run found: counts by outcome, goodput, percentiles, a picture."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from experiments.connection import BROKEN
from experiments.load import Floats, Record

BINS, SHORTEST_S = 60, 0.2  # of the picture
QUANTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
_OUTCOMES = {200: "answered", 429: "refused", 503: "refused", 504: "expired", BROKEN: "unanswered"}


@dataclass(frozen=True)
class Summary:
    """Rates are per second of the run; a good answer came within the SLO, counted from when the request was due."""

    requests: int
    seconds: float
    offered_per_s: float
    answered_per_s: float
    goodput_per_s: float
    good_share: float  # of all requests
    outcomes: Mapping[str, int]
    latency_ms: Mapping[str, float]  # of answers
    refusal_p50_ms: float | None
    sent_late_p99_ms: float  # the generator's own delay: what it adds to the latencies above


def summary(record: Record, slo_ms: float) -> Summary:
    answered = record.status == 200
    latency_ms = 1e3 * (record.ended_s - record.due_s)
    refused = np.isin(record.status, (429, 503))
    seconds = float(max(record.due_s.max(initial=0.0), 1e-9))
    inside = answered & (record.ended_s <= seconds)  # what was answered while the load lasted
    good = answered & (latency_ms <= slo_ms)
    late_ms = 1e3 * (record.sent_s - record.due_s)
    return Summary(
        requests=len(record.status),
        seconds=seconds,
        offered_per_s=len(record.status) / seconds,
        answered_per_s=float(inside.sum()) / seconds,
        goodput_per_s=float(good.sum()) / seconds,
        good_share=float(good.mean()) if len(good) else 0.0,
        outcomes=_counted(record),
        latency_ms=_quantiles(latency_ms[answered]),
        refusal_p50_ms=float(np.median(latency_ms[refused])) if refused.any() else None,
        sent_late_p99_ms=float(np.nanpercentile(late_ms, 99)) if np.isfinite(late_ms).any() else 0.0,
    )


def _counted(record: Record) -> dict[str, int]:
    counts: dict[str, int] = {}
    for status, count in zip(*np.unique(record.status, return_counts=True), strict=True):
        name = _OUTCOMES.get(int(status), f"status {status}")
        counts[name] = counts.get(name, 0) + int(count)
    return counts


def _quantiles(values: Floats) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"p{q:g}": float(value) for q, value in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)}


def table(found: Summary, slo_ms: float) -> Table:
    rows = Table("what", "value", title=f"load: {found.requests} requests in {found.seconds:.1f} s")
    rows.add_row("offered", f"{found.offered_per_s:,.1f}/s")
    rows.add_row("answered", f"{found.answered_per_s:,.1f}/s")
    rows.add_row(f"within {slo_ms:g} ms", f"{found.goodput_per_s:,.1f}/s ({found.good_share:.1%} of all)")
    for name, count in found.outcomes.items():
        rows.add_row(name, f"{count:,}")
    for name, value in found.latency_ms.items():
        rows.add_row(f"latency {name}", f"{value:,.1f} ms")
    if found.refusal_p50_ms is not None:
        rows.add_row("refusals p50", f"{found.refusal_p50_ms:,.1f} ms")
    rows.add_row("sent late p99", f"{found.sent_late_p99_ms:,.1f} ms")
    return rows


def write(found: Summary, path: Path) -> None:
    path.write_text(json.dumps(asdict(found), indent=2) + "\n")


def draw(record: Record, slo_ms: float, path: Path) -> None:
    """Latency over time, and how many requests a second became what."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), layout="constrained")
    answered = record.status == 200
    latency_ms = 1e3 * (record.ended_s - record.due_s)
    above.plot(record.due_s[answered], latency_ms[answered], ".", markersize=2, alpha=0.4)
    above.axhline(slo_ms, color="tab:red", linewidth=1, label=f"SLO {slo_ms:g} ms")
    above.set(ylabel="latency (ms), from when it was due", yscale="log")
    last_s = record.due_s.max(initial=1.0)
    edges = np.linspace(0, last_s, int(np.clip(last_s / SHORTEST_S, 1, BINS)) + 1)
    for name, chosen in _kinds(record, latency_ms, slo_ms).items():
        counts, _ = np.histogram(record.due_s[chosen], edges)
        if chosen.any():
            below.stairs(counts / edges[1], edges, label=name)
    below.set(xlabel="seconds", ylabel="requests per second", ylim=(0, None))
    for axes in (above, below):
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _kinds(record: Record, latency_ms: Floats, slo_ms: float) -> dict[str, np.typing.NDArray[np.bool_]]:
    answered, within = record.status == 200, latency_ms <= slo_ms
    return {"in time": answered & within, "late": answered & ~within, "no answer": ~answered}
