"""What the front tells Prometheus, through Ray: counts are told once a second, so that no request waits for it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from deployments.dispatch.route import Route
from deployments.front.counts import OUTCOMES, Counts, by_level
from deployments.front.driver import Driver
from deployments.metrics import FRONT, LATENCY_BOUNDS_MS, MetricSeries
from profiles.agreement import Agreement, PromiseState, recent_agreement

EVERY_S = 1.0
NOTHING_KNOWN = Agreement(1.0, 0.0, 1.0, 0)  # without audits, lately
AT_ONCE = 200  # values of a histogram that are told in one turn of the event loop: about 1 ms


async def export(driver: Driver, promised_per_s: Callable[[], float | None]) -> None:
    """Export until cancelled; works only inside a replica of Serve, whose name Ray adds to each series."""
    from ray.serve import metrics

    series = FrontSeries(MetricSeries(FRONT, metrics))
    while True:
        series.tell(driver, promised_per_s())
        for _ in series.latencies(driver.counts):
            await asyncio.sleep(0)
        await asyncio.sleep(EVERY_S)


class FrontSeries:
    """What is told of a front's counts."""

    def __init__(self, series: MetricSeries) -> None:
        self._series = series
        self._told_buckets = [0] * (len(LATENCY_BOUNDS_MS) + 1)

    def tell(self, driver: Driver, promised_per_s: float | None) -> None:
        counts, route, total = driver.counts, driver.dispatcher.route, self._series.total
        for outcome in OUTCOMES:
            total("isobatch_requests", counts.outcomes[outcome], outcome=outcome)
        self._by("isobatch_exits", "block", counts.exits)
        self._tell_levels(counts, route.edges)
        self._by("isobatch_survivor_bytes", "way", counts.survivor_bytes)
        self._tell_launches(counts)
        self._tell_now(driver)
        self._tell_agreement(counts, route)
        total("isobatch_arrived_inputs", counts.arrivals)
        total("isobatch_arrived_weight", counts.arrived_weight)
        total("isobatch_in_time_inputs", counts.in_time)
        self._series.now("isobatch_promised_per_s", promised_per_s or 0.0)

    def latencies(self, counts: Counts) -> Iterator[None]:
        """Tell the histogram what was answered since the last time, and pause now and then.

        Ray takes values one by one. Each is told as the middle of its bucket, which is what Ray makes of any value.
        """
        buckets, told = list(counts.buckets), 0
        for place, (now, before) in enumerate(zip(buckets, self._told_buckets, strict=True)):
            for _ in range(now - before):
                self._series.value("isobatch_latency_ms", _inside(place))
                told += 1
                if not told % AT_ONCE:
                    yield
        self._told_buckets = buckets

    def _by(self, name: str, label: str, counted: Mapping[Any, int]) -> None:
        for each, count in counted.items():
            self._series.total(name, count, **{label: str(each)})

    def _tell_launches(self, counts: Counts) -> None:
        for (group, block), launches in counts.launches.items():
            where = {"group": group, "block": str(block)}
            self._series.total("isobatch_launches", launches.count, **where)
            self._series.total("isobatch_launched_inputs", launches.inputs, **where)
            self._series.total("isobatch_launched_weight", launches.weight, **where)
            self._series.total("isobatch_launched_room", launches.room, **where)

    def _tell_now(self, driver: Driver) -> None:
        waiting, replicas = driver.dispatcher.waiting(), driver.dispatcher.replicas()
        for stage in driver.dispatcher.route.all_stages:
            where = {"group": stage.group, "block": str(stage.start)}
            self._series.now("isobatch_waiting_inputs", waiting.get((stage.group, stage.start), 0), **where)
        for group, count in replicas.items():
            self._series.now("isobatch_replicas", count, group=group)

    def _tell_agreement(self, counts: Counts, route: Route) -> None:
        missed, seen = counts.missed.total(), recent_agreement([counts.watched(route)], counts.now_s, counts.promised)
        self._series.total("isobatch_audits", counts.audited.total() - missed, outcome="agreed")
        self._series.total("isobatch_audits", missed, outcome="disagreed")
        if total := counts.agreement(route.num_blocks):
            self._tell_disagreement("isobatch_disagreement", total)
            self._tell_disagreement("isobatch_disagreement_lately", seen.agreement or NOTHING_KNOWN)
        for state in get_args(PromiseState) if seen.state else ():
            self._series.now("isobatch_promise", float(state == seen.state), state=state)

    def _tell_disagreement(self, name: str, agreement: Agreement) -> None:
        for bound, share in (("low", agreement.high), ("mean", agreement.share), ("high", agreement.low)):
            self._series.now(name, 1 - share, bound=bound)

    def _tell_levels(self, counts: Counts, edges: Sequence[int]) -> None:
        """Of a cascade, which has edges."""
        for name, counted in (
            (
                ("isobatch_level_answers", counts.exits),
                ("isobatch_degraded_answers", counts.degraded),
            )
            if edges
            else ()
        ):
            self._by(name, "level", by_level(counted, edges))


def _inside(bucket: int) -> float:
    """A value inside of a bucket: its middle, or twice the last bound.

    >>> _inside(0), _inside(1), _inside(len(LATENCY_BOUNDS_MS))
    (0.5, 1.5, 20000.0)
    """
    bounds = 0, *LATENCY_BOUNDS_MS, 3 * LATENCY_BOUNDS_MS[-1]
    return (bounds[bucket] + bounds[bucket + 1]) / 2
