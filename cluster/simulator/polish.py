"""Betters a plan by playing it: moves around it, other slacks, the baselines, for as long as there is time.

The planner believes in sums of medians and even spacing; the simulator plays bursts, queues and the product's own
dispatcher. What it sustains more of is the better plan.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from cluster.simulator.simulation import World
from cluster.simulator.sustained import IN_TIME_SHARE, SHORT_SLOS, SLOS, run, sustained
from optimizer.effort import MOST_GAP, Effort
from optimizer.model.evaluate import evaluate
from optimizer.moves import neighbours
from optimizer.objective import Objective
from optimizer.pipelines.baselines import baselines
from optimizer.pipelines.side_by_side import side_by_side
from optimizer.plan import Plan, Promise
from optimizer.problem import Problem
from profiles.errors import UserError

SLACKS = (0.0, 0.1, 0.3, 0.4)
STEP = 0.01  # a plan is better if it sustains this share more
HOPE = 1.1  # a plan sustains at most so many times what its devices compute, as the planner counts it
INPUTS = 15_000
OTHER_SEED = 1  # the best of many is best by chance as well: other inputs decide in the end


@dataclass(frozen=True)
class Polished:
    """The better plan, what the simulator sustained of both, and how many others were played."""

    plan: Plan
    before_per_s: float
    after_per_s: float
    tried: int

    @property
    def gain(self) -> float:
        return self.after_per_s / self.before_per_s - 1 if self.before_per_s else 0.0


def polished(
    plan: Plan, facts: Problem, objective: Objective, out_of_time: Callable[[], bool], inputs: int = INPUTS,
    slos: float = SLOS,
) -> Polished:  # fmt: skip
    """Climb from the plan to better ones. The promise of the result is what the simulator sustains of it.

    Runs have at least so many inputs, and those that decide last so many SLOs (sustained.py).
    """
    if objective.slo_s is None or not objective.aim.adds_up:
        raise UserError("--polish looks for the most goodput within --slo-ms: it needs that, and no other goal")
    climb = Climb(facts, objective.slo_s, replace(plan, promise=None), inputs, slos)
    others = _other_plans(facts, objective, out_of_time)
    while climb.through(others, out_of_time):
        pass
    while climb.through(_promising(climb.best, facts, objective), out_of_time):
        pass
    before_per_s, after_per_s = (
        sustained(each, facts, objective.slo_s, inputs, OTHER_SEED, slos=slos).goodput_per_s
        for each in (plan, climb.best)
    )
    if after_per_s <= before_per_s:
        return Polished(_promising_so_much(plan, plan, facts, before_per_s), before_per_s, before_per_s, climb.tried)
    return Polished(_promising_so_much(climb.best, plan, facts, after_per_s), before_per_s, after_per_s, climb.tried)


@dataclass
class Climb:
    """The best plan so far, and the rate that it sustains."""

    facts: Problem
    slo_s: float
    best: Plan
    inputs: int
    slos: float
    rate_per_s: float = 0.0
    tried: int = 0
    _seen: set[Plan] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rate_per_s = sustained(self.best, self.facts, self.slo_s, self.inputs, slos=self.slos).goodput_per_s
        self._seen.add(self.best)

    def through(self, plans: Iterator[Plan], out_of_time: Callable[[], bool]) -> bool:
        """Play these until one is better, which then is the best so far."""
        for plan in plans:
            if out_of_time():
                return False
            if plan not in self._seen and evaluate(plan, self.facts).goodput_per_s * HOPE > self.rate_per_s:
                self._seen.add(plan)
                self.tried += 1
                if self._is_better(plan):
                    return True
        return False

    def _is_better(self, plan: Plan) -> bool:
        step, rate_per_s = STEP, self.rate_per_s
        while self._keeps(plan, rate_per_s * (1 + step)):
            self.best, self.rate_per_s = plan, rate_per_s * (1 + step)
            step *= 2
        return self.best is plan

    def _keeps(self, plan: Plan, rate_per_s: float) -> bool:
        """A short run refuses most at little cost; a long one decides."""
        world = World(plan, self.facts, self.slo_s)
        short = min(self.slos, SHORT_SLOS)
        inputs = (max(self.inputs, int(slos * self.slo_s * rate_per_s)) for slos in sorted({short, self.slos}))
        return all(run(world, rate_per_s, each, 0).good_share >= IN_TIME_SHARE for each in inputs)


def _other_plans(facts: Problem, objective: Objective, out_of_time: Callable[[], bool]) -> Iterator[Plan]:
    """The baselines, and the best plans at other slacks."""
    free = objective.cuts is None and not facts.edges
    for other in baselines(facts, replace(objective, slack=0.0)) if free else ():
        if other.plan:
            yield replace(other.plan, promise=None)
    for slack in SLACKS:
        plan = side_by_side(facts, replace(objective, slack=slack), effort=Effort(out_of_time=out_of_time))
        if plan:
            yield replace(plan, promise=None)


def _promising(plan: Plan, facts: Problem, objective: Objective) -> Iterator[Plan]:
    """The neighbours, those first whose devices can do most."""
    moved = {each: evaluate(each, facts).goodput_per_s for each in neighbours(plan, facts, objective)}
    yield from sorted(moved, key=lambda each: -moved[each])


def _promising_so_much(plan: Plan, planned: Plan, facts: Problem, goodput_per_s: float) -> Plan:
    """With the gap to the most that the planner holds possible."""
    score, believed = evaluate(plan, facts), evaluate(planned, facts).goodput_per_s
    most = believed * (1 + (planned.promise.gap if planned.promise else 0.0))
    gap = min(max(0.0, most / goodput_per_s - 1), MOST_GAP) if goodput_per_s else MOST_GAP
    return replace(plan, promise=Promise(goodput_per_s, score.latency_s, score.cost_per_hour, gap))
