"""Observations: counts of the inputs that left after each block, per window of time, and their uncertainty."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.journal import Journal

Floats = NDArray[np.float64]

PRIOR_INPUTS = 20.0  # a window with this many inputs weighs as much as all windows before it
KEEP_WINDOWS = 2880  # windows in a history: a day of half-minute windows, the shortest possible
LEAST_SHARE = 1e-6  # of inputs that enter a block: in a steady estimate no smaller share is told from none
TINY = 1e-9  # a number of inputs that counts as none
MOST = 2**53  # counts must be smaller: beyond this, a float no longer tells one count from the next


@dataclass(frozen=True)
class Window:
    """Counts of one window, by one reporter or by several.

    `left[k]` inputs were answered after block k; inputs that ran to the end count in the last block. `unfinished[k]`
    inputs ended without an answer before block k (empty: none). `arrived` inputs came meanwhile, of which some were
    refused and some are still on their way. `texts` is the number of texts in which they came, where an input is a
    number of tokens, else 0. `full` of the inputs requested the whole network: `left` is without them, as they could
    not leave. `peak_per_s` is the largest rate of any look in the window.
    """

    start_s: float
    duration_s: float
    arrived: int
    left: tuple[int, ...]
    texts: int = 0
    full: int = 0
    unfinished: tuple[int, ...] = ()
    peak_per_s: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        if not -inf < self.start_s < inf:
            raise ValueError(f"start_s = {self.start_s} must be finite")
        if not 0 < self.duration_s < inf:
            raise ValueError(f"duration_s = {self.duration_s} must be positive and finite")
        if not self.left or len(self.unfinished) not in (0, len(self.left)):
            raise ValueError("left must have one count per block, and unfinished as many or none")
        counts = {"arrived": self.arrived, "texts": self.texts, "full": self.full}
        for name, each in (("left", self.left), ("unfinished", self.unfinished)):
            counts |= {f"{name}[{block}]": count for block, count in enumerate(each)}
        for name, count in counts.items():
            if not 0 <= count < MOST:
                raise ValueError(f"{name} = {count} must be 0 or more, and less than 2**53")

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Window":
        """A window from the output of `asdict`."""
        left, unfinished = tuple(fields["left"]), tuple(fields["unfinished"])
        return cls(**{**fields, "left": left, "unfinished": unfinished})

    @property
    def answered(self) -> int:
        return sum(self.left)

    @property
    def arrivals_per_s(self) -> float:
        return self.arrived / self.duration_s

    @property
    def exits(self) -> ExitProfile:
        """The exit profile of this window; where nothing is known about a block, no input leaves before it."""
        known = self.known
        survival = np.divide(self.entered, known, out=np.ones(len(self.left)), where=known > 0)
        return ExitProfile((1.0, *np.minimum.accumulate(survival)[1:].tolist()))

    @property
    def entered(self) -> tuple[int, ...]:
        """The number of inputs that are known to have entered each block.

        >>> Window(0, 120, 9, (5, 3, 2)).entered
        (10, 5, 2)
        """
        ended = [sum(each) for each in zip_longest(self.left, self.unfinished, fillvalue=0)]
        return tuple(accumulate(reversed(ended)))[::-1]

    @property
    def known(self) -> Floats:
        """The number of inputs of which `entered` is the share that enters each block: all, if every input has left.

        >>> Window(0, 120, 9, (5, 3, 2)).known.tolist()
        [10.0, 10.0, 10.0]
        >>> late = Window(0, 120, 9, (4, 2, 2), unfinished=(0, 4, 0))
        >>> late.known.tolist(), (late.entered / late.known).round(3).tolist()
        ([12.0, 12.0, 6.0], [1.0, 0.667, 0.333])
        """
        return known_of(np.asarray(self.entered, float), self.goes_on)

    @property
    def goes_on(self) -> Floats:
        """The inputs that entered each block, without those that ended there unfinished."""
        return np.asarray(self.entered, float) - (self.unfinished or 0)

    @property
    def mix(self) -> "Window":
        """All arrivals as inputs of two blocks: only requests for the whole network reach the second."""
        return Window(self.start_s, self.duration_s, self.arrived, (max(0, self.arrived - self.full), self.full))

    def interval(self, z: float = 1.96) -> tuple[Floats, Floats]:
        """The interval of the true survival (Wilson): wide for few inputs, and all of [0, 1] for none.

        >>> few, many = Window(0, 120, 4, (2, 2)), Window(0, 120, 4000, (2000, 2000))
        >>> [[round(float(bound[1]), 2) for bound in window.interval()] for window in (few, many)]
        [[0.15, 0.85], [0.48, 0.52]]
        """
        inputs = np.maximum(self.known, TINY)
        share = np.minimum(np.asarray(self.entered) / inputs, 1.0)
        middle = (share + z**2 / (2 * inputs)) / (1 + z**2 / inputs)
        half = z / (1 + z**2 / inputs) * np.sqrt(share * (1 - share) / inputs + (z / (2 * inputs)) ** 2)
        low, high = np.clip(middle - half, 0, 1), np.clip(middle + half, 0, 1)
        low[0] = high[0] = 1.0
        return low, high


def known_of(entered: Floats, goes_on: Floats) -> Floats:
    """The number of inputs of which `entered` is the share that enters each block, if only `goes_on` finish it.

    This is Kaplan and Meier's estimate: the share that continues from block to block is that of the inputs that did not
    end in between, and `entered / known` is the product of these shares. So an input that ended before it left counts
    as a survivor up to its last block, and not at all after it.
    """
    rest = np.divide(goes_on, entered, out=np.ones(len(entered)), where=entered > 0)
    known: Floats = entered[0] * np.cumprod([1.0, *rest[:-1]])
    return known


def merge(windows: Iterable[Window]) -> Window:
    """One window of several reporters' observations of the same time, in which every input weighs the same.

    >>> merge([Window(0, 120, 9, (5, 4)), Window(0, 120, 1, (0, 1))])
    Window(start_s=0, duration_s=120, arrived=10, left=(5, 5), texts=0, full=0, unfinished=())
    """
    parts = list(windows)
    if not parts:
        raise ValueError("nothing to merge")
    if len({len(part.left) for part in parts}) > 1:
        raise ValueError(f"windows of different networks: {sorted({len(part.left) for part in parts})} blocks")
    start_s = min(part.start_s for part in parts)
    end_s = max(part.start_s + part.duration_s for part in parts)
    left = tuple(sum(counts) for counts in zip(*(part.left for part in parts), strict=True))
    unfinished = tuple(sum(counts) for counts in zip_longest(*(part.unfinished for part in parts), fillvalue=0))
    arrived, texts, full = (sum(counts) for counts in zip(*((p.arrived, p.texts, p.full) for p in parts), strict=True))
    peak_per_s = max(part.peak_per_s for part in parts)
    return Window(start_s, end_s - start_s, arrived, left, texts, full, unfinished, peak_per_s)


class History(Journal[Window]):
    """A journal of windows, which survives a restart."""

    def __init__(self, path: Path | None, keep: int = KEEP_WINDOWS) -> None:
        super().__init__(path, Window.read, keep)

    @property
    def windows(self) -> tuple[Window, ...]:
        return self.entries


class SteadySurvival:
    """Survival, window by window, in which a window with few inputs hardly moves the earlier estimate.

    Each window is combined with `PRIOR_INPUTS` imaginary inputs that behave like the earlier estimate, so its weight is
    n / (n + PRIOR_INPUTS): a half at 20 inputs, a twentieth at one, nothing at none. The first estimate imagines one
    input that is equally likely to leave anywhere, so that no share is exactly 0 or 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self._row: Floats = np.linspace(1, 1 / (num_blocks + 1), num_blocks)
        self._strength = 1.0

    def add(self, window: Window) -> Floats:
        imagined = self._strength * self._row
        entered = np.asarray(window.entered) + imagined
        self._row = np.maximum(entered / known_of(entered, window.goes_on + imagined), LEAST_SHARE)
        self._strength = PRIOR_INPUTS
        return self._row
