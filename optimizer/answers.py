"""Early answers: an input is answered at a ramp, and runs on to the end all the same (Apparate, SOSP '24).

Batches never shrink, so nothing is gained but time until the answer: the network runs in one piece, and its ramps may
delay who stays to the end by a budget, a share of what it takes without them: of a lone input, to whom a ramp's time
matters most. Of all sets of ramps within that, the one is opened with which answers are known soonest on average. A
ramp is worth opening as long as those who leave there save more time by it than all behind it lose (the paper's
utility): the sum of both is what the average tells.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from optimizer.model.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.pipelines.baselines import NO_EXITS, baseline
from optimizer.plan import Placement, Plan, Promise
from optimizer.problem import Problem
from profiles.errors import UserError


@dataclass(frozen=True)
class Times:
    """Seconds into a launch: `known[k]` when block k and its ramp are done, if no ramp was looked at before.

    `delay[k]`: by how much everything behind it is later if the ramp of block k is looked at. The last block has none.
    """

    known: tuple[float, ...]
    delay: tuple[float, ...]

    @classmethod
    def of(cls, facts: Problem, kind: str, batch: int) -> "Times":
        table = facts.table(kind)
        ramps_s, ends_s = table.ramp_times_s(batch), table.launch_s + table.block_times_s(batch).cumsum()
        known = [*(ends_s + ramps_s)[:-1], ends_s[-1]]
        return cls(tuple(map(float, known)), tuple(map(float, ramps_s[:-1] + table.each_stop_s)))

    def mean_s(self, survival: tuple[float, ...], ramps: tuple[int, ...]) -> float:
        """When an input is answered on average."""
        inside, later_s, mean_s = 1.0, 0.0, 0.0
        for ramp in ramps:
            mean_s += (inside - survival[ramp + 1]) * (later_s + self.known[ramp])
            inside, later_s = survival[ramp + 1], later_s + self.delay[ramp]
        return mean_s + inside * (later_s + self.known[-1])


@dataclass(frozen=True)
class _Opened:
    """Some ramps, the last of them behind the block that is looked at: how late all is by them, and who left."""

    ramps: tuple[int, ...]
    inside: float
    later_s: float
    left_s: float  # seconds of those who have left, times their share

    def with_ramp(self, ramp: int, behind: float, times: Times) -> "_Opened":
        left_s = self.left_s + (self.inside - behind) * (self.later_s + times.known[ramp])
        return _Opened((*self.ramps, ramp), behind, self.later_s + times.delay[ramp], left_s)


def best_ramps(times: Times, survival: tuple[float, ...], ramps: tuple[int, ...], budget_s: float) -> tuple[int, ...]:
    """Of these ramps those with which inputs are answered soonest, and nobody later than by the budget."""
    found = [_Opened((), 1.0, 0.0, 0.0)]
    for ramp in ramps:
        more = [each.with_ramp(ramp, survival[ramp + 1], times) for each in found]
        found = list(_undominated(found + [each for each in more if each.later_s <= budget_s]))
    return min(found, key=lambda each: (times.mean_s(survival, each.ramps), each.ramps)).ramps


def _undominated(found: list[_Opened]) -> Iterator[_Opened]:
    """Without those that are behind another in all that counts later on: who is inside, how late, and who has left.

    Who is inside behind a later ramp does not depend on the ramps before, but who leaves there does: what an input
    costs that leaves in between is settled only by the next ramp. So equal shares inside are compared.
    """
    least = dict[float, list[_Opened]]()
    for each in sorted(found, key=lambda each: (each.later_s, each.left_s)):
        kept = least.setdefault(each.inside, [])
        if not kept or each.left_s < kept[-1].left_s:
            kept.append(each)
            yield each


def early_plan(facts: Problem, objective: Objective) -> Plan:
    """The whole network on every device, as without exits, and the ramps that answer soonest within the budget."""
    assert objective.ramp_budget is not None, "This is a bug: answers are not early."
    plan = baseline(NO_EXITS, facts, objective).plan
    if plan is None:
        raise UserError("answers: early runs the whole network, which no batch size does within what is asked")
    first, *others = [_answering(pipeline, facts, objective.ramp_budget) for pipeline in plan.pipelines]
    opened = replace(first, beside=tuple(others))
    score = evaluate(opened, facts.without_exits, objective)
    return replace(opened, promise=Promise(score.goodput_per_s, score.latency_s, score.cost_per_hour, 0.0))


def _answering(pipeline: Plan, facts: Problem, budget: float) -> Plan:
    (placement,) = pipeline.placements
    (split,) = placement.splits
    times, alone = (Times.of(facts, placement.kind, size) for size in (split.batch_size, 1))
    ramps = best_ramps(times, facts.survival, tuple(sorted(facts.ramp_blocks)), budget * alone.known[-1])
    return replace(
        pipeline, placements=(Placement(placement.kind, placement.replicas, (replace(split, ramps=ramps),)),)
    )


def answered_s(plan: Plan, facts: Problem) -> float:
    """When an input is answered on average, counted from when its launch begins."""
    rates = [evaluate(pipeline, facts.without_exits).goodput_per_s for pipeline in plan.pipelines]
    times = [Times.of(facts, each.placements[0].kind, each.splits[0].batch_size) for each in plan.pipelines]
    means = [each.mean_s(facts.survival, own.ramps) for each, own in zip(times, plan.pipelines, strict=True)]
    return float(np.average(means, weights=rates))


def check_whole(plan: Plan) -> None:
    """Refuse a plan that cuts the network."""
    if any(len(pipeline.splits) > 1 for pipeline in plan.pipelines):
        raise UserError("answers: early needs a plan without cuts, as no input leaves the network before its end")
