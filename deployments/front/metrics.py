"""The front's metrics for Prometheus, exported through Ray once a second, so that no request waits for them."""

import asyncio
from collections.abc import Callable, Iterator
from typing import get_args

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
        counts, route, series = driver.counts, driver.dispatcher.route, self._series
        missed, edges = counts.missed.total(), route.edges
        for name, label, totals in (
            ("isobatch_requests", "outcome", {outcome: counts.outcomes[outcome] for outcome in OUTCOMES}),
            ("isobatch_exits", "block", counts.exits),
            ("isobatch_survivor_bytes", "way", counts.survivor_bytes),
            ("isobatch_audits", "outcome", {"agreed": counts.audited.total() - missed, "disagreed": missed}),
            ("isobatch_level_answers", "level", by_level(counts.exits, edges) if edges else {}),
            ("isobatch_degraded_answers", "level", by_level(counts.degraded, edges) if edges else {}),
        ):
            for value, total in totals.items():
                series.total(name, total, **{label: str(value)})
        series.total("isobatch_arrived_inputs", counts.arrivals)
        series.total("isobatch_arrived_weight", counts.arrived_weight)
        series.total("isobatch_in_time_inputs", counts.in_time)
        series.now("isobatch_promised_per_s", promised_per_s or 0.0)
        for (group, block), launches in counts.launches.items():
            series.launches(group, block, *launches)
        waiting = driver.dispatcher.waiting()
        for stage in route.all_stages:
            inputs = waiting.get((stage.group, stage.start), 0)
            series.now("isobatch_waiting_inputs", inputs, group=stage.group, block=str(stage.start))
        for group, count in driver.dispatcher.replicas().items():
            series.now("isobatch_replicas", count, group=group)
        self._update_agreement(counts, route)

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

    def _update_agreement(self, counts: Counts, route: Route) -> None:
        recent = recent_agreement([counts.watched(route)], counts.now_s, counts.promised)
        if total := counts.agreement(route.num_blocks):
            for name, agreement in (
                ("isobatch_disagreement", total),
                ("isobatch_disagreement_lately", recent.agreement or NOTHING_KNOWN),
            ):
                for bound, share in (("low", agreement.high), ("mean", agreement.share), ("high", agreement.low)):
                    self._series.now(name, 1 - share, bound=bound)
        for state in get_args(PromiseState) if recent.state else ():
            self._series.now("isobatch_promise", float(state == recent.state), state=state)


def _inside(bucket: int) -> float:
    """A value inside a bucket: its middle, or twice the last bound.

    >>> _inside(0), _inside(1), _inside(len(LATENCY_BOUNDS_MS))
    (0.5, 1.5, 20000.0)
    """
    bounds = 0, *LATENCY_BOUNDS_MS, 3 * LATENCY_BOUNDS_MS[-1]
    return (bounds[bucket] + bounds[bucket + 1]) / 2
