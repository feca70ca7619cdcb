"""BERT-large on a P100, real arrivals, and inputs whose mix of easy and hard ones drifts and jumps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import numpy as np

from experiments.planner import networks as shapes
from experiments.planner.settings import Network
from experiments.shared.machine import data
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.cluster.load.traces import trace
from isobatch.cluster.load.workloads import Floats, Ints, Mix, following
from isobatch.optimizer import Objective, Plan, Problem, evaluate
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.devices import fleet
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile

TRACES = {
    "twitter": "arrivals/twitter/twitter_2021-08_per_second.tbz2",
    "azure_functions": "arrivals/azure_functions/invitro_1000_inv.csv",
    "azure_code": "arrivals/azure_llm/AzureLLMInferenceTrace_code.csv",
}
BUSY = 0.99  # the quantile of the windows' rates that becomes `percent` of what the first plan sustains
DEVICES, SLO_S, MAX_BATCH = "p100=1", 0.5, 64
LAUNCH_S = 0.004  # launching the kernels of 24 layers one by one from Python
EASY = Network("easy", shapes.bert_large(), ((0.0, 1.0), (0.34, 0.2), (1.0, 0.05)))
HARD = Network("hard", shapes.bert_large(), ((0.0, 1.0), (0.5, 0.97), (1.0, 0.8)))
HALF = tuple((one + other) / 2 for one, other in zip(EASY.exits.survival, HARD.exits.survival, strict=True))
# The share of easy inputs: a walk in steps of a minute, which now and then jumps to anywhere.
STEP_S, STEP, JUMP = 60.0, 0.02, 1 / 45
LEAST_EASY, MOST_EASY = 0.05, 0.95


@dataclass(frozen=True)
class RememberingProblem(ClassifierPlanningProblem):
    """The controller's planning problem, which remembers every plan that the planner returned."""

    considered: list[Plan] = field(default_factory=list, compare=False)

    def best(self, survival: Sequence[float], corrections: Corrections, counts: Mapping[str, int]) -> Plan:
        plan = super().best(survival, corrections, counts)
        self.considered.append(plan)
        return plan

    def sustaining(
        self, rate_per_s: float, survival: Sequence[float], corrections: Corrections, counts: Mapping[str, int]
    ) -> Plan | None:
        plan = super().sustaining(rate_per_s, survival, corrections, counts)
        self.considered.extend([plan] if plan else [])
        return plan


def question() -> RememberingProblem:
    kinds = fleet(DEVICES)
    tables = (datasheet_table(EASY.shape, kind.kind, dtype="float32") for kind in kinds)
    slower = tuple(replace(table, launch_s=LAUNCH_S) for table in tables)
    return RememberingProblem(
        Profile("BERT-large", slower, ExitProfile(HALF)), kinds, Objective(slo_s=SLO_S, max_batch=MAX_BATCH)
    )


@dataclass(frozen=True)
class ReplayedTrace:
    """`hours` of one recorded trace, whose busy windows are at `percent` of what the first plan sustains."""

    trace: str
    percent: int
    hours: int

    @property
    def name(self) -> str:
        return f"{self.trace}_{self.percent}"

    @property
    def seconds(self) -> float:
        return 3600.0 * self.hours

    @property
    def seed(self) -> int:
        """The mix of a trace drifts in the same way at every rate."""
        return list(TRACES).index(self.trace)


def start() -> tuple[Plan, Problem]:
    """The plan that runs first: the best for half of the inputs easy, half hard."""
    problem = question()
    facts = problem.facts(HALF, Corrections())
    return problem.best(HALF, Corrections(), {}), facts


@lru_cache(2)
def inputs(case: ReplayedTrace) -> tuple[Floats, Ints]:
    """Arrivals, and the block after which each input is sure; always the same for a case."""
    plan, facts = start()
    per_s, window_s = recorded_per_s(case.trace, case.hours), Patience().replan_every_s
    windows = per_s.reshape(-1, round(window_s)).mean(axis=1)
    factor = case.percent / 100 * evaluate(plan, facts).goodput_per_s / float(np.quantile(windows, BUSY))
    random = np.random.default_rng([case.seed, case.percent])
    times_s = following(per_s, factor * float(per_s.mean()), case.seconds, random)
    return times_s, mix(case.seconds, case.seed).exit_blocks(times_s, random)


@cache
def recorded_per_s(name: str, hours: int) -> Floats:
    """Arrivals in every second, at the trace's own rate; a trace that is too short is repeated."""
    times_s = trace(data(TRACES[name]), None, 3600.0 * hours)
    return np.asarray(np.bincount(times_s.astype(np.int64), minlength=3600 * hours), float)


def mix(seconds: float, seed: int) -> Mix:
    """A mix whose share of easy inputs walks slowly, and jumps once in three quarters of an hour on average."""
    random, share, shares = np.random.default_rng([seed, 1]), 0.5, list[tuple[float, float]]()
    for at_s in np.arange(0.0, seconds, STEP_S).tolist():
        shares.append((at_s, share))
        jumps, step, anywhere = random.random() < JUMP, random.normal(0.0, STEP), random.random()
        wanted = LEAST_EASY + anywhere * (MOST_EASY - LEAST_EASY) if jumps else share + step
        share = min(max(wanted, LEAST_EASY), MOST_EASY)
    return Mix(EASY.exits, HARD.exits, tuple(shares))
