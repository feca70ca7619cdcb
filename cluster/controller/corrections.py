"""Corrects latency tables by what replicas measure: slowly, and within bounds.

A factor belongs to one block on one kind of device, so that it stays true when cuts move. What is measured is a launch
over several blocks; all of them move towards its ratio to the table.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar

import numpy as np

from deployments.front.observed import LaunchShape, Took
from optimizer.model.works import work
from optimizer.plan import Plan, Split, blocks_told
from optimizer.problem import Problem
from profiles.files import Profile
from profiles.latency import LatencyTable

LEAST, MOST = 0.5, 2.0
TRUSTED = 20  # launches that weigh half of what any number of them would


@dataclass(frozen=True)
class Corrections:
    """`factors[kind][k]`: how many times longer block k takes there than the table says.

    >>> Corrections({"v100": (1.0, 1.0, 1.25)}).told
    {'v100': {'2': 1.25}}
    """

    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    @property
    def told(self) -> dict[str, dict[str, float]]:
        """By kind, then by blocks that share a factor; what is as the table says is left out."""
        told: dict[str, dict[str, float]] = {}
        for kind, factors in self.factors.items():
            for factor, run in groupby(range(len(factors)), key=lambda k: round(factors[k], 2)):
                blocks = list(run)
                if factor != 1:
                    told.setdefault(kind, {})[blocks_told(blocks[0], blocks[-1])] = factor
        return told

    def applied(self, profile: Profile) -> Profile:
        """The profile with its tables corrected."""
        tables = tuple(
            _scaled(table, self.factors[table.kind]) if table.kind in self.factors else table
            for table in profile.tables
        )
        return replace(profile, tables=tables)

    def learned(self, measured: Mapping[LaunchShape, Took], plan: Plan, facts: Problem, rate: float) -> "Corrections":
        """The corrections after a window by `plan`; `facts` hold the profile's own tables, and who survived.

        >>> Corrections().learned({}, None, None, rate=0.2).factors
        {}
        """
        factors = {kind: list(each) for kind, each in self.factors.items()}
        for (kind, split), (count, took_s, expected_s) in _compared(measured, plan, facts).items():
            row = factors.setdefault(kind, [1.0] * facts.num_blocks)
            ratio = min(max(took_s / expected_s, LEAST), MOST)
            weight = rate * count / (count + TRUSTED)
            for block in range(split.start, split.stop):
                row[block] += weight * (ratio - row[block])
        return Corrections({kind: tuple(each) for kind, each in factors.items()})


def _compared(
    measured: Mapping[LaunchShape, Took], plan: Plan, facts: Problem
) -> dict[tuple[str, Split], tuple[int, float, float]]:
    """For every split of the plan that was measured: launches, their seconds, and what the tables say they take."""
    found: dict[tuple[str, Split], tuple[int, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
    splits = _splits(plan, facts) if measured else {}
    for launched, took in measured.items():
        here = splits.get((launched.kind, launched.start, launched.stop))
        if here and took.times:
            split, reach = here
            each_s = work(replace(split, batch_size=launched.size), facts, launched.kind, None, reach).launch_s
            count, seconds, expected_s = found[launched.kind, split]
            found[launched.kind, split] = (count + took.times, seconds + took.seconds, expected_s + took.times * each_s)
    return found


def _splits(plan: Plan, facts: Problem) -> dict[tuple[str, int, int], tuple[Split, float]]:
    """Every split of every pipeline, and the share of all inputs that enters it.

    Where pipelines share a kind, a launch does not say which one it was of. So blocks that they run alike, but with
    other ramps or behind other exits, are left out.
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
    """Launching is as much slower or faster as the blocks are on average."""
    by = np.asarray(factors)
    block_s, ramp_s, block_p95_s = (
        tuple(tuple(float(each) for each in np.asarray(row) * by) for row in rows)
        for rows in (table.block_s, table.ramp_s, table.block_p95_s)
    )
    launch_s = table.launch_s * float(by.mean())
    return replace(table, block_s=block_s, ramp_s=ramp_s, block_p95_s=block_p95_s, launch_s=launch_s)
