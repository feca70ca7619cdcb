"""The memory of splits on a device: weights, activations, and the waiting inputs of a local placement."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from isobatch.optimizer.effort import Bools, Floats, Ints
from isobatch.optimizer.problem import Problem


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
        """Kinds x blocks: the bytes of one input behind each block; behind the last block nothing is handed on."""
        return np.array([[*table.hidden_bytes[:-1], 0.0] for table in self.facts.tables])

    def splits(self, start: int, batches: Ints) -> Floats:
        """Stops x kinds x batches: the memory of splits that start at one block."""
        added = np.hstack([self.weights[:, [start]], self._added[:, start + 1 :]])
        weights = np.cumsum(added, axis=1).T
        largest = np.maximum.accumulate(self._activations[:, start:], axis=1).T
        memory: Floats = weights[..., None] + largest[..., None] * batches
        return memory

    def local(self, start: int, batches: Ints) -> Floats:
        """The same in a local placement, with the inputs that wait before the split and behind it (limits.py)."""
        before = self._hidden[:, [start - 1]] if start else 0.0
        waiting = (self._hidden[:, start:] + before).T
        return self.splits(start, batches) + waiting[..., None] * batches

    @cached_property
    def holds_network(self) -> Bools:
        """Kinds whose devices hold the weights of the whole network."""
        return np.asarray(self._added.sum(1) <= self.capacity)

    @cached_property
    def holds_any_cut(self) -> Bools:
        """Kinds that hold the whole network however it is cut: sharing one placement costs their splits nothing."""
        return np.asarray(self.weights.sum(1) + self._activations.sum(1) * self.largest <= self.capacity)

    @cached_property
    def holds_any_local(self) -> Bools:
        """Kinds that also hold all inputs that can wait between the splits of a local placement."""
        each = self._activations.sum(1) + 2 * self._hidden.sum(1)
        return np.asarray(self.weights.sum(1) + each * self.largest <= self.capacity)
