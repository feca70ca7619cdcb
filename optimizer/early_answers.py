"""Early answers: an input is answered at a ramp, but runs on to the end (Apparate, SOSP '24).

Batches never shrink, so only the time until the answer is gained. The network runs in one piece. Its ramps may delay
the inputs that stay to the end by a budget: a share of the time that a lone input takes without ramps, since ramps
delay a lone input most; and no further than the SLO allows. Of all sets of ramps within the budget, the one with the
shortest mean time until the answer is opened. A ramp is worth opening as long as the inputs that leave there save more
time than the inputs after it lose (the paper's utility); the mean counts both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import NO_EXITS, baseline
from isobatch.optimizer.plan import Placement, Plan
from isobatch.optimizer.problem import Problem
from isobatch.profiles.errors import UserError


@dataclass(frozen=True)
class Times:
    """Seconds into a launch: `done_s[k]` when block k and its ramp are done, with no other ramp open.

    `delay_s[k]`: how much later everything after block k is when its ramp is open. The last block has no ramp.
    """

    done_s: tuple[float, ...]
    delay_s: tuple[float, ...]

    @classmethod
    def of(cls, facts: Problem, kind: str, batch: int) -> "Times":
        table = facts.table(kind)
        ramps_s, ends_s = table.ramp_times_s(batch), table.launch_s + table.block_times_s(batch).cumsum()
        done_s = [*(ends_s + ramps_s)[:-1], ends_s[-1]]
        return cls(tuple(map(float, done_s)), tuple(map(float, ramps_s[:-1] + table.each_stop_s)))

    def mean_s(self, survival: tuple[float, ...], ramps: tuple[int, ...]) -> float:
        """The mean time until an input is answered."""
        opened = NO_RAMPS
        for ramp in ramps:
            opened = opened.with_ramp(ramp, survival[ramp + 1], self)
        return opened.mean_s(self)


@dataclass(frozen=True)
class _Opened:
    """Some open ramps up to the current block: the inputs still inside, the delay, and the time of those that left."""

    ramps: tuple[int, ...]
    inside: float
    later_s: float
    left_s: float  # mean seconds until the answer of the inputs that left, times their share

    def with_ramp(self, ramp: int, behind: float, times: Times) -> "_Opened":
        left_s = self.left_s + (self.inside - behind) * (self.later_s + times.done_s[ramp])
        return _Opened((*self.ramps, ramp), behind, self.later_s + times.delay_s[ramp], left_s)

    def mean_s(self, times: Times) -> float:
        """The mean time until an input is answered, if no further ramp is opened."""
        return self.left_s + self.inside * (self.later_s + times.done_s[-1])


NO_RAMPS = _Opened((), 1.0, 0.0, 0.0)


def best_ramps(times: Times, survival: tuple[float, ...], ramps: tuple[int, ...], budget_s: float) -> tuple[int, ...]:
    """The subset of these ramps with which inputs are answered soonest, and none is delayed beyond the budget."""
    sets = [NO_RAMPS]
    for ramp in ramps:
        larger = [each.with_ramp(ramp, survival[ramp + 1], times) for each in sets]
        sets = list(_undominated(sets + [each for each in larger if each.later_s <= budget_s]))
    return min(sets, key=lambda each: (each.mean_s(times), each.ramps)).ramps


def _undominated(sets: list[_Opened]) -> Iterator[_Opened]:
    """The sets of ramps that no other set beats in every fact that matters for later blocks.

    The share that remains after a later ramp does not depend on the ramps before it, but the share that leaves there
    does: the cost of an input that leaves in between is known only at the next ramp. So only equal shares are compared.
    """
    by_inside = dict[float, list[_Opened]]()
    for each in sorted(sets, key=lambda each: (each.later_s, each.left_s)):
        best = by_inside.setdefault(each.inside, [])
        if not best or each.left_s < best[-1].left_s:
            best.append(each)
            yield each


def early_plan(facts: Problem, objective: Objective) -> Plan:
    """The whole network on every device, as without exits, with the ramps that answer soonest within the budget."""
    assert objective.ramp_budget is not None, "This is a bug: answers are not early."
    plan = baseline(NO_EXITS, facts, objective).plan
    if plan is None:
        raise UserError("answers: early runs the whole network, and no batch size of it keeps these limits")
    opened = plan.with_each(partial(_answering, facts=facts, budget=objective.ramp_budget, limit_s=objective.budget_s))
    score = evaluate(opened, facts.without_exits, objective)
    if score.goodput_per_s < objective.goodput_per_s:  # a baseline need not reach it
        sustains = f"answers: early runs the whole network, which sustains {score.goodput_per_s:.4g}/s on these devices"
        raise UserError(f"{sustains}: {objective.goodput_per_s:.4g}/s are wanted")
    return replace(opened, promise=score.promise(0.0))


def _answering(pipeline: Plan, facts: Problem, budget: float, limit_s: float) -> Plan:
    """`limit_s`: the latency that the pipeline may have. It grows by the same share as a launch."""
    (placement,) = pipeline.placements
    (split,) = placement.splits
    times, alone = (Times.of(facts, placement.kind, size) for size in (split.batch_size, 1))
    room_s = (limit_s / evaluate(pipeline, facts.without_exits).latency_s - 1) * times.done_s[-1]
    budget_s = min(budget * alone.done_s[-1], room_s)
    ramps = best_ramps(times, facts.survival, tuple(sorted(facts.ramp_blocks)), budget_s)
    opened = Placement(placement.kind, placement.replicas, (replace(split, ramps=ramps),))
    return replace(pipeline, placements=(opened,))


def answered_s(plan: Plan, facts: Problem) -> float:
    """The mean time from the start of a launch until an input is answered."""
    rates = [evaluate(pipeline, facts.without_exits).goodput_per_s for pipeline in plan.pipelines]
    times = [Times.of(facts, each.placements[0].kind, each.splits[0].batch_size) for each in plan.pipelines]
    means = [each.mean_s(facts.survival, pipeline.ramps) for each, pipeline in zip(times, plan.pipelines, strict=True)]
    return float(np.average(means, weights=rates))


def check_whole(plan: Plan) -> None:
    """Refuse a plan that cuts the network."""
    if any(len(pipeline.splits) > 1 for pipeline in plan.pipelines):
        raise UserError("answers: early needs a plan without cuts, as no input leaves the network before its end")
