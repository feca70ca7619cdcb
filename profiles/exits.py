"""The exit profile of a network under a workload: the share of inputs that is still inside, block by block."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

LEAST = 1e-9  # a smaller share of inputs comes from rounding
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class ExitProfile:
    """`survival[k]` is the share of all inputs that enter block k: it starts at 1, never grows, and may reach 0.

    This holds while every ramp is open. `sure` covers closed ramps: it has sets of ramps at which an input would leave,
    with the share of inputs that would leave at exactly these. Without `sure`, an input that would leave at a closed
    ramp is assumed to leave at the next open one.

    >>> ExitProfile((1.0, 0.5, 0.5, 0.1)).num_blocks
    4
    """

    survival: tuple[float, ...]
    sure: tuple[tuple[tuple[int, ...], float], ...] = ()

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # a misspelt field in a file is an error

    def __post_init__(self) -> None:
        if not self.survival or self.survival[0] != 1.0:
            raise ValueError(f"survival must start at 1.0 (every input enters block 0), got {self.survival[:1]}")
        for block, (before, after) in enumerate(zip(self.survival, self.survival[1:], strict=False), start=1):
            if not 0.0 <= after <= before:
                raise ValueError(f"survival[{block}] = {after} must lie between 0 and survival[{block - 1}] = {before}")
        if any(not 0 <= ramp < self.num_blocks - 1 for ramps, _ in self.sure for ramp in ramps):
            raise ValueError(f"sure names ramps that are none of 0..{self.num_blocks - 2}")
        if wrong := [share for _, share in self.sure if not 0 <= share <= 1]:
            raise ValueError(f"the shares of sure must lie between 0 and 1, got {wrong[0]}")
        if self.sure and abs(sum(share for _, share in self.sure) - 1) > 1e-6:
            raise ValueError("the shares of sure must add up to 1")

    @classmethod
    def from_counts(cls, left: Sequence[int]) -> "ExitProfile":
        """The profile of counts by the block after which inputs left; all have left after the last.

        >>> ExitProfile.from_counts([5, 3, 2]).survival
        (1.0, 0.5, 0.2)
        """
        total = sum(left)
        if total <= 0:
            raise ValueError(f"no survival can be computed from {total} inputs")
        return cls(tuple((total - gone) / total for gone in accumulate(left[:-1], initial=0)))

    @classmethod
    def from_sure(cls, sure: Flags, ramps: Integers, num_blocks: int, weights: Integers) -> "ExitProfile":
        """The profile by where inputs would leave: `sure` has a row for each input and a column for each ramp, and an
        input counts by its weight.

        >>> sure = np.array([[True, False], [False, True], [False, False]])
        >>> ExitProfile.from_sure(sure, np.array([0, 1]), 3, np.array([1, 1, 2])).sure
        (((), 0.5), ((1,), 0.25), ((0,), 0.25))
        """
        first = np.append(ramps, num_blocks - 1)[first_ramp(sure)]
        left = np.bincount(first, weights=weights, minlength=num_blocks).astype(np.int64)
        patterns, of_input = np.unique(sure, axis=0, return_inverse=True)
        shares = np.bincount(of_input.ravel(), weights=weights) / weights.sum()
        sets = (tuple(ramps[pattern].tolist()) for pattern in patterns)
        return replace(cls.from_counts(left.tolist()), sure=tuple(zip(sets, shares.tolist(), strict=True)))

    @property
    def num_blocks(self) -> int:
        return len(self.survival)

    def survival_with(self, ramps: Collection[int]) -> tuple[float, ...]:
        """The share of inputs that enter each block if only these ramps are open.

        >>> ExitProfile((1.0, 0.5, 0.25), sure=(((0,), 0.5), ((1,), 0.25), ((), 0.25))).survival_with({0})
        (1.0, 0.5, 0.5)
        >>> ExitProfile((1.0, 0.5, 0.2)).survival_with({1})
        (1.0, 1.0, 0.2)
        """
        if self.sure:
            return survival_after(self.survival, self._all_open, self._table_survival(ramps))
        shares = [1.0]
        for block in range(1, self.num_blocks):
            shares.append(self.survival[block] if block - 1 in ramps else shares[-1])
        return tuple(shares)

    def planning_survival(self, ramps: Collection[int]) -> tuple[float, ...]:
        """The survival for planning when the current plan opens these ramps. For that plan it is exact.

        At a closed ramp it has the inputs that would leave there if it were open as well, as long as more inputs stay
        than leave at the ramps after it. Without `sure`, it is `survival`, whichever ramps are open.
        """
        if known := self._planned.get(opened := frozenset(ramps)):
            return known
        shares = [1.0] * self.num_blocks
        for ramp in range(self.num_blocks - 1):
            shares[ramp + 1] = self.survival_with({*ramps, ramp})[ramp + 1]
        self._planned[opened] = tuple(accumulate(reversed(shares), max))[::-1]
        return self._planned[opened]

    def with_survival(self, survival: Sequence[float]) -> "ExitProfile":
        """The exits of other inputs, of which these shares enter each block while all ramps are open.

        The inputs that leave at a ramp would leave in the same proportions after it if it were closed.

        >>> exits = ExitProfile((1.0, 0.5, 0.25), sure=(((0,), 0.5), ((1,), 0.25), ((), 0.25)))
        >>> exits.with_survival((1.0, 0.2, 0.1)).sure
        (((0,), 0.8), ((1,), 0.1), ((), 0.1))
        """
        changed = ExitProfile(tuple(survival))
        if not self.sure:
            return changed
        sure, shares = self.by_set
        first, leave = first_ramp(sure), -np.diff([*changed.survival, 0.0])
        before = np.bincount(first, shares, minlength=self.num_blocks)
        sets = [(tuple(range(ramp, self.num_blocks - 1)), leave[ramp]) for ramp in np.flatnonzero(before == 0)]
        for (ramps, share), ramp in zip(self.sure, first, strict=True):
            if share > 0:
                sets.append((ramps, share / before[ramp] * leave[ramp]))
        return replace(changed, sure=tuple((ramps, float(share)) for ramps, share in sets if share > 0))

    def spread(self, left: Sequence[int], ramps: Collection[int]) -> tuple[int, ...]:
        """Counts of inputs by the ramp at which they left, if all ramps had been open.

        `left` are the counts while only `ramps` were open. An input that left at one of these, or at the end, may have
        passed closed ramps at which it would have left.

        >>> ExitProfile((1.0, 0.8, 0.6, 0.4)).spread((0, 0, 60, 40), ramps=(2,))
        (20, 20, 20, 40)
        """
        sure, shares = self.by_set
        first, now = first_ramp(sure), first_ramp(sure, ramps)
        counts = np.zeros(self.num_blocks, np.int64)
        for block, count in enumerate(left):
            weights = np.bincount(first[now == block], shares[now == block], minlength=self.num_blocks)
            if weights.sum() > 0:
                counts += np.diff(np.round(count * np.cumsum(weights) / weights.sum()).astype(np.int64), prepend=0)
            else:
                counts[block] += count
        return tuple(counts.tolist())

    @cached_property
    def _planned(self) -> dict[frozenset[int], tuple[float, ...]]:
        return {}

    @cached_property
    def _all_open(self) -> tuple[float, ...]:
        return self._table_survival(range(self.num_blocks - 1))

    def _table_survival(self, ramps: Collection[int]) -> tuple[float, ...]:
        """The share of the inputs in `sure` that enter each block if these ramps are open."""
        sure, shares = self.by_set
        left = np.bincount(first_ramp(sure, ramps), weights=shares, minlength=self.num_blocks)
        inside = 1 - left[:-1].cumsum()
        return (1.0, *np.where(inside < LEAST, 0.0, inside).tolist())

    @cached_property
    def by_set(self) -> tuple[Flags, Floats]:
        """`sure` as a table with a row for each set and a column for each ramp, and the share of each set.

        Without `sure`, an input that leaves at a ramp would also leave at each one after it.
        """
        if not self.sure:
            nested = np.triu(np.ones((self.num_blocks, self.num_blocks - 1), bool))
            return nested, -np.diff([*self.survival, 0.0])
        sure = np.zeros((len(self.sure), self.num_blocks - 1), bool)
        for row, (ramps, _) in enumerate(self.sure):
            sure[row, list(ramps)] = True
        return sure, np.array([share for _, share in self.sure])


def first_ramp(sure: Flags, ramps: Collection[int] | None = None) -> Integers:
    """The first ramp of each row at which its inputs leave; where there is none, the last block.

    `ramps`: those that are open; None: all.
    """
    leaves = sure if ramps is None else sure & np.isin(np.arange(sure.shape[1]), list(ramps))
    first: Integers = np.column_stack((leaves, np.ones(len(sure), bool))).argmax(axis=1)
    return first


def survival_after(
    seen: Sequence[float], now: Sequence[float], then: Sequence[float], full_share: float = 0.0
) -> tuple[float, ...]:
    """The survival after a change, from the observed one, and from a table of survival `now` and `then`.

    The share `full_share` of inputs never leaves early.

    >>> survival_after((1.0, 0.5, 0.2), (1.0, 0.4, 0.2), (1.0, 0.8, 0.2))
    (1.0, 1.0, 0.2)
    >>> survival_after((1.0, 0.75, 0.75), (1.0, 0.5, 0.5), (1.0, 0.25, 0.0), full_share=0.5)
    (1.0, 0.625, 0.5)
    """
    others = 1 - full_share
    shares = (
        full_share + (min(others, max(0.0, share - full_share) * (after / before)) if before > 0 else others * after)
        for share, before, after in zip(seen, now, then, strict=True)
    )
    return tuple(accumulate(shares, min))


def carried(survival: Sequence[float], full_share: float) -> tuple[float, ...]:
    """The survival of all inputs, if the share `full_share` never leaves early and `survival` is that of the others.

    >>> carried((1.0, 0.5, 0.0), full_share=0.5)
    (1.0, 0.75, 0.5)
    """
    return tuple(accumulate((share + full_share * (1 - share) for share in survival), min))
