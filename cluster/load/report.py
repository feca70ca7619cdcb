"""The report of a load run: counts by outcome, goodput, percentiles, a picture."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from isobatch.cluster.load.generator import BROKEN, Floats, LoadRecord
from isobatch.profiles.files import write_whole
from isobatch.profiles.picture import BLUE, DARK, ORANGE, RED, plain, plain_logarithmic

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_BINS = 60  # of the picture
SHORTEST_BIN_S = 0.2
REQUESTS_PER_BIN = 20  # on average
MANY_REQUESTS = 2000  # beyond this number, requests are drawn as smaller points
COLOURS = (BLUE, ORANGE, RED, DARK)  # of the outcomes, in their order
TIMER_DELAY_MS = 5.0  # every generator is late by this much now and then
WARNING_SHARE = 0.1  # the generator's share of the latency from which it warns
QUANTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
HEALTHY = {"answered", "refused", "expired"}  # the outcomes of a healthy server, even under overload
_OUTCOMES = {200: "answered", 429: "refused", 503: "refused", 504: "expired", BROKEN: "unanswered"}


@dataclass(frozen=True)
class Summary:
    """Rates are per second of the load's requested duration.

    An answer is good if it came within the SLO, counted from when the request was due.
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


@dataclass(frozen=True)
class Lateness:
    """The parts of the answers' latencies: the generator's until it handled a due request, then the server's.

    The wait for a free connection is part of the server's delay, and so is the time until the generator reads an
    answer; `late_by_server` does not count answers that may have arrived in time and were read late.
    """

    generator_ms: Mapping[str, float]
    server_ms: Mapping[str, float]
    connection_ms: Mapping[str, float]  # a part of the server's: the wait for a free connection
    generator_share: float  # of the sum of all answers' latencies
    server_share: float
    late: int  # answers after the SLO
    late_by_generator: int  # those of them that are late only because the generator sent the request late
    late_by_server: int  # those that provably had not arrived within an SLO after the generator handled the request

    @property
    def warning(self) -> str | None:
        """A sentence that the latencies are doubtful, if the generator itself was late."""
        p99_ms = self.generator_ms.get("p99", 0.0)
        if p99_ms < TIMER_DELAY_MS or (self.generator_share < WARNING_SHARE and not self.late_by_generator):
            return None
        return (
            f"WARNING: the generator itself was late, by {p99_ms:,.1f} ms at p99 and {self.generator_share:.0%} of the "
            f"latency; {self.late_by_generator:,} of {self.late:,} late answers are late for that reason alone. "
            "Lower the rate, or give the generator a core of its own"
        )


def summary(record: LoadRecord, slo_ms: float, tokens: Sequence[int] | None = None) -> Summary:
    """The summary of a load. `tokens`: the lengths of the texts, if texts of known lengths were sent in turn."""
    answered = record.status == 200
    latency_ms = 1e3 * (record.ended_s - record.due_s)
    refused = np.isin(record.status, (429, 503))
    seconds = float(max(record.duration_s, record.due_s.max(initial=0.0), 1e-9))
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
        outcomes=counted(record.status.tolist()),
        latency_ms=quantiles(latency_ms[answered]),
        refusal_p50_ms=float(np.median(latency_ms[refused])) if refused.any() else None,
        sent_late_p99_ms=float(np.nanpercentile(late_ms, 99)) if np.isfinite(late_ms).any() else 0.0,
        lateness=_lateness(record, answered, slo_ms),
        offered_tokens_per_s=None if weights is None else float(weights.sum()) / seconds,
        good_tokens_per_s=None if weights is None else float(weights[good].sum()) / seconds,
    )


def _lateness(record: LoadRecord, answered: NDArray[np.bool_], slo_ms: float) -> Lateness:
    all_times = (record.due_s, record.reached_s, record.sent_s, record.ended_s, record.absent_s)
    due_s, reached_s, sent_s, ended_s, absent_s = (times_s[answered] for times_s in all_times)
    absent_ms = 1e3 * (absent_s - reached_s)
    generator_ms, server_ms, all_ms = 1e3 * (reached_s - due_s), 1e3 * (ended_s - reached_s), 1e3 * (ended_s - due_s)
    late = all_ms > slo_ms
    share = float(generator_ms.sum() / all_ms.sum()) if len(all_ms) else 0.0
    return Lateness(
        generator_ms=quantiles(generator_ms),
        server_ms=quantiles(server_ms),
        connection_ms=quantiles(1e3 * (sent_s - reached_s)),
        generator_share=share,
        server_share=1.0 - share if len(all_ms) else 0.0,
        late=int(late.sum()),
        late_by_generator=int((late & (server_ms <= slo_ms)).sum()),
        late_by_server=int((absent_ms > slo_ms).sum()),
    )


def counted(statuses: Sequence[int]) -> dict[str, int]:
    return dict(Counter(map(_outcome, sorted(statuses))))


def is_failure(outcomes: Mapping[str, int]) -> bool:
    """Whether nothing was answered, or any outcome is not that of a healthy server."""
    return not outcomes.get("answered") or bool(outcomes.keys() - HEALTHY)


def _outcome(status: int) -> str:
    return _OUTCOMES.get(int(status), f"status {status}")


def quantiles(values: Floats, which: Sequence[float] = QUANTILES) -> dict[str, float]:
    return {f"p{each:g}": float(np.percentile(values, each)) for each in which} if len(values) else {}


def table(summary: Summary, slo_ms: float) -> Table:
    rows = Table("what", "value", title=f"load: {summary.requests} requests in {summary.seconds:.1f} s")
    rows.add_row("offered", f"{summary.offered_per_s:,.1f}/s")
    rows.add_row("answered meanwhile", f"{summary.answered_per_s:,.1f}/s")  # later answers are counted only below
    rows.add_row(f"within {slo_ms:g} ms", f"{summary.goodput_per_s:,.1f}/s ({summary.good_share:.1%} of all)")
    if summary.offered_tokens_per_s is not None and summary.good_tokens_per_s is not None:
        offered, good = summary.offered_tokens_per_s, summary.good_tokens_per_s
        rows.add_row("tokens", f"{offered:,.0f}/s offered, {good:,.0f}/s within the SLO")
    for name, count in summary.outcomes.items():
        rows.add_row(name, f"{count:,}")
    for name, value in summary.latency_ms.items():
        rows.add_row(f"latency {name}", f"{value:,.1f} ms")
    if summary.refusal_p50_ms is not None:
        rows.add_row("refusals p50", f"{summary.refusal_p50_ms:,.1f} ms")
    lateness = summary.lateness
    generator = ("generator", lateness.generator_share, lateness.generator_ms)
    for name, share, times_ms in (generator, ("server", lateness.server_share, lateness.server_ms)):
        quantiles = ", ".join(f"{quantile} {times_ms[quantile]:,.1f}" for quantile in ("p50", "p99") if times_ms)
        rows.add_row(f"by the {name}", f"{share:.1%} of it ({quantiles} ms)" if quantiles else "-")
    if lateness.late:
        causes = f"{lateness.late_by_generator:,} by the generator alone"
        rows.add_row("late", f"{lateness.late:,} ({causes}, {lateness.late_by_server:,} surely by the server)")
    return rows


def write(summary: "DataclassInstance", path: Path) -> None:
    write_whole(path, json.dumps(asdict(summary), indent=2))


def draw(record: LoadRecord, slo_ms: float, path: Path) -> None:
    """Draw latency over time, and requests per second by outcome."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    answered = record.status == 200
    latency_ms = 1e3 * (record.ended_s - record.due_s)
    size, strength = (2, 0.4) if len(record.due_s) > MANY_REQUESTS else (4, 0.7)
    style = {"color": BLUE, "markersize": size, "alpha": strength}
    above.plot(record.due_s[answered], latency_ms[answered], ".", **style, label="a request")
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


def bins(due_s: Floats) -> Floats:
    """The edges of the time bins of the picture. With too few requests in a bin, its rate would fluctuate.

    >>> bins(np.linspace(0, 10, 40)).tolist(), len(bins(np.linspace(0, 10, 100_000)))
    ([0.0, 5.0, 10.0], 51)
    """
    last_s = due_s.max(initial=1.0)
    count = min(last_s / SHORTEST_BIN_S, len(due_s) / REQUESTS_PER_BIN)
    return np.linspace(0, last_s, 1 + int(np.clip(count, 1, MOST_BINS)))


def _kinds(record: LoadRecord, latency_ms: Floats, slo_ms: float) -> dict[str, NDArray[np.bool_]]:
    """The requests that were answered in time, those that were answered late, and the others by their outcome."""
    answered, within = record.status == 200, latency_ms <= slo_ms
    kinds = {"in time": answered & within, "late": answered & ~within}
    for status in np.unique(record.status[~answered]):
        name = _outcome(status)
        kinds[name] = kinds.get(name, np.zeros(len(answered), bool)) | (record.status == status)
    return kinds
