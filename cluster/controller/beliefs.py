"""Estimates how many inputs will survive to each block in the next window, from the counts at the open ramps.

Every input that ends counts once: one that left, at its ramp; one that ended before that, up to where it stood
(`Window.known`); one that asked for the whole network, in a share of its own, since it says nothing of the others.

A plan that closes ramps hides who would leave there. So they are opened now and then for one look (`Peek`): without it,
a plan without ramps could never find out that inputs have become easy again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.controller.config import Patience
from deployments.front.observed import Observed, merged
from optimizer.plan import Placement, Plan, Split
from profiles.exits import ExitProfile, carried
from profiles.forecast import Forecast, Forecaster
from profiles.windows import History, SteadySurvival, Window, merge

RECENT_WINDOWS = 15  # that count as evidence
DAY_S = 86_400.0
SURPRISE_DEVIATIONS = 3.0  # standard deviations from the forecast that make a part of a window a surprise
PEEKS_PER_HOLD = 3  # while a plan is expected to hold: what happens at a closed ramp is unknown between two peeks


class Beliefs:
    """The survival that is expected: the forecast, unless the last window contradicts the forecast made for it.

    Then the inputs have changed. What was seen is the better guess, and earlier windows are forgotten, since a series
    that jumped once would be forecast to jump back. `survival` is that of inputs that may leave at any ramp;
    `full_share` of all inputs run to the end, because they ask for the whole network.
    """

    def __init__(self, history: History, prior: ExitProfile, ramp_blocks: Collection[int]) -> None:
        self._history, self._num_blocks, self._ramp_blocks = history, prior.num_blocks, sorted(ramp_blocks)
        self._forecaster = self._after(history.windows)
        self.forecast: Forecast | None = self._forecaster.forecast() if history.windows else None
        self._seen = prior.survival
        for window in history.windows[-RECENT_WINDOWS:]:
            self._take(window)
        self._peeked: Window | None = None  # in the window that has not ended
        self._is_anew = False  # the forecast is made of that only
        self.survival = self.forecast.exits.survival if self.forecast else prior.survival
        self.full_share = self.forecast.full_share if self.forecast else 0.0
        self.inputs_per_text = self.forecast.inputs_per_text if self.forecast else None
        self.surprised = False  # by the last window

    def peak_per_s(self, now_s: float) -> float:
        """The largest rate of the last day at which inputs arrived for as long as a look."""
        day = (window for window in self._history.windows if window.start_s >= now_s - DAY_S)
        return max((max(window.peak_per_s, window.arrivals_per_s) for window in day), default=0.0)

    @property
    def carried(self) -> tuple[float, ...]:
        """The share of all inputs that enter each block, those that ask for the whole network among them."""
        return carried(self.survival, self.full_share)

    @property
    def evidence(self) -> int:
        """Answers in the latest windows."""
        return sum(window.answered for window in self._history.windows[-RECENT_WINDOWS:])

    def surprise(self, looks: Sequence[Observed], ramps: Collection[int], enough: int) -> Observed | None:
        """The latest part of a window, if it has enough answers and contradicts the forecast."""
        answered = 0
        for first in reversed(range(len(looks))):
            answered += looks[first].answered
            if answered >= enough:
                latest = merged(looks[first:])
                window = self._window(latest, ramps)
                odd = self.forecast is not None and self.forecast.contradicts(window, SURPRISE_DEVIATIONS)
                return latest if odd else None
        return None

    def close(
        self, seen: Observed, ramps: Collection[int], latest: Observed | None = None, peak_per_s: float = 0.0
    ) -> None:
        """A window has ended. `latest` is the part of it that contradicts the forecast, where there is one."""
        window = replace(self._window(seen, ramps), peak_per_s=peak_per_s)
        newest = self._window(latest, ramps) if latest else window
        self._take(newest)
        if self._peeked:
            window = merge([self._peeked, window])
        self._history.append(window)
        self.surprised = latest is not None or (self.forecast is not None and self.forecast.contradicts(window))
        others_ask = self.forecast is not None and self.forecast.misjudges_full(window)
        if self.surprised or self._is_anew:
            self._forecaster = self._after([newest if latest else window])
        else:
            self._forecaster.observe(window, full_share_changed=others_ask)
        self._peeked, self._is_anew = None, False
        self.forecast = self._forecaster.forecast()
        self.survival = self._seen if self.surprised else self.forecast.exits.survival
        self.full_share = self.forecast.full_share
        self.inputs_per_text = self.forecast.inputs_per_text

    def peeked(self, seen: Observed, ramps: Collection[int]) -> None:
        """All ramps were open for one look: where inputs leave among those closed otherwise is known again.

        The inputs of the look belong to the window that has not ended, and enter history and forecast with it.
        """
        window = self._window(seen, ramps)
        self._take(window)
        self.survival = self._seen
        self._peeked = merge([self._peeked, window]) if self._peeked else window
        if self.forecast is None or self.forecast.contradicts(window):
            self._forecaster, self._is_anew = self._after([window]), True
            self.forecast = self._forecaster.forecast()

    def _after(self, windows: Sequence[Window]) -> Forecaster:
        return Forecaster.after(windows, self._num_blocks, self._ramp_blocks)

    def _take(self, window: Window) -> None:
        """Correct what was seen before by a later window."""
        steady = SteadySurvival(self._num_blocks)
        steady.add(_imagined(self._seen))
        row = steady.add(window)
        self._seen = tuple(np.minimum.accumulate(np.clip(row, 0, 1)).tolist())

    def _window(self, seen: Observed, ramps: Collection[int]) -> Window:
        """Exits are spread over the closed ramps in the proportions that were seen before.

        Inputs that ended before they left are known to have stayed at open ramps only.
        """
        left, unfinished = revealed(seen.exits, ramps, self._seen), behind_ramps(seen.unfinished, ramps)
        # Only texts that have ended tell how long texts are; tokens of others arrive meanwhile.
        texts = round(seen.arrivals * seen.texts / seen.ended) if seen.ended else seen.texts
        return Window(seen.started_s, seen.seconds, seen.arrivals, left, texts, seen.full, unfinished)


def _imagined(survival: Sequence[float]) -> Window:
    """A window of a million inputs that survive exactly so."""
    gone = np.round(1e6 * (1 - np.append(survival, 0.0))).astype(np.int64)
    return Window(0.0, 1.0, 0, tuple(np.diff(gone).tolist()))


def revealed(left: Sequence[int], ramps: Collection[int], survival: Sequence[float]) -> tuple[int, ...]:
    """Where inputs would have left if all ramps had been open.

    An input that leaves at the first open ramp (or at the end) may have been sure at a closed one before it. The inputs
    are spread over the blocks in between by the survival that is believed.

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


def behind_ramps(unfinished: Sequence[int], ramps: Collection[int]) -> tuple[int, ...]:
    """Counts by the block before which inputs stood, as counts by the block behind the last ramp that they passed.

    >>> behind_ramps((5, 4, 3, 2), ramps=(1,))
    (9, 0, 5, 0)
    """
    counts, passed = [0] * len(unfinished), 0
    for block, count in enumerate(unfinished):
        passed = block if block - 1 in ramps else passed
        counts[passed] += count
    return tuple(counts)


@dataclass(frozen=True)
class Peek:
    """A look with all ramps open, after which `before` runs again. `number` is that of the event which tells of it."""

    before: Plan
    number: int


class PeekSchedule:
    """Says when to open closed ramps: regularly, and after inputs have surprised.

    A plan that has some ramp open must peek as often: an input that was sure three blocks before an open ramp looks
    like one that is sure there.
    """

    def __init__(self, patience: Patience, now_s: float) -> None:
        self._patience = patience
        self.peeked_s = self.surprised_s = now_s

    def is_due(self, plan: Plan, ramp_blocks: Collection[int], now_s: float, *, idle: bool) -> bool:
        """`idle`: the plan is not about to be changed anyway."""
        if all(set(ramp_blocks) <= set(pipeline.ramps) for pipeline in plan.pipelines):
            return False
        since_s, window_s = now_s - self.peeked_s, self._patience.replan_every_s
        if self.surprised_s > self.peeked_s and since_s >= window_s:
            return True
        return idle and since_s >= self._patience.hold_windows * window_s / PEEKS_PER_HOLD


def with_all_ramps(plan: Plan, ramp_blocks: Collection[int]) -> Plan:
    """The same plan with every ramp open.

    >>> from optimizer import Placement
    >>> with_all_ramps(Plan((Placement("v100", 1, (Split(0, 3, 8),)),)), [0, 1]).ramps
    (0, 1)
    """
    first, *others = (
        replace(pipeline, placements=tuple(_opened(each, ramp_blocks) for each in pipeline.placements))
        for pipeline in plan.pipelines
    )
    return replace(first, promise=plan.promise, beside=tuple(others))


def _opened(placement: Placement, ramp_blocks: Collection[int]) -> Placement:
    def ramps(split: Split) -> tuple[int, ...]:
        return tuple(ramp for ramp in sorted(ramp_blocks) if split.start <= ramp < split.stop)

    return replace(placement, splits=tuple(replace(split, ramps=ramps(split)) for split in placement.splits))
