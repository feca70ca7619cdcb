"""The work of each split of a plan, straight from the tables, before the goodput of the plan is known."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from isobatch.optimizer.effort import Floats
from isobatch.optimizer.model import split_costs
from isobatch.optimizer.plan import Plan, Split
from isobatch.optimizer.problem import Problem
from isobatch.profiles.errors import UserError


@dataclass(frozen=True)
class Work:
    """One split: the share of inputs that reach it, and the times of its launches."""

    split: Split
    kind: str
    reach: float
    survivors: float
    launch_s: float
    felt_s: float
    transfer_s: float
    alone_s: float = 0.0  # computing and transfer for a lone input
    stays: bool = False  # inputs reach the split on the replica that they are on

    @property
    def load_s(self) -> float:
        """Device seconds per input that arrives at the network."""
        occupied_s = split_costs.occupied_s(self.launch_s, self.transfer_s)
        return float(split_costs.load_s(self.reach, occupied_s, self.split.batch_size))

    @property
    def fill(self) -> float:
        return 0.0 if self.stays else float(split_costs.fill_arrivals(self.reach, self.split.batch_size))

    @property
    def wait(self) -> float:
        return 0.0 if self.stays else self.arrivals

    @property
    def arrivals(self) -> float:
        """The number of inputs that arrive at the network between two launches of this split."""
        return float(split_costs.wait_arrivals(self.reach, self.split.batch_size))


def works(plan: Plan, facts: Problem) -> Iterator[Work]:
    reach, before = 1.0, None
    for split in plan.splits:
        placement = plan.placement_of(split)
        stays = placement.local and placement is before
        source = None if before is None or stays else before.kind
        full = replace(work(split, facts, placement.kind, source, reach), stays=stays)
        alone = work(replace(split, batch_size=1), facts, placement.kind, source, reach)
        alone_s = min(alone.felt_s + alone.transfer_s, full.felt_s + full.transfer_s)
        full = replace(full, alone_s=alone_s)
        yield _turning(full, facts) if placement.local and len(placement.splits) > 1 else full
        reach, before = full.survivors, placement


def _turning(work: Work, facts: Problem) -> Work:
    """The work of a split that takes turns with others on its replicas.

    The next order is sent when a launch ends, while the replica runs another one. So launches that are shorter than the
    order's way wait for it, and those of a lone input always do.
    """
    turn_s = facts.turn_s(work.kind)
    launch_s, felt_s = max(work.launch_s, turn_s), max(work.felt_s, turn_s)
    if not work.felt_s:  # no input comes to this split
        return replace(work, launch_s=launch_s)
    return replace(work, launch_s=launch_s, felt_s=felt_s, alone_s=work.alone_s + turn_s)


def local_waits_s(plan: Plan, works: list[Work]) -> dict[Split, float]:
    """Seconds that an input waits at each split of a local placement while its replica runs the other launches."""
    waits_s = {work.split: 0.0 for work in works}
    for run in _runs(works):
        placement = plan.placement_of(run[0].split)
        arrivals = max(work.arrivals for work in run)
        for work in run:
            waits_s[work.split] = split_costs.others_s(arrivals, work.load_s, work.launch_s)
        others = [work for work in works if work.split in placement.splits and work not in run]
        waits_s[run[0].split] += arrivals * sum(work.load_s for work in others)
    return waits_s


def _runs(works: list[Work]) -> Iterator[list[Work]]:
    """Runs of neighbouring splits between which inputs stay on their replica."""
    edges = [i for i, work in enumerate(works) if not work.stays]
    for start, stop in pairwise([*edges, len(works)]):
        if stop - start > 1:
            yield works[start:stop]


def work(split: Split, facts: Problem, kind: str, source: str | None, reach: float, size: float | None = None) -> Work:
    """The work of a split on `kind` that the share `reach` of all inputs enters, coming from `source`.

    Without a source nothing is transferred: the inputs come from outside, or stay on their replica. `size` is that of
    the launch, where it is not full; below 1 it is one input that is shorter than usual.
    """
    inside = inside_of(split, facts.survival, reach)
    launch_s, felt_s = _launch(split, facts, kind, inside, split.batch_size if size is None else size)
    transfer_s = _transfer_s(split, facts, source, kind) if source else 0.0
    if reach == 0:  # no input comes to this split, so none waits for it
        felt_s = 0.0
    return Work(split, kind, reach, inside[-1], launch_s, felt_s, transfer_s if reach > 0 else 0.0)


def until_s(split: Split, facts: Problem, kind: str, reach: float, size: float) -> list[float]:
    """Seconds from the start of a launch of this size to the end of each block, for an input that stays."""
    staying = _staying(inside_of(split, facts.survival, reach))
    blocks_s = _blocks_s(split, facts, kind, split_costs.felt_size(size, staying))
    ends_s: list[float] = (facts.table(kind).launch_s + blocks_s.cumsum()).tolist()
    return ends_s


def inside_of(split: Split, survival: tuple[float, ...], reach: float) -> list[float]:
    """The share of all inputs inside each block of a split, and at the end the share that continues after it."""
    shares = [reach]
    for block in range(split.start, split.stop):
        behind = (*survival, 0.0)[block + 1]
        shares.append(behind if block in split.ramps or block + 1 == len(survival) else shares[-1])
    return shares


def _launch(split: Split, facts: Problem, kind: str, inside: list[float], size: float) -> tuple[float, float]:
    """Seconds of a launch: on average, and as an input sees it that stays to the end."""
    staying = _staying(inside)
    some, mean = split_costs.occupancy(max(size, 1), staying), split_costs.mean_size(size, staying)
    felt = split_costs.felt_size(size, staying)
    launch_s = facts.table(kind).launch_s
    mean_s, felt_s = _blocks_s(split, facts, kind, mean), _blocks_s(split, facts, kind, felt)
    return launch_s + float(some @ mean_s), launch_s + float(felt_s.sum())


def _staying(inside: list[float]) -> Floats:
    """The share of the inputs of a split that is inside each of its blocks: all, if the plan expects none to come."""
    return np.array(inside[:-1]) / inside[0] if inside[0] > 0 else np.ones(len(inside) - 1)


def _blocks_s(split: Split, facts: Problem, kind: str, sizes: Floats) -> Floats:
    """Seconds of each block of a split and its ramp, in a launch with these numbers of inputs."""
    table = facts.table(kind)
    row, block = np.arange(split.stop - split.start), np.arange(split.start, split.stop)
    ramps = np.array([k in split.ramps for k in range(split.start, split.stop)])
    again_s = np.where(np.append(False, ramps[:-1]), table.each_stop_s, 0.0)  # a batch stops at ramps to shrink
    ramp_s = np.where(ramps, table.ramp_times_s(sizes)[row, block], 0.0)
    return table.block_times_s(sizes)[row, block] + ramp_s + again_s


def _transfer_s(split: Split, facts: Problem, source: str, target: str) -> float:
    link = facts.links.get((source, target))
    if link is None:
        raise UserError(f"the plan sends a batch from {source} to {target}, and there is no link between them")
    return link.transfer_s(split.batch_size * facts.table(source).hidden_bytes[split.start - 1])
