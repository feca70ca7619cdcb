"""Prometheus metrics through Ray: what the tally counted, told once a second, so that no request pays for it."""

import asyncio
from collections import defaultdict
from itertools import accumulate
from typing import Any

from deployments.driver import Driver
from deployments.tally import BOUNDS_MS, OUTCOMES

EVERY_S = 1.0


async def export(driver: Driver) -> None:
    """Until cancelled; only inside a replica of Serve, which adds its own name to each series."""
    series = _Series()
    while True:
        series.tell(driver)
        await asyncio.sleep(EVERY_S)


class _Series:
    def __init__(self) -> None:
        from ray.serve import metrics

        self._requests = metrics.Counter("isobatch_requests", "Requests by what became of them.", ("outcome",))
        self._exits = metrics.Counter("isobatch_exits", "Inputs by the block they left after.", ("block",))
        self._launches = metrics.Counter("isobatch_launches", "Batches by the block they began at.", ("block",))
        self._inputs = metrics.Counter("isobatch_launched_inputs", "Inputs in those batches.", ("block",))
        self._waiting = metrics.Gauge("isobatch_waiting_inputs", "Inputs that wait before a block.", ("block",))
        self._fill = metrics.Gauge("isobatch_batch_fill", "How full batches are, of 1.", ("block",))
        # A histogram, counted by us: Ray's own would cost each request more than its part of our handler.
        self._buckets = metrics.Counter("isobatch_latency_ms_bucket", "Answers that took up to `le`.", ("le",))
        self._sum = metrics.Counter("isobatch_latency_ms_sum", "What all answers took.", ())
        self._answers = metrics.Counter("isobatch_latency_ms_count", "Answers.", ())
        self._survivors = metrics.Counter(
            "isobatch_survivor_bytes", "Of hidden states, by whether they came to the front.", ("way",)
        )
        self._told: defaultdict[tuple[object, str], float] = defaultdict(float)

    def tell(self, driver: Driver) -> None:
        tally = driver.tally
        for outcome in OUTCOMES:
            self._count(self._requests, "outcome", outcome, tally.outcomes[outcome])
        for block, count in tally.exits.items():
            self._count(self._exits, "block", str(block), count)
        for way, size in tally.survivor_bytes.items():
            self._count(self._survivors, "way", way, size)
        for block, launches in tally.launches.items():
            self._count(self._launches, "block", str(block), launches.count)
            self._count(self._inputs, "block", str(block), launches.inputs)
            self._fill.set(launches.fill, {"block": str(block)})
        waiting = driver.dispatcher.waiting()
        for stage in driver.dispatcher.route.stages:
            self._waiting.set(waiting.get(stage.start, 0), {"block": str(stage.start)})
        for bound, count in zip((*map(str, BOUNDS_MS), "+Inf"), accumulate(tally.buckets), strict=True):
            self._count(self._buckets, "le", bound, count)
        self._count(self._sum, "", "", 1e3 * tally.seconds["all"])
        self._count(self._answers, "", "", tally.outcomes["answered"])

    def _count(self, counter: Any, tag: str, value: str, total: float) -> None:
        """Ray's counters take what came since they were last told."""
        if (more := total - self._told[counter, value]) > 0:
            counter.inc(more, {tag: value} if tag else {})
            self._told[counter, value] = total
