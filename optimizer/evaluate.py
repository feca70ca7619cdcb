"""What a plan does, whoever made it: every split by itself, straight from the tables, apart from the search."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from optimizer import cost
from optimizer.limits import broken_counts, broken_facts, broken_wishes
from optimizer.objective import Objective
from optimizer.plan import Placement, Plan, Split
from optimizer.problem import Problem
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
    rounds = _rounds(plan, parts)
    splits = tuple(_score(part, plan, rate, pace, rounds[part.split]) for part in parts)
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


@dataclass(frozen=True)
class Work:
    """A split before anybody knows the pace."""

    split: Split
    kind: str
    reach: float
    survivors: float
    launch_s: float
    felt_s: float
    transfer_s: float
    stays: bool = False  # its inputs are on its replica already

    @property
    def load_s(self) -> float:
        """Seconds of device per input that arrives at the network."""
        held_s = cost.occupied_s(self.launch_s, self.transfer_s)
        return float(cost.load_s(self.reach, held_s, self.split.batch_size))

    @property
    def fill(self) -> float:
        return 0.0 if self.stays else float(cost.fill_arrivals(self.reach, self.split.batch_size))

    @property
    def wait(self) -> float:
        return 0.0 if self.stays else self.arrivals

    @property
    def arrivals(self) -> float:
        """At the network, between two of its launches."""
        return float(cost.wait_arrivals(self.reach, self.split.batch_size))


def works(plan: Plan, facts: Problem) -> Iterator[Work]:
    reach, before = 1.0, None
    for split in plan.splits:
        placement = plan.placement_of(split)
        stays = placement.local and placement is before
        source = None if before is None or stays else before.kind
        done = replace(work(split, facts, placement.kind, source, reach), stays=stays)
        yield done
        reach, before = done.survivors, placement


def _rounds(plan: Plan, works: list[Work]) -> dict[Split, float]:
    """Seconds that an input spends at each split while its replica is at the other launches of a round."""
    rounds = {work.split: 0.0 for work in works}
    for run in _runs(works):
        placement = plan.placement_of(run[0].split)
        arrivals = max(work.arrivals for work in run)
        for work in run:
            rounds[work.split] = cost.others_s(arrivals, work.load_s, work.launch_s)
        others = [work for work in works if work.split in placement.splits and work not in run]
        rounds[run[0].split] += arrivals * sum(work.load_s for work in others)
    return rounds


def _runs(works: list[Work]) -> Iterator[list[Work]]:
    """Neighbours between which inputs stay on their replica."""
    edges = [i for i, work in enumerate(works) if not work.stays]
    for start, stop in pairwise([*edges, len(works)]):
        if stop - start > 1:
            yield works[start:stop]


def work(split: Split, facts: Problem, kind: str, source: str | None, reach: float) -> Work:
    """A split on `kind` that the share `reach` of all inputs enters, coming from `source`.

    Without a source nothing travels: the inputs come from outside, or stay where they are.
    """
    inside = _inside(split, facts.survival, reach)
    launch_s, felt_s = _launch(split, facts, kind, inside)
    transfer_s = _transfer_s(split, facts, source, kind) if source else 0.0
    if reach == 0:  # nobody comes: nobody waits either
        felt_s = 0.0
    return Work(split, kind, reach, inside[-1], launch_s, felt_s, transfer_s if reach > 0 else 0.0)


def _inside(split: Split, survival: tuple[float, ...], reach: float) -> list[float]:
    """The share of all inputs inside each block of a split, and last the share that goes on behind it."""
    shares = [reach]
    for block in range(split.start, split.stop):
        behind = (*survival, 0.0)[block + 1]
        shares.append(behind if block in split.ramps or block + 1 == len(survival) else shares[-1])
    return shares


def _launch(split: Split, facts: Problem, kind: str, inside: list[float]) -> tuple[float, float]:
    """Seconds that a launch takes on average, and that an input sees which stays to the end."""
    table, size = facts.table(kind), split.batch_size
    staying = np.array(inside[:-1]) / inside[0] if inside[0] > 0 else np.zeros(len(inside) - 1)
    some, mean, felt = cost.occupancy(size, staying), cost.mean_size(size, staying), cost.felt_size(size, staying)
    row, block = np.arange(len(staying)), np.arange(split.start, split.stop)
    ramps = np.isin(block, split.ramps)
    again_s = np.where(np.append(False, ramps[:-1]), table.launch_s, 0.0)  # to shrink, a batch stops at its ramps

    def seconds(batch: cost.Floats) -> cost.Floats:
        ramp_s = np.where(ramps, table.ramp_times_s(batch)[row, block], 0.0)
        return table.block_times_s(batch)[row, block] + ramp_s + again_s

    return table.launch_s + float(some @ seconds(mean)), table.launch_s + float(seconds(felt).sum())


def _transfer_s(split: Split, facts: Problem, source: str, target: str) -> float:
    link = facts.links.get((source, target))
    if link is None:
        raise UserError(f"the plan sends a batch from {source} to {target}, and there is no link between them")
    return link.transfer_s(split.batch_size * facts.table(source).hidden_bytes[split.start - 1])


def _pace(placement: Placement, works: list[Work]) -> float:
    loads = sum(work.load_s for work in works if work.split in placement.splits)
    return placement.replicas / loads


def _score(work: Work, plan: Plan, rate: float, pace: float, round_s: float) -> SplitScore:
    replicas = plan.placement_of(work.split).replicas
    busy, fill_s = work.load_s * pace / replicas, work.fill / rate + round_s
    return SplitScore(**vars(work), load_s=work.load_s, fill_s=fill_s, wait_s=work.wait / pace, busy=busy)
