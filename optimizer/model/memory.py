"""What splits take on a device: weights, activations, and in a local placement what waits between two splits."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optimizer.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes by kind; `largest` is the largest batch of each."""

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
        """What a block adds to the one before it: shared weights are held once."""
        none = (0,) * self.facts.num_blocks
        added: Floats = self.weights - np.array([table.repeated_bytes or none for table in self.facts.tables], float)
        return added

    @cached_property
    def _activations(self) -> Floats:
        empty = (0,) * self.facts.num_blocks
        return np.array([table.activation_bytes or empty for table in self.facts.tables], float)

    @cached_property
    def _hidden(self) -> Floats:
        """What one input weighs behind every block; behind the last there is nothing."""
        return np.array([[*table.hidden_bytes[:-1], 0.0] for table in self.facts.tables])

    def splits(self, start: int, batches: Ints) -> Floats:
        """Stops x kinds x batches, of splits from one block."""
        added = np.hstack([self.weights[:, [start]], self._added[:, start + 1 :]])
        weights = np.cumsum(added, axis=1).T
        largest = np.maximum.accumulate(self._activations[:, start:], axis=1).T
        memory: Floats = weights[..., None] + largest[..., None] * batches
        return memory

    def local(self, start: int, batches: Ints) -> Floats:
        """The same in a local placement, with what waits before the split and behind it (limits.waiting_bytes)."""
        before = self._hidden[:, [start - 1]] if start else 0.0
        waiting = (self._hidden[:, start:] + before).T
        return self.splits(start, batches) + waiting[..., None] * batches

    @cached_property
    def holds_network(self) -> Bools:
        """Kinds whose devices hold the weights of the whole network."""
        return np.asarray(self._added.sum(1) <= self.capacity)

    @cached_property
    def holds_any_cut(self) -> Bools:
        """Kinds that hold the whole network however it is cut: their splits lose nothing by sharing one placement."""
        return np.asarray(self.weights.sum(1) + self._activations.sum(1) * self.largest <= self.capacity)

    @cached_property
    def holds_any_local(self) -> Bools:
        """Kinds that also hold all that can wait between the splits of a local placement."""
        each = self._activations.sum(1) + 2 * self._hidden.sum(1)
        return np.asarray(self.weights.sum(1) + each * self.largest <= self.capacity)
