"""Corrects latency tables by the launch times that replicas measure: slowly, and within bounds.

A factor belongs to one block on one kind of device, so that it stays valid when cuts move. A measured launch runs
several blocks; the factors of all of them move towards its ratio to the table. The time that a device waits between two
launches while inputs wait for it is added to every launch on its kind.

Launches of busy devices weigh more: launches of idle devices are small, unlike full ones.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar

import numpy as np

from isobatch.deployments.front.observed import LaunchShape, LaunchTimes, Observed
from isobatch.optimizer.model.work import work
from isobatch.optimizer.plan import Plan, Split, blocks_text
from isobatch.optimizer.problem import Problem
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable

LEAST_FACTOR = 0.5  # a smaller factor would mean that the table is of another device
MOST_FACTOR = 2.0  # the same for a larger factor
HALF_WEIGHT = 20  # launches in a window at which a factor moves half as fast as with many more
FULLY_BUSY = 0.5  # the share of the time that devices work, from which on their launches weigh in full
MOST_BETWEEN_S = 0.05  # a longer wait between two launches has other causes than the device


@dataclass(frozen=True)
class Corrections:
    """`factors[kind][k]`: how many times longer block k takes on this kind than the table says.

    `between_s[kind]`: how many seconds longer a device waits before a launch than plans assume.

    >>> Corrections({"v100": (1.0, 1.0, 1.25)}).as_json
    {'v100': {'2': 1.25}}
    """

    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    between_s: Mapping[str, float] = field(default_factory=dict)

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    @property
    def as_json(self) -> dict[str, dict[str, float]]:
        """The factors by kind, then by blocks that share one; factors of 1 are left out."""
        by_kind: dict[str, dict[str, float]] = {}
        for kind, factors in self.factors.items():
            for factor, run in groupby(range(len(factors)), key=lambda k: round(factors[k], 2)):
                blocks = list(run)
                if factor != 1:
                    by_kind.setdefault(kind, {})[blocks_text(blocks[0], blocks[-1])] = factor
        return by_kind

    def applied(self, profile: Profile) -> Profile:
        tables = tuple(self._corrected(table) for table in profile.tables)
        return replace(profile, tables=tables)

    def _corrected(self, table: LatencyTable) -> LatencyTable:
        scaled = _scaled(table, self.factors[table.kind]) if table.kind in self.factors else table
        launch_s = scaled.launch_s + self.between_s.get(table.kind, 0.0)
        return replace(scaled, launch_s=launch_s, stop_s=scaled.each_stop_s)

    def learned(self, observed: Observed, plan: Plan, facts: Problem, rate: float) -> "Corrections":
        """The corrections after a window by `plan`; `facts` hold the uncorrected tables and the survival."""
        factors, between_s = {kind: list(each) for kind, each in self.factors.items()}, dict(self.between_s)
        if not observed.launches:
            return self
        rates = {kind: rate * min(1.0, busy / FULLY_BUSY) for kind, busy in busy_shares(observed, plan).items()}
        for (kind, split), (count, took_s, expected_s) in _compared(observed.launches, plan, facts).items():
            row = factors.setdefault(kind, [1.0] * facts.num_blocks)
            ratio = min(max(took_s / expected_s, LEAST_FACTOR), MOST_FACTOR)
            for block in range(split.start, split.stop):
                row[block] += _weight(rates[kind], count) * (ratio - row[block])
        for kind, (count, stands_s) in _between(observed.launches, plan, facts).items():
            before_s = between_s.get(kind, 0.0)
            between_s[kind] = before_s + _weight(rates[kind], count) * (min(stands_s, MOST_BETWEEN_S) - before_s)
        return Corrections({kind: tuple(each) for kind, each in factors.items()}, between_s)


def _weight(rate: float, launches: int) -> float:
    return rate * launches / (launches + HALF_WEIGHT)


def busy_shares(observed: Observed, plan: Plan) -> dict[str, float]:
    """The share of the time in which the plan's devices of each kind computed, or went from one launch to the next."""
    seconds: dict[str, float] = defaultdict(float)
    for launched, took in observed.launches.items():
        seconds[launched.kind] += took.seconds + took.between_s
    return {kind: seconds[kind] / (count * observed.seconds) for kind, count in plan.devices().items()}


def _between(measured: Mapping[LaunchShape, LaunchTimes], plan: Plan, facts: Problem) -> dict[str, tuple[int, float]]:
    """By kind: launches that followed another one, and the wait of their devices beyond what plans assume."""
    waits = dict[str, tuple[int, float]]()
    for kind in plan.devices():
        of_kind = [took for launched, took in measured.items() if launched.kind == kind]
        if followed := sum(took.followed for took in of_kind):
            assumed_s = 0.0  # in plans a device waits where the launch before is shorter than the order's way
            if all(each.local and len(each.splits) > 1 for each in plan.all_placements if each.kind == kind):
                launch_s = sum(took.seconds for took in of_kind) / sum(took.times for took in of_kind)
                assumed_s = max(0.0, facts.turn_s(kind) - launch_s)
            waits[kind] = followed, max(0.0, sum(took.between_s for took in of_kind) / followed - assumed_s)
    return waits


def _compared(
    measured: Mapping[LaunchShape, LaunchTimes], plan: Plan, facts: Problem
) -> dict[tuple[str, Split], tuple[int, float, float]]:
    """For every measured split of the plan: launches, their seconds, and their seconds by the tables."""
    totals: dict[tuple[str, Split], tuple[int, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
    splits = _splits(plan, facts) if measured else {}
    for launched, took in measured.items():
        match = splits.get((launched.kind, launched.start, launched.stop))
        if match and took.times:
            split, reach = match
            each_s = work(replace(split, batch_size=launched.size), facts, launched.kind, None, reach).launch_s
            count, seconds, expected_s = totals[launched.kind, split]
            totals[launched.kind, split] = (
                count + took.times,
                seconds + took.seconds,
                expected_s + took.times * each_s,
            )
    return totals


def _splits(plan: Plan, facts: Problem) -> dict[tuple[str, int, int], tuple[Split, float]]:
    """Every split of every pipeline, and the share of all inputs that enters it.

    Where pipelines share a kind, a launch does not say to which pipeline it belongs. So blocks that two pipelines run
    with different ramps, or after different exits, are left out.
    """
    splits: dict[tuple[str, int, int], tuple[Split, float]] = {}
    unclear = set()
    for pipeline in plan.pipelines:
        reach = 1.0
        for split in pipeline.splits:
            kind = pipeline.placement_of(split).kind
            key = kind, split.start, split.stop
            known, known_reach = splits.setdefault(key, (split, reach))
            if (known.ramps, known_reach) != (split.ramps, reach):
                unclear.add(key)
            reach = work(split, facts, kind, None, reach).survivors
    return {key: each for key, each in splits.items() if key not in unclear}


def _scaled(table: LatencyTable, factors: tuple[float, ...]) -> LatencyTable:
    """The table with scaled blocks; the cost of a launch is scaled by the mean factor."""
    by = np.asarray(factors)
    block_s, ramp_s, block_p95_s = (
        tuple(tuple(float(each) for each in np.asarray(row) * by) for row in rows)
        for rows in (table.block_s, table.ramp_s, table.block_p95_s)
    )
    mean = float(by.mean())
    launch_s, stop_s = table.launch_s * mean, table.each_stop_s * mean
    return replace(table, block_s=block_s, ramp_s=ramp_s, block_p95_s=block_p95_s, launch_s=launch_s, stop_s=stop_s)
