"""The best local placement: the whole network on every device of one kind, with splits that take turns.

Each split keeps its batch size, and survivors stay on their replica. A round is the number of arrivals c that fills one
batch of the split that fills slowest; an answer takes c * load (split_costs.others_s), plus the wait for the first
batch. For a given c the lightest way from block a to the end is a shortest path,

    lightest(a, c) = min over stops b and batches n with n / reach[a] <= c of  load(a, b, n) + lightest(b, c),

and it gets lighter as c grows, so one bound covers a range of c: the load at its last c with the latency at its first.
Where memory is short, a chain that fits has no less than the least load + price * (memory - capacity), at any price.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from isobatch.optimizer.effort import SAME, Floats, Ints
from isobatch.optimizer.search.options import Builder

# Prices of memory, as factors of the least load over the capacity.
PRICES = 2.0 ** np.arange(-10, 11)
DEARER = 2.0 ** np.arange(16)  # factors of such a price
# Loads, as factors of the least one, among which the largest is searched for that a value allows.
LOADS = 2.0 ** np.append(np.linspace(0.0, 1.0, 401), np.linspace(1.0, 20.0, 401)[1:])


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


class Chains(NamedTuple):
    """Chains from one block to the end that no other beats in both load and memory, each as its first split (stop and
    batch) and the place of its rest among those that begin at that stop."""

    load_s: Floats
    memory: Floats
    stop: Ints
    batch: Ints
    rest: Ints


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
    def _memory(self) -> Floats:
        """Blocks x batches x stops: the memory, where there is such a split."""
        memory = np.stack([self.builder.local_memory(start)[self.kind] for start in range(self.num_blocks)])
        return np.where(np.isfinite(self._loads), memory, np.inf)

    @cached_property
    def _capacity(self) -> float:
        return float(self.builder.memory.capacity[self.kind])

    @cached_property
    def _holds_any(self) -> bool:
        return bool(self.builder.memory.holds_any_cut[self.kind])

    @cached_property
    def _lightest(self) -> Floats:
        return _least_so_far(self._loads)

    @cached_property
    def _leanest(self) -> Floats:
        return _least_so_far(self._memory)

    @cached_property
    def _price(self) -> float:
        """The price of memory, in seconds a byte, by which the bound of the largest round is highest."""
        last = len(self.sizes) - 1
        first = float(self._heads(last).load_s.min(initial=np.inf)) / self._capacity
        prices = [first * factor for factor in PRICES]
        return float(max(prices, key=lambda price: self._priced_load(_least_so_far(self._costs(price)), price, last)))

    @cached_property
    def _cheapest(self) -> Floats:
        return _least_so_far(self._costs(self._price))

    def _costs(self, price: float) -> Floats:
        return self._loads + price * self._memory

    def _priced_load(self, cheapest: Floats, price: float, size: int) -> float:
        """No chain that fits has a smaller load, if its round has this size or a smaller one."""
        return float(_after(self._ways(cheapest, size))[0]) - price * self._capacity

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
        heads, arrivals = self._heads(high), float(self.sizes[low])
        bound = float(value(heads.load_s, arrivals, heads.first).min(initial=np.inf))
        if self._holds_any or not len(heads.load_s):
            return bound
        least = max(float(heads.load_s.min()), self._priced_load(self._cheapest, self._price, high))
        return max(bound, float(value(np.array([least]), arrivals, np.ones(1))[0]))

    def _at(self, value: Value, size: int, below: float) -> tuple[float, Chain | None]:
        """The best chain whose round has this size.

        Chains that fit are searched only where the best of all is below `below`, and does not fit.
        """
        best, chain = self._least(value, size, self._heads(size))
        if chain is None or best >= _less(below) or self._holds(chain):
            return best, chain
        fitting = self._fitting(size)  # few chains are better than a good one that fits
        good = self._value(value, fitting) if fitting else np.inf
        lean = self._least(value, size, self._lean(size, self._most_load(value, size, min(below, good))))
        return lean if lean[0] < good else (good, fitting)

    def _value(self, value: Value, chain: Chain) -> float:
        return float(value(np.array([chain.load_s]), chain.arrivals, np.array([float(chain.splits[0][1])]))[0])

    def _fitting(self, size: int) -> Chain | None:
        """A good chain that fits: the cheapest at the first price of memory at which that fits."""
        for factor in DEARER:
            heads = self._heads(size, self._costs(self._price * factor))
            splits = heads.walk(int(heads.load_s.argmin()))
            starts = (0, *(stop for stop, _ in splits))
            load_s = sum(
                float(self._loads[start, batch - 1, stop]) for start, (stop, batch) in zip(starts, splits, strict=False)
            )
            chain = Chain(splits, load_s, float(self.sizes[size]))
            if self._holds(chain):
                return chain
        return None

    def _most_load(self, value: Value, size: int, below: float) -> float:
        """At least the largest load with which a chain's value is below `below`."""
        loads = float(self._heads(size).load_s.min()) * LOADS
        enough = np.flatnonzero(~(value(loads, float(self.sizes[size]), np.ones_like(loads)) < below))
        return float(loads[enough[0]]) if len(enough) else np.inf

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
            memory += float(self._memory[start, batch - 1, stop])
            start = stop
        return memory <= self._capacity

    def _largest(self, size: int) -> Ints:
        """By block, the largest batch that a round of this size fills."""
        return np.asarray((self._arrivals <= self.sizes[size] * (1 + SAME)).sum(axis=1))

    def _ways(self, least: Floats, size: int) -> Floats:
        """Blocks x stops: the least of a split, with any batch that a round of this size fills."""
        return np.asarray(least[np.arange(self.num_blocks), self._largest(size)])

    def _heads(self, size: int, costs: Floats | None = None) -> Heads:
        """Chains that start with any split and continue with the least load, or with the least of these costs."""
        blocks, largest = self.num_blocks, self._largest(size)
        loads, lightest = (self._loads, self._lightest) if costs is None else (costs, _least_so_far(costs))
        ways = self._ways(lightest, size)
        after = _after(ways)
        first = loads[0, : largest[0]] + after
        batches, stops = np.nonzero(np.isfinite(first))

        def walk(head: int) -> tuple[tuple[int, int], ...]:
            batch, stop = int(batches[head]), int(stops[head])
            splits = [(stop, batch + 1)]
            while stop < blocks:
                start, stop = stop, int((ways[stop] + after).argmin())
                splits.append((stop, int(loads[start, : largest[start], stop].argmin()) + 1))
            return tuple(splits)

        return Heads(first[batches, stops], (batches + 1).astype(float), walk)

    @np.errstate(invalid="ignore")  # infinite less infinite, where there is no such split
    def _lean(self, size: int, most_load_s: float) -> Heads:
        """The same where memory is short: chains that fit, have at most this load, and after their first split are
        beaten by no other chain in both load and memory."""
        blocks, largest, price = self.num_blocks, self._largest(size), self._price
        bounds = [  # of load, memory, and both: their weights, the most of them, and the least before each block
            (1.0, 0.0, most_load_s, _before(self._ways(self._lightest, size))),
            (0.0, 1.0, self._capacity, _before(self._ways(self._leanest, size))),
            (1.0, price, most_load_s + price * self._capacity, _before(self._ways(self._cheapest, size))),
        ]
        none = np.zeros(0, dtype=np.int64)
        fronts = [Chains(np.zeros(1), np.zeros(1), none, none, none)] * (blocks + 1)
        for start in range(blocks - 1, -1, -1):
            slack = 1 + SAME if start else 1.0  # sums of parts are rounded
            within = [(by_load, by_memory, most * slack - before[start]) for by_load, by_memory, most, before in bounds]
            stops = range(start + 1, blocks + 1)
            grown = [self._grown(start, stop, largest[start], fronts[stop], within) for stop in stops]
            front = Chains(*map(np.concatenate, zip(*grown, strict=True)))
            fronts[start] = _undominated(front) if start else front

        def walk(head: int) -> tuple[tuple[int, int], ...]:
            splits, start = [], 0
            while start < blocks:
                front = fronts[start]
                splits.append((int(front.stop[head]), int(front.batch[head])))
                start, head = int(front.stop[head]), int(front.rest[head])
            return tuple(splits)

        return Heads(fronts[0].load_s, fronts[0].batch.astype(float), walk)

    def _grown(
        self, start: int, stop: int, largest: int, after: Chains, within: list[tuple[float, float, float]]
    ) -> Chains:
        """Chains with a split before others, if they keep all limits of load and memory."""
        loads, memory = self._loads[start, :largest, stop], self._memory[start, :largest, stop]
        load_s, held = np.add.outer(loads, after.load_s), np.add.outer(memory, after.memory)
        kept = np.all([by_load * load_s + by_memory * held <= most for by_load, by_memory, most in within], axis=0)
        row, rest = np.nonzero(kept)
        return Chains(load_s[row, rest], held[row, rest], np.full_like(row, stop), row + 1, rest)


def _least_so_far(values: Floats) -> Floats:
    """The least with any batch up to each size; the first row is for no batch at all."""
    least = np.minimum.accumulate(values, axis=1)
    return np.concatenate([np.full_like(least[:, :1], np.inf), least], axis=1)


def _after(ways: Floats) -> Floats:
    """The least from each block to the end."""
    after = np.zeros(ways.shape[1])
    for start in range(len(ways) - 1, -1, -1):
        after[start] = (ways[start] + after).min()
    return after


def _before(ways: Floats) -> Floats:
    """The least from the first block to each."""
    before = np.full(ways.shape[1], np.inf)
    before[0] = 0.0
    for stop in range(1, len(before)):
        before[stop] = (before[:-1] + ways[:, stop]).min()
    return before


def _less(value: float) -> float:
    return value - SAME * abs(value) if np.isfinite(value) else value


def _undominated(front: Chains) -> Chains:
    order = np.lexsort((front.memory, front.load_s))
    memory = front.memory[order]
    kept = order[memory < np.minimum.accumulate(np.append(np.inf, memory))[:-1]]
    return Chains(front.load_s[kept], front.memory[kept], front.stop[kept], front.batch[kept], front.rest[kept])
