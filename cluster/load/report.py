"""The report of a load run: counts by outcome, goodput, percentiles, a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from cluster.load.connection import BROKEN
from cluster.load.generator import Floats, LoadRecord
from profiles.picture import BLUE, DARK, ORANGE, RED, plain, plain_logarithmic

BINS, SHORTEST_S, ENOUGH = 60, 0.2, 20  # bins that the picture has at most, the shortest, and requests in each
MANY = 2000  # requests of which each is drawn as a smaller point
COLOURS = (BLUE, ORANGE, RED, DARK)  # of what became of requests, in that order
TIMERS_MS = 5.0  # a delay that every generator has now and then
MUCH = 0.1  # the generator's share of the latency from which on it warns
QUANTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
HEALTHY = {"answered", "refused", "expired"}  # a server that is asked for too much says no
_OUTCOMES = {200: "answered", 429: "refused", 503: "refused", 504: "expired", BROKEN: "unanswered"}


@dataclass(frozen=True)
class Summary:
    """Rates are per second of the load, which lasts as long as it was asked to.

    A good answer came within the SLO, counted from when the request was due.
    """

    requests: int
    seconds: float
    offered_per_s: float
    answered_per_s: float
    goodput_per_s: float
    good_share: float  # of all requests
    outcomes: Mapping[str, int]
    latency_ms: Mapping[str, float]  # percentiles of the answers
    refusal_p50_ms: float | None
    sent_late_p99_ms: float  # from when a request was due until it was sent
    lateness: "Lateness"
    offered_tokens_per_s: float | None = None  # where texts of known lengths were sent
    good_tokens_per_s: float | None = None

    @property
    def failed(self) -> bool:
        """Whether nothing was answered, or anything in a way that no healthy server answers a right request."""
        return not self.outcomes.get("answered") or bool(self.outcomes.keys() - HEALTHY)


@dataclass(frozen=True)
class Lateness:
    """The parts of the answers' latencies: the generator's until it turned to a due request, then the server's.

    A request that is due while no connection is free waits for the server. An answer that the generator reads late
    counts as the server's delay here; `late_by_server` leaves out those that may have been there in time, unread.
    """

    generator_ms: Mapping[str, float]
    server_ms: Mapping[str, float]
    connection_ms: Mapping[str, float]  # a part of the server's: the wait for a free connection
    generator_share: float  # of the sum of all answers' latencies
    server_share: float
    late: int  # answers after the SLO
    late_by_generator: int  # those among them that would have been in time but for the generator's delay before sending
    late_by_server: int  # those that were surely not there, when the generator looked, an SLO after it turned to them

    @property
    def warning(self) -> str | None:
        """A sentence that the latencies are doubtful, where the generator's delay exceeds the grain of its timers."""
        p99_ms = self.generator_ms.get("p99", 0.0)
        if p99_ms < TIMERS_MS or (self.generator_share < MUCH and not self.late_by_generator):
            return None
        return (
            f"WARNING: the generator itself was late, by {p99_ms:,.1f} ms at p99 and {self.generator_share:.0%} of the "
            f"latency; {self.late_by_generator:,} of {self.late:,} late answers are late for that reason alone. "
            "Ask for less, or give it a core of its own"
        )


def summary(record: LoadRecord, slo_ms: float, tokens: Sequence[int] | None = None) -> Summary:
    """`tokens`: of the texts that were sent in turn."""
    answered = record.status == 200
    latency_ms = 1e3 * (record.ended_s - record.due_s)
    refused = np.isin(record.status, (429, 503))
    seconds = float(max(record.asked_s, record.due_s.max(initial=0.0), 1e-9))
    inside = answered & (record.ended_s <= seconds)  # answered while the load lasted
    good = answered & (latency_ms <= slo_ms)
    late_ms = 1e3 * (record.sent_s - record.due_s)
    weights = None if tokens is None else np.resize(tokens, len(good))
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
        lateness=_lateness(record, answered, slo_ms),
        offered_tokens_per_s=None if weights is None else float(weights.sum()) / seconds,
        good_tokens_per_s=None if weights is None else float(weights[good].sum()) / seconds,
    )


def _lateness(record: LoadRecord, answered: NDArray[np.bool_], slo_ms: float) -> Lateness:
    due_s, reached_s, sent_s, ended_s, absent_s = (
        each[answered] for each in (record.due_s, record.reached_s, record.sent_s, record.ended_s, record.absent_s)
    )
    absent_ms = 1e3 * (absent_s - reached_s)
    generator_ms, server_ms, all_ms = 1e3 * (reached_s - due_s), 1e3 * (ended_s - reached_s), 1e3 * (ended_s - due_s)
    late = all_ms > slo_ms
    share = float(generator_ms.sum() / all_ms.sum()) if len(all_ms) else 0.0
    return Lateness(
        generator_ms=_quantiles(generator_ms),
        server_ms=_quantiles(server_ms),
        connection_ms=_quantiles(1e3 * (sent_s - reached_s)),
        generator_share=share,
        server_share=1.0 - share if len(all_ms) else 0.0,
        late=int(late.sum()),
        late_by_generator=int((late & (server_ms <= slo_ms)).sum()),
        late_by_server=int((absent_ms > slo_ms).sum()),
    )


def _counted(record: LoadRecord) -> dict[str, int]:
    counts: dict[str, int] = {}
    for status, count in zip(*np.unique(record.status, return_counts=True), strict=True):
        name = _outcome(status)
        counts[name] = counts.get(name, 0) + int(count)
    return counts


def _outcome(status: int) -> str:
    return _OUTCOMES.get(int(status), f"status {status}")


def _quantiles(values: Floats) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"p{q:g}": float(value) for q, value in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)}


def table(found: Summary, slo_ms: float) -> Table:
    rows = Table("what", "value", title=f"load: {found.requests} requests in {found.seconds:.1f} s")
    rows.add_row("offered", f"{found.offered_per_s:,.1f}/s")
    rows.add_row("answered meanwhile", f"{found.answered_per_s:,.1f}/s")  # what is answered afterwards is counted below
    rows.add_row(f"within {slo_ms:g} ms", f"{found.goodput_per_s:,.1f}/s ({found.good_share:.1%} of all)")
    if found.offered_tokens_per_s is not None and found.good_tokens_per_s is not None:
        offered, good = found.offered_tokens_per_s, found.good_tokens_per_s
        rows.add_row("tokens", f"{offered:,.0f}/s offered, {good:,.0f}/s within the SLO")
    for name, count in found.outcomes.items():
        rows.add_row(name, f"{count:,}")
    for name, value in found.latency_ms.items():
        rows.add_row(f"latency {name}", f"{value:,.1f} ms")
    if found.refusal_p50_ms is not None:
        rows.add_row("refusals p50", f"{found.refusal_p50_ms:,.1f} ms")
    for who, share, times_ms in (
        ("generator", found.lateness.generator_share, found.lateness.generator_ms),
        ("server", found.lateness.server_share, found.lateness.server_ms),
    ):
        told = ", ".join(f"{name} {times_ms[name]:,.1f}" for name in ("p50", "p99") if times_ms)
        rows.add_row(f"by the {who}", f"{share:.1%} of it ({told} ms)" if told else "-")
    if found.lateness.late:
        by_generator, by_server = found.lateness.late_by_generator, found.lateness.late_by_server
        told = f"{by_generator:,} by the generator alone, {by_server:,} surely by the server"
        rows.add_row("late", f"{found.lateness.late:,} ({told})")
    return rows


def write(found: Summary, path: Path) -> None:
    path.write_text(json.dumps(asdict(found), indent=2) + "\n")


def draw(record: LoadRecord, slo_ms: float, path: Path) -> None:
    """Draw latency over time, and requests per second by outcome."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), layout="constrained")
    answered = record.status == 200
    latency_ms = 1e3 * (record.ended_s - record.due_s)
    size, strength = (2, 0.4) if len(record.due_s) > MANY else (4, 0.7)
    above.plot(
        record.due_s[answered],
        latency_ms[answered],
        ".",
        color=BLUE,
        markersize=size,
        alpha=strength,
        label="a request",
    )
    above.axhline(slo_ms, color=RED, linewidth=1, label=f"SLO {slo_ms:g} ms")
    above.set(ylabel="latency (ms), from when it was due", yscale="log")
    plain_logarithmic(above.yaxis)
    edges = bins(record.due_s)
    for (name, chosen), colour in zip(_kinds(record, latency_ms, slo_ms).items(), cycle(COLOURS), strict=False):
        counts, _ = np.histogram(record.due_s[chosen], edges)
        if chosen.any():
            below.stairs(counts / edges[1], edges, color=colour, label=name)
    below.set(xlabel="seconds", ylabel="requests per second", ylim=(0, None))
    for axes in (above, below):
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=6)
        plain(axes)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def bins(due_s: Floats) -> Floats:
    """The edges of spans of time that have some requests each on average: fewer would jump up and down.

    >>> bins(np.linspace(0, 10, 40)).tolist(), len(bins(np.linspace(0, 10, 100_000)))
    ([0.0, 5.0, 10.0], 51)
    """
    last_s = due_s.max(initial=1.0)
    return np.linspace(0, last_s, int(np.clip(min(last_s / SHORTEST_S, len(due_s) / ENOUGH), 1, BINS)) + 1)


def _kinds(record: LoadRecord, latency_ms: Floats, slo_ms: float) -> dict[str, NDArray[np.bool_]]:
    """Which requests were answered in time, which late, and which otherwise, by what became of them."""
    answered, within = record.status == 200, latency_ms <= slo_ms
    kinds = {"in time": answered & within, "late": answered & ~within}
    for status in np.unique(record.status[~answered]):
        name = _outcome(status)
        kinds[name] = kinds.get(name, np.zeros(len(answered), bool)) | (record.status == status)
    return kinds
