"""Who will survive in the next window, from what was seen of the last ones through the ramps that were open."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from deployments.front.observed import Observed, merged
from profiles.exits import ExitProfile
from profiles.forecast import Forecast, Forecaster
from profiles.history import History
from profiles.windows import Steadied, Window

RECENT = 15  # windows that count as evidence
SURE = 3.0  # standard deviations before a part of a window counts as a surprise


class Beliefs:
    """Survival as it is believed to be: the forecast, unless what was seen last contradicts the forecast before.

    Then the world has changed: what was seen is the better guess, and the windows before are forgotten, since a series
    that jumped once would be forecast to jump back.
    """

    def __init__(self, history: History, prior: ExitProfile, ramp_blocks: Collection[int]) -> None:
        self._history, self._num_blocks, self._ramp_blocks = history, prior.num_blocks, sorted(ramp_blocks)
        self._forecaster = self._after(history.windows)
        self.forecast: Forecast | None = self._forecaster.forecast() if history.windows else None
        self._seen = self._steadied(prior.survival, history.windows[-RECENT:])
        self.survival = self.forecast.exits.survival if self.forecast else prior.survival
        self.surprised = False  # by the last window

    @property
    def evidence(self) -> int:
        """Answers in the latest windows."""
        return sum(window.answered for window in self._history.windows[-RECENT:])

    def surprise(self, looks: Sequence[Observed], ramps: Collection[int], enough: int) -> Observed | None:
        """The latest part of a window, if it has answers enough and cannot be squared with the forecast."""
        answered = 0
        for first in reversed(range(len(looks))):
            answered += looks[first].answered
            if answered >= enough:
                latest = merged(looks[first:])
                odd = self.forecast is not None and self.forecast.contradicts(self._window(latest, ramps), SURE)
                return latest if odd else None
        return None

    def close(self, seen: Observed, ramps: Collection[int], latest: Observed | None = None) -> None:
        """A window has ended. `latest` is that part of it which contradicts the forecast, where one was noticed."""
        window, newest = self._window(seen, ramps), self._window(latest or seen, ramps)
        self._history.append(window)
        self._seen = self._steadied(self._seen, [newest])
        self.surprised = latest is not None or (self.forecast is not None and self.forecast.contradicts(window))
        if self.surprised:
            self._forecaster = self._after([newest])
        else:
            self._forecaster.observe(window)
        self.forecast = self._forecaster.forecast()
        self.survival = self._seen if self.surprised else self.forecast.exits.survival

    def opened(self, seen: Observed, ramps: Collection[int]) -> None:
        """All ramps were open for a moment: how inputs spread over those that are closed otherwise is known again."""
        window = self._window(seen, ramps)
        self._seen = self.survival = self._steadied(self._seen, [window])
        if self.forecast is None or self.forecast.contradicts(window):
            self._forecaster = self._after([window])
            self.forecast = self._forecaster.forecast()

    def _after(self, windows: Sequence[Window]) -> Forecaster:
        return Forecaster.after(windows, self._num_blocks, self._ramp_blocks)

    def _steadied(self, survival: tuple[float, ...], windows: Iterable[Window]) -> tuple[float, ...]:
        """A curve, moved by what was seen later."""
        steadied = Steadied(self._num_blocks)
        row = steadied.add(_imagined(survival))
        for window in windows:
            row = steadied.add(window)
        return tuple(np.minimum.accumulate(np.clip(row, 0, 1)).tolist())

    def _window(self, seen: Observed, ramps: Collection[int]) -> Window:
        """What closed ramps hid is told apart by what was seen before."""
        return Window(seen.started_s, seen.seconds, seen.arrivals, revealed(seen.exits, ramps, self._seen))


def _imagined(survival: Sequence[float]) -> Window:
    """Many inputs that behave just so."""
    gone = np.round(1e6 * (1 - np.append(survival, 0.0))).astype(np.int64)
    return Window(0.0, 1.0, 0, tuple(np.diff(gone).tolist()))


def revealed(left: Sequence[int], ramps: Collection[int], survival: Sequence[float]) -> tuple[int, ...]:
    """Where inputs would have left, had all ramps been open.

    Whoever is let go by the first open ramp (or the end) may have been sure at a closed one before: as many as is
    believed of the blocks in between.

    >>> revealed((0, 0, 60, 40), ramps=(2,), survival=(1.0, 0.8, 0.6, 0.4))
    (20, 20, 20, 40)
    """
    likely = -np.diff([*survival, 0.0])
    counts, start = np.asarray(left, np.int64).copy(), 0
    for ramp in (*sorted(ramps), len(counts) - 1):
        weights = likely[start : ramp + 1]
        if weights.sum() > 0 and ramp > start:
            share = np.cumsum(weights) / weights.sum()
            through, counts[ramp] = counts[ramp], 0
            counts[start : ramp + 1] += np.diff(np.round(through * share).astype(np.int64), prepend=0)
        start = ramp + 1
    return tuple(counts.tolist())
