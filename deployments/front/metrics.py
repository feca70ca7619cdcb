"""The front's metrics for Prometheus, exported through Ray once a second, so that no request waits for them."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from isobatch.deployments.dispatch.route import Route
from isobatch.deployments.front.counts import OUTCOMES, Counts, by_level
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.metrics import FRONT, LATENCY_BOUNDS_MS, MetricSeries
from isobatch.profiles.agreement import Agreement, PromiseState, recent_agreement

# The time between two exports.
EVERY_S = 1.0
# The agreement without recent audits: it may be anything.
NOTHING_KNOWN = Agreement(1.0, 0.0, 1.0, 0)
# Values of a histogram that are exported in one turn of the event loop: about 1 ms.
AT_ONCE = 200


async def export(driver: Driver, promised_per_s: Callable[[], float | None]) -> None:
    """Export until cancelled; works only inside a replica of Serve, whose name Ray adds to each series."""
    from ray.serve import metrics

    series = FrontSeries(MetricSeries(FRONT, metrics))
    while True:
        series.update(driver, promised_per_s())
        for _ in series.latencies(driver.counts):
            await asyncio.sleep(0)
        await asyncio.sleep(EVERY_S)


class FrontSeries:
    """The time series of one front."""

    def __init__(self, series: MetricSeries) -> None:
        self._series = series
        self._exported_buckets = [0] * (len(LATENCY_BOUNDS_MS) + 1)

    def update(self, driver: Driver, promised_per_s: float | None) -> None:
        counts, route, total = driver.counts, driver.dispatcher.route, self._series.total
        for outcome in OUTCOMES:
            total("isobatch_requests", counts.outcomes[outcome], outcome=outcome)
        self._update_by("isobatch_exits", "block", counts.exits)
        self._update_levels(counts, route.edges)
        self._update_by("isobatch_survivor_bytes", "way", counts.survivor_bytes)
        self._update_launches(counts)
        self._update_now(driver)
        self._update_agreement(counts, route)
        total("isobatch_arrived_inputs", counts.arrivals)
        total("isobatch_arrived_weight", counts.arrived_weight)
        total("isobatch_in_time_inputs", counts.in_time)
        self._series.now("isobatch_promised_per_s", promised_per_s or 0.0)

    def latencies(self, counts: Counts) -> Iterator[None]:
        """Add the latest answers to the histogram. Yields between small parts, so that the event loop can run.

        Ray takes values one by one. The middle of its bucket stands for each value, as in Ray's own histogram.
        """
        buckets, exported = list(counts.buckets), 0
        for number, (now, before) in enumerate(zip(buckets, self._exported_buckets, strict=True)):
            for _ in range(now - before):
                self._series.value("isobatch_latency_ms", _inside(number))
                exported += 1
                if not exported % AT_ONCE:
                    yield
        self._exported_buckets = buckets

    def _update_by(self, name: str, label: str, counted: Mapping[Any, int]) -> None:
        for value, count in counted.items():
            self._series.total(name, count, **{label: str(value)})

    def _update_launches(self, counts: Counts) -> None:
        for (group, block), launches in counts.launches.items():
            labels = {"group": group, "block": str(block)}
            self._series.total("isobatch_launches", launches.count, **labels)
            self._series.total("isobatch_launched_inputs", launches.inputs, **labels)
            self._series.total("isobatch_launched_weight", launches.weight, **labels)
            self._series.total("isobatch_launched_room", launches.room, **labels)

    def _update_now(self, driver: Driver) -> None:
        waiting, replicas = driver.dispatcher.waiting(), driver.dispatcher.replicas()
        for stage in driver.dispatcher.route.all_stages:
            labels = {"group": stage.group, "block": str(stage.start)}
            self._series.now("isobatch_waiting_inputs", waiting.get((stage.group, stage.start), 0), **labels)
        for group, count in replicas.items():
            self._series.now("isobatch_replicas", count, group=group)

    def _update_agreement(self, counts: Counts, route: Route) -> None:
        missed, recent = counts.missed.total(), recent_agreement([counts.watched(route)], counts.now_s, counts.promised)
        self._series.total("isobatch_audits", counts.audited.total() - missed, outcome="agreed")
        self._series.total("isobatch_audits", missed, outcome="disagreed")
        if total := counts.agreement(route.num_blocks):
            self._update_disagreement("isobatch_disagreement", total)
            self._update_disagreement("isobatch_disagreement_lately", recent.agreement or NOTHING_KNOWN)
        for state in get_args(PromiseState) if recent.state else ():
            self._series.now("isobatch_promise", float(state == recent.state), state=state)

    def _update_disagreement(self, name: str, agreement: Agreement) -> None:
        for bound, share in (("low", agreement.high), ("mean", agreement.share), ("high", agreement.low)):
            self._series.now(name, 1 - share, bound=bound)

    def _update_levels(self, counts: Counts, edges: Sequence[int]) -> None:
        """Count the answers of each level of a cascade."""
        if edges:
            self._update_by("isobatch_level_answers", "level", by_level(counts.exits, edges))
            self._update_by("isobatch_degraded_answers", "level", by_level(counts.degraded, edges))


def _inside(bucket: int) -> float:
    """A value inside a bucket: its middle, or twice the last bound.

    >>> _inside(0), _inside(1), _inside(len(LATENCY_BOUNDS_MS))
    (0.5, 1.5, 20000.0)
    """
    bounds = 0, *LATENCY_BOUNDS_MS, 3 * LATENCY_BOUNDS_MS[-1]
    return (bounds[bucket] + bounds[bucket + 1]) / 2
