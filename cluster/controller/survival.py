"""Estimates the share of inputs that enters each block in the next window, from the counts at the open ramps.

Every input that ends counts once. An input that left counts at its ramp. An input that ended without an answer counts
up to its next block (`Window.known`). Inputs that requested the whole network are counted apart, because they would
leave nowhere.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from isobatch.cluster.controller.config import Patience
from isobatch.deployments.front.observed import Observed, merged
from isobatch.optimizer.plan import Plan, Split
from isobatch.profiles.exits import ExitProfile, carried
from isobatch.profiles.forecast import Forecast, Forecaster
from isobatch.profiles.windows import History, SteadySurvival, Window, merge

RECENT_WINDOWS = 15  # windows whose answers count as evidence: the default of hold_windows
DAY_S = 86_400.0  # the peak rate is that of a day, because load repeats daily
EXPLORATIONS_PER_HOLD = 3  # while a plan is expected to hold: in between, exits at closed ramps are unknown
SURPRISE_DEVIATIONS = 3.0  # standard deviations from the forecast that contradict it before a window has ended


class SurvivalEstimate:
    """The expected survival: the forecast, unless the last window contradicts the forecast that was made for it.

    After a contradiction the inputs have changed. Then the last measurement is the better estimate, and earlier windows
    are forgotten: a series that jumped once would be forecast to jump back. `survival` is that of inputs that may leave
    at any ramp. A share `full_share` of all inputs runs to the end, because these inputs ask for the whole network.
    """

    def __init__(self, history: History, prior: ExitProfile, ramp_blocks: Collection[int]) -> None:
        self._history, self._prior, self._ramp_blocks = history, prior, sorted(ramp_blocks)
        self._forecaster = self._forecaster_after(history.windows)
        self.forecast: Forecast | None = self._forecaster.forecast() if history.windows else None
        self._measured = prior.survival
        for window in history.windows[-RECENT_WINDOWS:]:
            self._update_measured(window)
        self._exploration: Window | None = None  # the looks with all ramps open, of the window that has not ended
        self._only_exploration = False  # whether the forecast rests on these looks alone
        self.survival = self.forecast.exits.survival if self.forecast else prior.survival
        self.full_share = self.forecast.full_share if self.forecast else 0.0
        self.inputs_per_text = self.forecast.inputs_per_text if self.forecast else None
        self.surprised = False  # whether the last window contradicted its forecast

    def peak_per_s(self, now_s: float) -> float:
        """The largest rate of the last day at which inputs arrived between two looks."""
        day = (window for window in self._history.windows if window.start_s >= now_s - DAY_S)
        return max((max(window.peak_per_s, window.arrivals_per_s) for window in day), default=0.0)

    @property
    def carried(self) -> tuple[float, ...]:
        """The share of all inputs that enters each block, including inputs that ask for the whole network."""
        return carried(self.survival, self.full_share)

    @property
    def recent_inputs(self) -> int:
        """Those whose exit is known: they were answered, or asked for the full network."""
        return sum(window.answered + window.full for window in self._history.windows[-RECENT_WINDOWS:])

    def surprise(self, looks: Sequence[Observed], ramps: Collection[int], enough: int) -> Observed | None:
        """The shortest latest part of a window with `enough` answers, if it contradicts the forecast."""
        answered = 0
        for first in reversed(range(len(looks))):
            answered += looks[first].answered
            if answered >= enough:
                latest = merged(looks[first:])
                window = self._window(latest, ramps)
                differs = self.forecast is not None and self.forecast.contradicts(window, SURPRISE_DEVIATIONS)
                return latest if differs else None
        return None

    def close(
        self, observed: Observed, ramps: Collection[int], latest: Observed | None = None, peak_per_s: float = 0.0
    ) -> None:
        """Add a window that has ended. `latest` is the part of it that contradicts the forecast, if any does."""
        window = replace(self._window(observed, ramps), peak_per_s=peak_per_s)
        newest = self._window(latest, ramps) if latest else window
        self._update_measured(newest)
        if self._exploration:
            window = merge([self._exploration, window])
        self._history.append(window)
        self.surprised = latest is not None or (self.forecast is not None and self.forecast.contradicts(window))
        full_share_changed = self.forecast is not None and self.forecast.misjudges_full(window)
        if self.surprised or self._only_exploration:
            self._forecaster = self._forecaster_after([newest if latest else window])
        else:
            self._forecaster.observe(window, full_share_changed=full_share_changed)
        self._exploration, self._only_exploration = None, False
        self.forecast = self._forecaster.forecast()
        self.survival = self._measured if self.surprised else self.forecast.exits.survival
        self.full_share = self.forecast.full_share
        self.inputs_per_text = self.forecast.inputs_per_text

    def add_exploration(self, observed: Observed, ramps: Collection[int]) -> None:
        """Add a look with all ramps open, which shows where inputs leave among the ramps that are otherwise closed.

        Its inputs belong to the window that has not ended, and enter history and forecast with that window.
        """
        window = self._window(observed, ramps)
        self._update_measured(window)
        self.survival = self._measured
        self._exploration = merge([self._exploration, window]) if self._exploration else window
        if self.forecast is None or self.forecast.contradicts(window):
            self._forecaster, self._only_exploration = self._forecaster_after([window]), True
            self.forecast = self._forecaster.forecast()

    def _forecaster_after(self, windows: Sequence[Window]) -> Forecaster:
        return Forecaster.after(windows, self._prior.num_blocks, self._ramp_blocks)

    def _update_measured(self, window: Window) -> None:
        steady = SteadySurvival(self._prior.num_blocks)
        steady.add(_as_window(self._measured))
        behind = [0, *(ramp + 1 for ramp in self._ramp_blocks)]
        row = np.ones(self._prior.num_blocks)  # no input leaves where no ramp is: such blocks inherit their share
        row[behind] = steady.add(window)[behind]
        self._measured = tuple(np.minimum.accumulate(np.clip(row, 0, 1)).tolist())

    def _window(self, observed: Observed, ramps: Collection[int]) -> Window:
        """The counts of an observation as they had been with all ramps open.

        Unfinished inputs count only up to the last open ramp that they passed.
        """
        left = self._prior.with_survival(self._measured).spread(observed.exits, ramps)
        unfinished = back_to_open_ramps(observed.unfinished, ramps)
        # Only ended texts show how long texts are: tokens of unfinished texts arrive in the same window.
        texts = round(observed.arrivals * observed.texts / observed.ended) if observed.ended else observed.texts
        return Window(observed.started_s, observed.seconds, observed.arrivals, left, texts, observed.full, unfinished)


def _as_window(survival: Sequence[float]) -> Window:
    """A window of a million inputs with exactly this survival."""
    left = np.round(1e6 * (1 - np.append(survival, 0.0))).astype(np.int64)
    return Window(0.0, 1.0, 0, tuple(np.diff(left).tolist()))


def back_to_open_ramps(unfinished: Sequence[int], ramps: Collection[int]) -> tuple[int, ...]:
    """Counts by the block before which inputs stood, as counts by the block after the last open ramp they passed.

    >>> back_to_open_ramps((5, 4, 3, 2), ramps=(1,))
    (9, 0, 5, 0)
    """
    counts, passed = [0] * len(unfinished), 0
    for block, count in enumerate(unfinished):
        passed = block if block - 1 in ramps else passed
        counts[passed] += count
    return tuple(counts)


class ExplorationSchedule:
    """When to open closed ramps for one look, to count the inputs that would leave there. Otherwise a plan without
    ramps could never learn that inputs have become easy again.

    They open regularly, and one window after inputs contradicted the forecast. A plan with some open ramps is explored
    as often as a plan without any: an input that was sure three blocks before an open ramp looks like an input that is
    sure at that ramp.
    """

    def __init__(self, patience: Patience, now_s: float) -> None:
        self._patience = patience
        self.explored_s = self.surprised_s = now_s

    def is_due(self, plan: Plan, ramp_blocks: Collection[int], now_s: float, *, idle: bool) -> bool:
        """Whether to explore now. `idle`: the plan is not about to be changed anyway."""
        if all(set(ramp_blocks) <= set(pipeline.ramps) for pipeline in plan.pipelines):
            return False
        since_s, window_s = now_s - self.explored_s, self._patience.replan_every_s
        if self.surprised_s > self.explored_s and since_s >= window_s:
            return True
        return idle and since_s >= self._patience.hold_windows * window_s / EXPLORATIONS_PER_HOLD


def with_all_ramps(plan: Plan, ramp_blocks: Collection[int]) -> Plan:
    """The same plan with every ramp open.

    >>> from isobatch.optimizer import Placement
    >>> with_all_ramps(Plan((Placement("v100", 1, (Split(0, 3, 8),)),)), [0, 1]).ramps
    (0, 1)
    """

    def opened(split: Split) -> Split:
        return replace(split, ramps=tuple(ramp for ramp in sorted(ramp_blocks) if split.start <= ramp < split.stop))

    def of_pipeline(pipeline: Plan) -> Plan:
        placements = (replace(each, splits=tuple(map(opened, each.splits))) for each in pipeline.placements)
        return replace(pipeline, placements=tuple(placements))

    return plan.with_each(of_pipeline)
