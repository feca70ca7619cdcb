"""The best local placement: the whole network on every device of one kind, with splits that take turns.

Each split keeps its batch size, and survivors stay on their replica. A round is the number of arrivals c that fills one
batch of the split that fills slowest; an answer takes c * load (split_costs.others_s), plus the wait for the first
batch. For a given c the lightest way from block a to the end is a shortest path,

    lightest(a, c) = min over stops b and batches n with n / reach[a] <= c of  load(a, b, n) + lightest(b, c),

and it gets lighter as c grows, so one bound covers a range of c: the load at its last c with the latency at its first.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from isobatch.optimizer.effort import SAME, Floats, Ints
from isobatch.optimizer.search.options import Builder


class Chain(NamedTuple):
    """The whole network in splits, as pairs of stop and batch, with their total load and latency."""

    splits: tuple[tuple[int, int], ...]
    load_s: float
    arrivals: float

    @property
    def work_s(self) -> float:
        return self.arrivals * self.load_s


# The value of chains by their loads, the arrivals of their round, and their first batches; the smaller, the better.
Value = Callable[[Floats, float, Floats], Floats]


class Heads(NamedTuple):
    """Chains at one size of round: loads and first batches; `walk(i)` gives the splits of chain i."""

    load_s: Floats
    first: Floats
    walk: Callable[[int], tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class LocalSearch:
    """The search among all chains of at least two splits on one kind."""

    builder: Builder
    kind: int

    @property
    def num_blocks(self) -> int:
        return self.builder.facts.num_blocks

    @cached_property
    def fits(self) -> bool:
        return bool(self.builder.memory.holds_network[self.kind])

    @cached_property
    def sizes(self) -> Floats:
        return np.unique(self._arrivals)

    @cached_property
    def _arrivals(self) -> Floats:
        """Blocks x batches: the arrivals between two launches."""
        return np.stack([self.builder.still(start)[1] for start in range(self.num_blocks)])

    @cached_property
    def _loads(self) -> Floats:
        """Blocks x batches x stops: the loads, infinite where there is no such split."""
        blocks, loads = self.num_blocks, []
        for start in range(blocks):
            load = self.builder.still(start)[0][self.kind]
            loads.append(np.concatenate([np.full((len(load), start + 1), np.inf), load], axis=1))
        loads[0][:, blocks] = np.inf  # a single split is no chain
        return np.stack(loads)

    @cached_property
    def _lightest(self) -> Floats:
        """The least load with any batch up to each size; the first row is for no batch at all."""
        lightest = np.minimum.accumulate(self._loads, axis=1)
        return np.concatenate([np.full_like(lightest[:, :1], np.inf), lightest], axis=1)

    def best(self, value: Value, below: float = np.inf) -> tuple[float, Chain | None]:
        """The chain with the least value, if it is below `below`."""
        best: Chain | None = None
        last = len(self.sizes) - 1
        waiting = [(self._bound(value, 0, last), 0, last)] if self.fits and self.num_blocks > 1 else []
        while waiting and waiting[0][0] < _less(below):
            bound, low, high = heapq.heappop(waiting)
            chain_value, chain = self._at(value, high, below)
            if chain_value < _less(below):
                below, best = chain_value, chain
            for part in self._parts(low, high):
                heapq.heappush(waiting, (max(bound, self._bound(value, *part)), *part))
        return below, best

    def _parts(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The halves of a range whose last size has been evaluated."""
        if low < high:
            middle = (low + high) // 2
            yield low, middle
            if middle + 1 < high:
                yield middle + 1, high

    def _bound(self, value: Value, low: int, high: int) -> float:
        """A lower bound on the value of every chain whose round has one of these sizes."""
        heads = self._heads(high)
        return float(value(heads.load_s, float(self.sizes[low]), heads.first).min(initial=np.inf))

    def _at(self, value: Value, size: int, below: float) -> tuple[float, Chain | None]:
        """The best chain whose round has this size.

        Chains that fit are searched only where the best of all is below `below`, and does not fit.
        """
        best, chain = self._least(value, size, self._heads(size))
        if chain is None or best >= _less(below) or self._holds(chain):
            return best, chain
        return self._least(value, size, self._lean(size))

    def _least(self, value: Value, size: int, heads: Heads) -> tuple[float, Chain | None]:
        if not len(heads.load_s):
            return np.inf, None
        values = value(heads.load_s, float(self.sizes[size]), heads.first)
        least = int(values.argmin())
        return float(values[least]), Chain(heads.walk(least), float(heads.load_s[least]), float(self.sizes[size]))

    def _holds(self, chain: Chain) -> bool:
        """Whether one device holds all splits of a chain."""
        memory, start = 0.0, 0
        for stop, batch in chain.splits:
            memory += float(self.builder.local_memory(start)[self.kind, batch - 1, stop])
            start = stop
        return bool(memory <= self.builder.memory.capacity[self.kind])

    def _largest(self, size: int) -> Ints:
        """By block, the largest batch that a round of this size fills."""
        return np.asarray((self._arrivals <= self.sizes[size] * (1 + SAME)).sum(axis=1))

    def _heads(self, size: int) -> Heads:
        """Chains that start with any split and continue with the least load."""
        blocks, largest = self.num_blocks, self._largest(size)
        ways, after = self._lightest[np.arange(blocks), largest], np.zeros(blocks + 1)
        for start in range(blocks - 1, 0, -1):
            after[start] = (ways[start] + after).min()
        first = self._loads[0, : largest[0]] + after
        batches, stops = np.nonzero(np.isfinite(first))

        def walk(head: int) -> tuple[tuple[int, int], ...]:
            batch, stop = int(batches[head]), int(stops[head])
            splits = [(stop, batch + 1)]
            while stop < blocks:
                start, stop = stop, int((ways[stop] + after).argmin())
                splits.append((stop, int(self._loads[start, : largest[start], stop].argmin()) + 1))
            return tuple(splits)

        return Heads(first[batches, stops], (batches + 1).astype(float), walk)

    def _lean(self, size: int) -> Heads:
        """The same where memory is short: chains that no other chain beats in both load and memory."""
        blocks, largest = self.num_blocks, self._largest(size)
        after: dict[int, list[tuple[float, float, tuple[tuple[int, int], ...]]]] = {blocks: [(0.0, 0.0, ())]}
        for start in range(blocks - 1, -1, -1):
            memory = self.builder.local_memory(start)[self.kind]
            grown = [
                (self._loads[start, n, stop] + load, memory[n, stop] + more, ((stop, n + 1), *rest))
                for n in range(largest[start])
                for stop in range(start + 1, blocks + 1)
                for load, more, rest in after[stop]
            ]
            capacity = self.builder.memory.capacity[self.kind]
            fitting = [each for each in grown if np.isfinite(each[0]) and each[1] <= capacity]
            after[start] = fitting if start == 0 else _undominated(fitting)
        loads, _, splits = zip(*after[0], strict=True) if after[0] else ((), (), ())
        return Heads(np.array(loads), np.array([float(each[0][1]) for each in splits]), lambda i: splits[i])


def _less(value: float) -> float:
    return value - SAME * abs(value) if np.isfinite(value) else value


def _undominated(chains: list[tuple[float, float, tuple[tuple[int, int], ...]]]) -> list:  # type: ignore[type-arg]
    front, least = [], np.inf
    for chain in sorted(chains, key=lambda each: each[:2]):
        if chain[1] < least:
            front.append(chain)
            least = chain[1]
    return front
