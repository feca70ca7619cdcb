"""Simulates Tabi's networks with its latencies (table 1) and shares (section 7.3.2), our planner and dispatcher.

As in the paper, there are two V100s, one query at a time, and no batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isobatch.cluster.load.workloads import arrivals, exit_blocks
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.cluster.simulator.sustained import sustained_per_s
from isobatch.optimizer import Objective, Plan, Problem, optimize, problem
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable, cascade_table

QUERIES, APART_S, SLO_S = 20_000, 0.1, 0.2
TEXT_BYTES = 16 * 40  # 40 tokens
BYTES = 4  # bytes of a parameter
DEVICES = fleet("v100=2")


@dataclass(frozen=True)
class TabiNetwork:
    """A row of table 1: layers, latency and parameters."""

    layers: int
    ms: float
    parameters: float

    def table(self) -> LatencyTable:
        row = (1e-3 * self.ms / self.layers,) * self.layers
        size = int(BYTES * self.parameters / self.layers)
        none = (0.0,) * self.layers
        return LatencyTable("v100", (1,), (row,), (none,), 0.0, (4096,) * self.layers, (size,) * self.layers, "Tabi")


DISTILBERT, ROBERTA, DEBERTA = TabiNetwork(6, 7, 66e6), TabiNetwork(24, 26, 355e6), TabiNetwork(24, 29, 406e6)


@dataclass(frozen=True)
class TabiSet:
    """A data set of the paper. `answered`: the share of queries that only the small network sees."""

    name: str
    large: TabiNetwork
    answered: float

    def alone(self) -> Profile:
        return Profile("large", (self.large.table(),), ExitProfile((1.0,) * self.large.layers))

    def cascade(self) -> Profile:
        table = cascade_table([DISTILBERT.table(), self.large.table()], TEXT_BYTES)
        going_on = (1.0,) * DISTILBERT.layers + (1 - self.answered,) * self.large.layers
        return Profile("both", (table,), ExitProfile(going_on), edges=(DISTILBERT.layers,))


SETS = (TabiSet("mnli", DEBERTA, 0.494), TabiSet("sst2", ROBERTA, 0.698))


def measured() -> Iterator[tuple[str, float]]:
    for data_set in SETS:
        large, both = data_set.alone(), data_set.cascade()
        yield f"tabi_{data_set.name}_latency", mean_s(both) / mean_s(large)
        yield f"tabi_{data_set.name}_goodput", goodput_per_s(both) / goodput_per_s(large)


def mean_s(profile: Profile) -> float:
    """The mean latency of queries that arrive far apart."""
    plan, facts = _planned(profile)
    times_s = arrivals("uniform", 1 / APART_S, QUERIES * APART_S, seed=0)
    blocks = exit_blocks(ExitProfile(facts.survival), len(times_s), np.random.default_rng(0))
    return simulate(World(plan, facts, SLO_S), [(times_s, blocks)], QUERIES * APART_S).tally.mean_s


def goodput_per_s(profile: Profile) -> float:
    """The sustained rate within the deadline."""
    plan, facts = _planned(profile)
    return sustained_per_s(plan, facts, SLO_S)


def _planned(profile: Profile) -> tuple[Plan, Problem]:
    links = links_between(DEVICES, one_machine=True)
    return optimize(profile, DEVICES, links, Objective(slo_s=SLO_S, fixed_batch=1)), problem(profile, DEVICES, links)
