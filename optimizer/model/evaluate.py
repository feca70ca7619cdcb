"""The goodput, latency and cost of any plan, computed split by split from the tables, independently of the search."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from isobatch.optimizer.model import split_costs
from isobatch.optimizer.model.limits import broken_counts, broken_facts, broken_objective
from isobatch.optimizer.model.work import Work, local_waits_s, works
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Plan, Promise
from isobatch.optimizer.problem import Problem
from isobatch.profiles.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SplitScore(Work):
    """The work of one split of a plan at full load. `busy` is its share of its placement's time."""

    fill_s: float
    wait_s: float
    busy: float


@dataclass(frozen=True)
class Score:
    """A whole plan, with one line for each limit that it breaks."""

    splits: tuple[SplitScore, ...]
    goodput_per_s: float
    latency_s: float  # of an input that stays to the end, at full load
    cost_per_hour: float
    broken: tuple[str, ...]
    pipelines: "tuple[Score, ...]" = ()  # where several run side by side

    def promise(self, gap: float) -> Promise:
        return Promise(self.goodput_per_s, self.latency_s, self.cost_per_hour, gap)

    def answer_s(self, rate_per_s: float) -> float:
        """The latency of an input that stays to the end when inputs arrive at this rate."""
        if self.pipelines:
            shares = [each.goodput_per_s / self.goodput_per_s for each in self.pipelines]
            return max(each.answer_s(rate_per_s * share) for each, share in zip(self.pipelines, shares, strict=True))
        alone_s = sum(split.alone_s for split in self.splits)
        return float(split_costs.answer_s(alone_s, self.latency_s, min(1.0, rate_per_s / self.goodput_per_s)))

    @property
    def latency_parts_s(self) -> dict[str, float]:
        """The parts of the latency of an input that stays to the end, for the slowest pipeline."""
        if self.pipelines:
            return max(self.pipelines, key=lambda pipeline: pipeline.latency_s).latency_parts_s
        return {
            "filling batches": sum(split.fill_s for split in self.splits),
            "waiting for a replica": sum(split.wait_s for split in self.splits),
            "computing": sum(split.felt_s for split in self.splits),
            "travelling": sum(split.transfer_s for split in self.splits),
        }

    def as_json(self) -> dict[str, object]:
        """The fields by their names in files, where the pipelines are called `lanes`."""
        fields = asdict(replace(self, pipelines=()))
        del fields["pipelines"]
        for as_json, split in zip(fields["splits"], self.splits, strict=True):
            as_json["load_s"] = split.load_s
        return {**fields, "lanes": [pipeline.as_json() for pipeline in self.pipelines]}


def evaluate(plan: Plan, facts: Problem, objective: Objective | None = None) -> Score:
    """Goodput, latency and cost of a plan, and the limits of the objective that it breaks."""
    objective = objective or Objective()
    if plan.beside:
        return _together(plan, facts, objective)
    return _alone(plan, facts.for_plan(plan), objective)


def _alone(plan: Plan, facts: Problem, objective: Objective, lane: Sequence[Plan] = ()) -> Score:
    """Score one pipeline. `lane`: all pipelines that are served as one with it (Problem.lanes); empty: it alone."""
    if plan.num_blocks != facts.num_blocks:
        raise UserError(f"the plan covers {plan.num_blocks} blocks, the network has {facts.num_blocks}")
    lane, parts = lane or (plan,), list(works(plan, facts))
    loads_s = [sum(work.load_s for work in parts if work.split in each.splits) for each in plan.placements]
    replicas = np.array([[placement.replicas for placement in each.placements] for each in lane])
    lane_per_s = float((replicas.sum(axis=0) / loads_s).min())
    shares = (replicas / loads_s).min(axis=1)
    goodput_per_s = lane_per_s * float(shares[lane.index(plan)] / shares.sum())
    among_others_s = local_waits_s(plan, parts)
    counts = dict(zip(plan.placements, replicas.sum(axis=0).tolist(), strict=True))
    splits = tuple(
        _score(part, lane_per_s, counts[plan.placement_of(part.split)], among_others_s[part.split]) for part in parts
    )
    latency_s = float(sum(part.felt_s + part.transfer_s + part.fill_s + part.wait_s for part in splits))
    price = sum(p.replicas * facts.device(p.kind).price_per_hour for p in plan.placements)
    broken = (*broken_facts(plan, facts), *broken_objective(goodput_per_s, latency_s, price, objective))
    return Score(splits, goodput_per_s, latency_s, price, broken)


def _together(plan: Plan, facts: Problem, objective: Objective) -> Score:
    """Score pipelines side by side, which share inputs by goodput: goodputs add up, and the slowest answer counts."""
    numbers, lanes = facts.lanes(plan), defaultdict[int, list[Plan]](list)
    for number, pipeline in zip(numbers, plan.pipelines, strict=True):
        lanes[number].append(pipeline)
    scores = [
        _alone(pipeline, facts.for_plan(pipeline), Objective(), lanes[number])
        for number, pipeline in zip(numbers, plan.pipelines, strict=True)
    ]
    goodput_per_s = sum(score.goodput_per_s for score in scores)
    latency_s, price = max(score.latency_s for score in scores), sum(score.cost_per_hour for score in scores)
    broken = [line for score in scores for line in score.broken]
    broken += [*broken_counts(plan, facts), *broken_objective(goodput_per_s, latency_s, price, objective)]
    splits = tuple(split for score in scores for split in score.splits)
    return Score(splits, goodput_per_s, latency_s, price, tuple(broken), tuple(scores))


def _score(work: Work, lane_per_s: float, replicas: int, among_others_s: float) -> SplitScore:
    busy, fill_s = work.load_s * lane_per_s / replicas, work.fill / lane_per_s + among_others_s
    return SplitScore(**vars(work), fill_s=fill_s, wait_s=work.wait / lane_per_s, busy=busy)
