"""What was observed: counts of who left where, per window of time, and how far they can be trusted."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.exits import ExitProfile
from profiles.journal import Journal

Floats = NDArray[np.float64]

# A window must see this many inputs to weigh as much as all that came before it.
PRIOR_INPUTS = 20.0
KEEP_WINDOWS = 720  # windows in a history: a day of two-minute ones
MOST = 2**53  # beyond it a float no longer tells one count from the next


@dataclass(frozen=True)
class Window:
    """Counts of one window, by one reporter or by several.

    `left[k]` inputs were answered after block k; whoever reached the end counts in the last block.
    `arrived` inputs came meanwhile: not the same ones, some were refused and some are still on their way. They were so
    many `texts`, where an input is a number of tokens (0: it is not). `peak_per_s` is the largest rate of any look in
    it.
    """

    start_s: float
    duration_s: float
    arrived: int
    left: tuple[int, ...]
    texts: int = 0
    peak_per_s: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        if not -inf < self.start_s < inf:
            raise ValueError(f"start_s = {self.start_s} must be finite")
        if not 0 < self.duration_s < inf:
            raise ValueError(f"duration_s = {self.duration_s} must be positive and finite")
        if not 0 <= self.arrived < MOST:
            raise ValueError(f"arrived = {self.arrived} must be 0 or more, and less than 2**53")
        if not 0 <= self.texts < MOST:
            raise ValueError(f"texts = {self.texts} must be 0 or more, and less than 2**53")
        if not self.left:
            raise ValueError("left must have one count per block")
        for block, count in enumerate(self.left):
            if not 0 <= count < MOST:
                raise ValueError(f"left[{block}] = {count} must be 0 or more, and less than 2**53")

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Window":
        """A window from what `asdict` made of it."""
        return cls(**{**fields, "left": tuple(fields["left"])})

    @property
    def answered(self) -> int:
        return sum(self.left)

    @property
    def arrivals_per_s(self) -> float:
        return self.arrived / self.duration_s

    @property
    def exits(self) -> ExitProfile:
        """The exit profile of this window, which must have at least one answer."""
        return ExitProfile.from_counts(self.left)

    @property
    def entered(self) -> tuple[int, ...]:
        """How many of the answered inputs entered each block.

        >>> Window(0, 120, 9, (5, 3, 2)).entered
        (10, 5, 2)
        """
        return tuple(self.answered - gone for gone in accumulate(self.left[:-1], initial=0))

    def interval(self, z: float = 1.96) -> tuple[Floats, Floats]:
        """Where the true survival may lie (Wilson): wide when few inputs were seen, all of [0, 1] when none.

        >>> few, many = Window(0, 120, 4, (2, 2)), Window(0, 120, 4000, (2000, 2000))
        >>> [[round(float(bound[1]), 2) for bound in window.interval()] for window in (few, many)]
        [[0.15, 0.85], [0.48, 0.52]]
        """
        inputs = self.answered
        if inputs == 0:
            return np.zeros(len(self.left)), np.ones(len(self.left))
        share = np.asarray(self.entered) / inputs
        middle = (share + z**2 / (2 * inputs)) / (1 + z**2 / inputs)
        half = z / (1 + z**2 / inputs) * np.sqrt(share * (1 - share) / inputs + (z / (2 * inputs)) ** 2)
        low, high = np.clip(middle - half, 0, 1), np.clip(middle + half, 0, 1)
        low[0] = high[0] = 1.0
        return low, high


def merge(windows: Iterable[Window]) -> Window:
    """One window of what several reporters saw of the same time; every input weighs the same, whoever reported it.

    >>> merge([Window(0, 120, 9, (5, 4)), Window(0, 120, 1, (0, 1))])
    Window(start_s=0, duration_s=120, arrived=10, left=(5, 5), texts=0)
    """
    parts = list(windows)
    if not parts:
        raise ValueError("nothing to merge")
    if len({len(part.left) for part in parts}) > 1:
        raise ValueError(f"windows of different networks: {sorted({len(part.left) for part in parts})} blocks")
    start_s = min(part.start_s for part in parts)
    end_s = max(part.start_s + part.duration_s for part in parts)
    left = tuple(sum(counts) for counts in zip(*(part.left for part in parts), strict=True))
    arrived, texts = sum(part.arrived for part in parts), sum(part.texts for part in parts)
    return Window(start_s, end_s - start_s, arrived, left, texts)


class History(Journal[Window]):
    """The windows that were seen, in a journal that outlives whoever keeps it.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     History(Path(folder) / "exits.jsonl").append(Window(0.0, 120.0, 10, (6, 4)))
    ...     History(Path(folder) / "exits.jsonl").windows
    (Window(start_s=0.0, duration_s=120.0, arrived=10, left=(6, 4), texts=0),)
    """

    def __init__(self, path: Path | None, keep: int = KEEP_WINDOWS) -> None:
        super().__init__(path, Window.read, keep)

    @property
    def windows(self) -> tuple[Window, ...]:
        """The latest ones, oldest first."""
        return self.entries


class SteadySurvival:
    """Survival, window by window, where a window with few inputs hardly moves what was known before it.

    Each window is taken together with `prior_inputs` imagined ones that behave like the row before, so its weight is
    n / (n + prior_inputs): a half at 20 inputs, a twentieth at one, nothing at none. The first row imagines one input
    that leaves anywhere, so that no share is exactly 0 or 1.
    """

    def __init__(self, num_blocks: int, prior_inputs: float = PRIOR_INPUTS) -> None:
        self._row: Floats = np.linspace(1, 1 / (num_blocks + 1), num_blocks)
        self._strength, self._prior_inputs = 1.0, prior_inputs

    def add(self, window: Window) -> Floats:
        """Take in a window; returns the survival that is believed after it."""
        known = np.asarray(window.entered) + self._strength * self._row
        self._row = known / (window.answered + self._strength)
        self._strength = self._prior_inputs
        return self._row
