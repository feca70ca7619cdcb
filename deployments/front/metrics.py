"""Prometheus metrics through Ray: the front's counts are exported once a second, so that no request pays for it."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from deployments.front.counts import BOUNDS_MS, OUTCOMES, Counts, by_level
from deployments.front.driver import Driver

EVERY_S = 1.0
_WHERE = ("group", "block")  # the group of replicas, and the first block that a batch runs there


async def export(driver: Driver) -> None:
    """Export until cancelled; works only inside a replica of Serve, whose name Ray adds to each series."""
    series = _Series()
    while True:
        series.tell(driver)
        await asyncio.sleep(EVERY_S)


class _Series:
    def __init__(self) -> None:
        from ray.serve import metrics

        self._requests = metrics.Counter("isobatch_requests", "Requests by what became of them.", ("outcome",))
        self._exits = metrics.Counter("isobatch_exits", "Inputs by the block they left after.", ("block",))
        self._levels = metrics.Counter("isobatch_level_answers", "Answers by the level of a cascade.", ("level",))
        self._degraded = metrics.Counter("isobatch_degraded_answers", "Answers without the next level.", ("level",))
        self._launches = metrics.Counter("isobatch_launches", "Batches by the block they began at.", _WHERE)
        self._inputs = metrics.Counter("isobatch_launched_inputs", "Inputs in those batches.", _WHERE)
        self._weight = metrics.Counter("isobatch_launched_weight", "What they weigh: tokens, or 1 each.", _WHERE)
        self._arrived = metrics.Counter(
            "isobatch_arrived_weight", "What inputs that asked weigh: tokens, or 1 each.", ()
        )
        self._waiting = metrics.Gauge("isobatch_waiting_inputs", "Inputs that wait before a block.", _WHERE)
        self._fill = metrics.Gauge("isobatch_batch_fill", "How full batches are, of 1.", _WHERE)
        # The histogram is counted by the front, as Ray's own would cost a request more than the rest of our handler.
        self._buckets = metrics.Counter("isobatch_latency_ms_bucket", "Answers that took up to `le`.", ("le",))
        self._sum = metrics.Counter("isobatch_latency_ms_sum", "What all answers took.", ())
        self._answers = metrics.Counter("isobatch_latency_ms_count", "Answers.", ())
        self._survivors = metrics.Counter(
            "isobatch_survivor_bytes", "Of hidden states, by whether they came to the front.", ("way",)
        )
        self._audits = metrics.Counter(
            "isobatch_audits", "Inputs that ran on to the end after their answer, by what came out.", ("outcome",)
        )
        self._disagreement = metrics.Gauge(
            "isobatch_disagreement", "The share of answers that are not the full network's.", ("bound",)
        )
        self._told: defaultdict[tuple[object, ...], float] = defaultdict(float)

    def tell(self, driver: Driver) -> None:
        counts = driver.counts
        for outcome in OUTCOMES:
            self._count(self._requests, {"outcome": outcome}, counts.outcomes[outcome])
        for block, count in counts.exits.items():
            self._count(self._exits, {"block": str(block)}, count)
        self._tell_levels(counts, driver.dispatcher.route.edges)
        for way, size in counts.survivor_bytes.items():
            self._count(self._survivors, {"way": way}, size)
        for (group, block), launches in counts.launches.items():
            where = {"group": group, "block": str(block)}
            self._count(self._launches, where, launches.count)
            self._count(self._inputs, where, launches.inputs)
            self._count(self._weight, where, launches.weight)
            self._fill.set(launches.fill, where)
        waiting = driver.dispatcher.waiting()
        for stage in driver.dispatcher.route.all_stages:
            size = waiting.get((stage.group, stage.start), 0)
            self._waiting.set(size, {"group": stage.group, "block": str(stage.start)})
        for bound, count in zip((*map(str, BOUNDS_MS), "+Inf"), accumulate(counts.buckets), strict=True):
            self._count(self._buckets, {"le": bound}, count)
        missed = counts.missed.total()
        self._count(self._audits, {"outcome": "agreed"}, counts.audited.total() - missed)
        self._count(self._audits, {"outcome": "disagreed"}, missed)
        if agreement := counts.agreement(driver.dispatcher.route.num_blocks):
            for bound, share in (("low", agreement.high), ("mean", agreement.share), ("high", agreement.low)):
                self._disagreement.set(1 - share, {"bound": bound})
        self._count(self._arrived, {}, counts.arrived_weight)
        self._count(self._sum, {}, 1e3 * counts.seconds["all"])
        self._count(self._answers, {}, counts.outcomes["answered"])

    def _tell_levels(self, counts: Counts, edges: Sequence[int]) -> None:
        """Of a cascade, which has edges."""
        for series, counted in ((self._levels, counts.exits), (self._degraded, counts.degraded)) if edges else ():
            for level, total in by_level(counted, edges).items():
                self._count(series, {"level": str(level)}, total)

    def _count(self, counter: Any, tags: dict[str, str], total: float) -> None:
        """Add what came since the last export, as Ray's counters take increments."""
        told = counter, *tags.values()
        if (more := total - self._told[told]) > 0:
            counter.inc(more, tags)
            self._told[told] = total
