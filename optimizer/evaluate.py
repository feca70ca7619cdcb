"""What a plan does, whoever made it: every split by itself, straight from the tables, apart from the search."""

from dataclasses import dataclass

from optimizer.limits import broken_counts, broken_facts, broken_wishes
from optimizer.objective import Objective
from optimizer.plan import Placement, Plan, Split
from optimizer.problem import Problem
from optimizer.works import Work, rounds_s, works
from profiles.errors import UserError


@dataclass(frozen=True)
class SplitScore:
    """One split of a plan. Times are seconds; `busy` is its share of its placement's time at full pace."""

    split: Split
    kind: str
    reach: float  # the share of all inputs that enter
    survivors: float  # the share of all inputs that go on
    launch_s: float
    felt_s: float  # what an input that stays to the end sees of a launch
    transfer_s: float
    stays: bool  # its inputs are on its replica already
    load_s: float
    fill_s: float
    wait_s: float
    busy: float


@dataclass(frozen=True)
class Score:
    """A whole plan."""

    splits: tuple[SplitScore, ...]
    goodput_per_s: float
    rate_per_s: float
    latency_s: float
    cost_per_hour: float
    broken: tuple[str, ...]  # what the objective asks and the plan does not keep, one line each
    lanes: "tuple[Score, ...]" = ()  # of every pipeline, where several run side by side

    @property
    def latency_parts_s(self) -> dict[str, float]:
        """The latency of an input that stays to the end, by what it waits for; that of the slowest pipeline."""
        if self.lanes:
            return max(self.lanes, key=lambda lane: lane.latency_s).latency_parts_s
        return {
            "filling batches": sum(split.fill_s for split in self.splits),
            "waiting for a replica": sum(split.wait_s for split in self.splits),
            "computing": sum(split.felt_s for split in self.splits),
            "travelling": sum(split.transfer_s for split in self.splits),
        }


def evaluate(plan: Plan, facts: Problem, objective: Objective | None = None) -> Score:
    """Goodput, latency and cost of a plan, and which wishes of the objective it breaks."""
    objective = objective or Objective()
    if plan.beside:
        return _together(plan, facts, objective)
    if plan.num_blocks != facts.num_blocks:
        raise UserError(f"the plan covers {plan.num_blocks} blocks, the network has {facts.num_blocks}")
    parts = list(works(plan, facts))
    pace = min(_pace(placement, parts) for placement in plan.placements)
    rate = objective.rate_at(pace)
    in_rounds = rounds_s(plan, parts)
    splits = tuple(_score(part, plan, rate, pace, in_rounds[part.split]) for part in parts)
    latency_s = float(sum(part.felt_s + part.transfer_s + part.fill_s + part.wait_s for part in splits))
    price = sum(p.replicas * facts.device(p.kind).price_per_hour for p in plan.placements)
    broken = (*broken_facts(plan, facts), *broken_wishes(pace, latency_s, price, objective))
    return Score(splits, pace, rate, latency_s, price, broken)


def _together(plan: Plan, facts: Problem, objective: Objective) -> Score:
    """Pipelines side by side take shares by what each sustains: goodputs add up, and the slowest answer counts."""
    paces = [evaluate(lane, facts).goodput_per_s for lane in plan.lanes]
    pace = sum(paces)
    rate = objective.rate_at(pace)
    shares = [Objective(arrivals_per_s=rate * each / pace) for each in paces]
    lanes = [evaluate(lane, facts, share) for lane, share in zip(plan.lanes, shares, strict=True)]
    latency_s, price = max(lane.latency_s for lane in lanes), sum(lane.cost_per_hour for lane in lanes)
    broken = [line for lane in lanes for line in lane.broken]
    broken += [*broken_counts(plan, facts), *broken_wishes(pace, latency_s, price, objective)]
    splits = tuple(split for lane in lanes for split in lane.splits)
    return Score(splits, pace, rate, latency_s, price, tuple(broken), tuple(lanes))


def _pace(placement: Placement, works: list[Work]) -> float:
    loads = sum(work.load_s for work in works if work.split in placement.splits)
    return placement.replicas / loads


def _score(work: Work, plan: Plan, rate: float, pace: float, round_s: float) -> SplitScore:
    replicas = plan.placement_of(work.split).replicas
    busy, fill_s = work.load_s * pace / replicas, work.fill / rate + round_s
    return SplitScore(**vars(work), load_s=work.load_s, fill_s=fill_s, wait_s=work.wait / pace, busy=busy)
