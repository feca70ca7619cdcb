"""The limits that a plan must keep: the fleet, the memory of its devices, the existing ramps, and the objective.

The search asks `DeviceMemory` for the memory of many splits at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from isobatch.optimizer.effort import Bools, Floats, Ints
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.plan import Plan, Split
from isobatch.optimizer.problem import Problem

# The most inputs between splits that one front has on a device, in full batches of a split.
BEFORE = 2  # of the launch that runs, and of the next, which wait or are received meanwhile
COPIED = 1  # survivors of the last launch, until they are on the host
KEPT = 3  # of a local placement: two launches may end before the next split runs, and survivors of one more stay until
# its last one is gone


def memory_bytes(split: Split, facts: Problem, kind: str) -> int:
    """The memory of a split on its device: its weights, and the activations of its largest block."""
    table = facts.table(kind)
    blocks = slice(split.start, split.stop)
    weights = sum(table.memory_bytes[blocks]) - sum(table.repeated_bytes[split.start + 1 : split.stop])
    return weights + split.batch_size * max(table.activation_bytes[blocks], default=0)


def waiting_bytes(split: Split, facts: Problem, kind: str, local: bool) -> int:
    """The memory of inputs before a split, and of its survivors after it, on their device."""
    before = (0, *facts.table(kind).hidden_bytes[:-1], 0)  # bytes of one input, by the next block
    behind = KEPT if local else COPIED
    return split.batch_size * (BEFORE * before[split.start] + behind * before[split.stop])


def broken_counts(plan: Plan, facts: Problem) -> Iterator[str]:
    for kind, used in plan.devices().items():
        if used > facts.device(kind).count:
            yield f"{used} {kind} are used, the fleet has {facts.device(kind).count}"


def broken_facts(plan: Plan, facts: Problem) -> Iterator[str]:
    yield from broken_counts(plan, facts)
    for placement in plan.placements:
        has = facts.device(placement.kind).memory_bytes
        kind, local = placement.kind, placement.local
        waiting = sum(waiting_bytes(split, facts, kind, local) for split in placement.splits)
        needed = waiting + sum(memory_bytes(split, facts, kind) for split in placement.splits)
        if needed > has:
            inputs = f", {waiting / 1e9:.3g} GB of it inputs between splits" if waiting else ""
            yield f"{needed / 1e9:.3g} GB are placed on one {kind}{inputs}, which has {has / 1e9:.3g} GB"
    for ramp in set(plan.ramps) - facts.ramp_blocks:
        yield f"ramp {ramp} is active, but no ramp stands behind that block"


def broken_objective(goodput_per_s: float, latency_s: float, price: float, objective: Objective) -> Iterator[str]:
    close = 1 + 1e-9
    if latency_s > objective.budget_s * close:
        yield f"latency {latency_s * 1e3:.4g} ms is over the budget of {objective.budget_s * 1e3:.4g} ms"
    if goodput_per_s * close < objective.goodput_per_s:
        yield f"goodput {goodput_per_s:.4g}/s is under the {objective.goodput_per_s:.4g}/s wanted"
    if objective.cost_per_hour is not None and price > objective.cost_per_hour * close:
        yield f"${price:.4g} per hour is over the ${objective.cost_per_hour:.4g} allowed"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes by kind of device; `largest` is the largest batch of each kind."""

    facts: Problem
    largest: Ints

    @cached_property
    def capacity(self) -> Floats:
        return np.array([float(device.memory_bytes) for device in self.facts.devices])

    @cached_property
    def weights(self) -> Floats:
        """Kinds x blocks."""
        return np.array([table.memory_bytes for table in self.facts.tables], float)

    @cached_property
    def _added(self) -> Floats:
        """Kinds x blocks: the weights that a block adds to those of the block before; shared weights count once."""
        none = (0,) * self.facts.num_blocks
        added: Floats = self.weights - np.array([table.repeated_bytes or none for table in self.facts.tables], float)
        return added

    @cached_property
    def _activations(self) -> Floats:
        empty = (0,) * self.facts.num_blocks
        return np.array([table.activation_bytes or empty for table in self.facts.tables], float)

    @cached_property
    def _hidden(self) -> Floats:
        """Kinds x blocks: the bytes of one input after each block; after the last block nothing is handed on."""
        return np.array([[*table.hidden_bytes[:-1], 0.0] for table in self.facts.tables])

    def splits(self, start: int, batches: Ints, behind: int = COPIED) -> Floats:
        """Stops x kinds x batches: the memory of splits that start at one block, with the inputs on both sides."""
        added = np.hstack([self.weights[:, [start]], self._added[:, start + 1 :]])
        weights = np.cumsum(added, axis=1).T
        largest = np.maximum.accumulate(self._activations[:, start:], axis=1)
        before = self._hidden[:, [start - 1]] if start else 0.0
        each = (largest + BEFORE * before + behind * self._hidden[:, start:]).T
        memory: Floats = weights[..., None] + each[..., None] * batches
        return memory

    @cached_property
    def holds_network(self) -> Bools:
        """Kinds whose devices hold the weights of the whole network."""
        return np.asarray(self._added.sum(1) <= self.capacity)

    def of_any_cut(self, batches: Ints) -> Floats:
        """Kinds (last axis): no cuts of the whole network need more memory, with batches up to these."""
        each = self._activations.sum(1) + (BEFORE + KEPT) * self._hidden.sum(1)
        return np.asarray(self.weights.sum(1) + each * batches)

    @cached_property
    def holds_any_cut(self) -> Bools:
        """Kinds that hold the whole network however it is cut: sharing one placement costs their splits nothing."""
        return np.asarray(self.of_any_cut(self.largest) <= self.capacity)
