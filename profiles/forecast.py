"""The forecast of the next window: the survival at each block, the rate of arrivals, and the length of texts.

The survival at each ramp is forecast by itself; then the curve is made non-increasing. Arrivals and lengths are
forecast as logarithms, so they cannot become negative. The methods are in profiles/series.py; `make bench-forecast`
measures their errors.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.series import Prediction, Reading, Series, Transform, Z
from isobatch.profiles.windows import SteadySurvival, Window

Floats = NDArray[np.float64]
EDGE = 1e-6  # shares closer than this to 0 or 1 are treated as equal to them
# Windows between two fits of one series. The series take turns.
REFIT_EVERY = 24
MAX_LOG = 700.0  # the logarithm of the largest rate that can be written
SURE = 3.0  # standard deviations: a difference beyond this is not chance
UNKNOWN_SHARE = 0.5  # the survival at a ramp before anything is known about it


@dataclass(frozen=True)
class Forecast:
    """The next window: the expected values, and 95 % intervals around them."""

    exits: ExitProfile
    survival_low: tuple[float, ...]
    survival_high: tuple[float, ...]
    arrivals_per_s: float
    arrivals_low_per_s: float
    arrivals_high_per_s: float
    methods: tuple[str, ...]  # the method with the largest weight, for each ramp in order, then for the arrivals
    inputs_per_text: float | None = None  # where an input is a number of tokens
    full_share: float = 0.0  # the share of arrivals that ask for the whole network; survival is that of the others

    @property
    def method(self) -> str:
        """A short text on the methods: "level x 9, arima(1,1,1) x 3"."""
        return ", ".join(f"{method} x {count}" for method, count in Counter(self.methods).most_common())

    def contradicts(self, window: Window, z: float = Z) -> bool:
        """Whether the observed survival contradicts this forecast at some block, so that a new plan is due.

        A larger `z` makes false alarms rarer, for callers that check often.
        """
        low, high = window.interval(z)
        return bool((low > np.asarray(self.survival_high)).any() or (high < np.asarray(self.survival_low)).any())

    def misjudges_full(self, window: Window) -> bool:
        """Whether the share of requests for the whole network differs from the forecast by more than chance."""
        (_, low), (_, high) = window.mix.interval(SURE)
        return bool(low > self.full_share + EDGE or high < self.full_share - EDGE)


class Forecaster:
    """Observes windows and forecasts the next one.

    `ramp_blocks` are the blocks after which inputs may leave; by default all but the last.
    """

    def __init__(self, num_blocks: int, ramp_blocks: Sequence[int] | None = None) -> None:
        ramps = range(num_blocks - 1) if ramp_blocks is None else sorted(set(ramp_blocks))
        if any(not 0 <= block < num_blocks - 1 for block in ramps):
            raise ValueError(f"ramp_blocks = {list(ramps)} must lie between 0 and {num_blocks - 2}")
        self._num_blocks = num_blocks
        self._cuts = [block + 1 for block in ramps]  # the blocks after a ramp
        self._steady = SteadySurvival(num_blocks)
        self._mix, self._any_full = SteadySurvival(2), False  # of `Window.mix`
        self._expected: Floats | None = None  # the survival that was expected of the next window
        # Of each ramp, of the arrivals, of the inputs per text, and of the share that asks for the whole network.
        self._series = self._new_series([[] for _ in range(len(self._cuts) + 3)])
        self._observed = 0
        self._last: Window | None = None
        self._long: float | None = None  # the logarithm of the latest inputs per text

    @classmethod
    def after(
        cls, windows: Iterable[Window], num_blocks: int, ramp_blocks: Sequence[int] | None = None
    ) -> "Forecaster":
        """A forecaster that has observed these windows, as after a restart: every series is fitted once."""
        forecaster = cls(num_blocks, ramp_blocks)
        rows = [forecaster._values(window) for window in windows]
        if rows:
            columns = [list(chain(*column)) for column in zip(*rows, strict=True)]
            forecaster._series = forecaster._new_series(columns)
        for series in forecaster._series:
            series.refit()
        forecaster._observed = len(rows)
        return forecaster

    def observe(self, window: Window, full_share_changed: bool = False) -> None:
        """Observe the next window. The series are fitted in turns, so no window has to wait for all of them.

        `full_share_changed`: the share of requests for the whole network has jumped, so its series starts again.
        """
        values = self._values(window)
        if full_share_changed:
            self._series[-1] = self._new_series([[] for _ in self._series])[-1]
            values[-1] = [replace(each, value=each.steady) for each in values[-1]]
        for index, (series, readings) in enumerate(zip(self._series, values, strict=True)):
            for each in readings:
                series.append(each)
            if (self._observed - index) % REFIT_EVERY == 0:
                series.refit()
        self._observed += 1

    def forecast(self) -> Forecast:
        """The forecast of the next window, if it has as many inputs as the latest one."""
        *of_ramps, of_arrivals, of_lengths, of_full = self._series
        known = self._last.known[self._cuts].tolist() if self._last else [0.0] * len(self._cuts)
        ramps = [
            series.predict(_chance(series.predict().mean, inputs))
            for series, inputs in zip(of_ramps, known, strict=True)
        ]
        arrivals, long = of_arrivals.predict(self._arrivals_noise), of_lengths.predict().mean
        low, likely, high = (self._curve(ramps, z) for z in (-Z, 0.0, Z))
        few, usual, many = (float(np.expm1(np.clip(_at(arrivals, z), 0, MAX_LOG))) for z in (-Z, 0.0, Z))
        methods = tuple(prediction.method for prediction in (*ramps, arrivals))
        per_text = None if self._long is None else float(np.exp(np.clip(long, -MAX_LOG, MAX_LOG)))
        full_share = min(max(of_full.predict().mean, 0.0), 1.0) if self._any_full else 0.0
        return Forecast(ExitProfile(likely), low, high, usual, few, many, methods, per_text, full_share)

    def singles(self) -> list[dict[str, float]]:
        """The forecast of each method by itself, for each ramp, for comparisons."""
        return [series.singles() for series in self._series[: len(self._cuts)]]

    def _new_series(self, columns: Sequence[Sequence[Reading]]) -> list[Series]:
        *ramps, arrivals, lengths, full = columns
        odds = Transform(
            lambda each: float(logit(min(max(each, EDGE), 1 - EDGE))), expit, lambda each: max(each * (1 - each), EDGE)
        )
        return [
            *(Series(each, odds, UNKNOWN_SHARE) for each in ramps),
            Series(arrivals),
            Series(lengths),
            Series(full, odds),
        ]

    @property
    def _arrivals_noise(self) -> float:
        """The variance of the logarithm of arrivals by chance."""
        if self._last is None:
            return 0.0
        return (self._last.arrived + 0.5) / (self._last.duration_s * (1 + self._last.arrivals_per_s)) ** 2

    def _values(self, window: Window) -> list[list[Reading]]:
        """The readings of a window: of each ramp, of the arrivals, of the inputs per text (none before the first text),
        and of the share of full requests."""
        if len(window.left) != self._num_blocks:
            raise ValueError(f"a window of {len(window.left)} blocks for a network of {self._num_blocks}")
        self._last = window
        steady = self._steady.add(window)
        expected = steady if self._expected is None else self._expected
        self._expected = steady
        entered, known, arrivals = window.entered, window.known.tolist(), float(np.log1p(window.arrivals_per_s))
        ramps = [[_share(entered[cut], known[cut], float(expected[cut]), float(steady[cut]))] for cut in self._cuts]
        arrived = Reading(arrivals, self._arrivals_noise, arrivals)
        return [*ramps, [arrived], self._length(window), [self._full(window)]]

    def _full(self, window: Window) -> Reading:
        self._any_full = self._any_full or window.full > 0
        share = float(self._mix.add(window.mix)[1])
        return _share(window.full, window.mix.answered, share, share)

    def _length(self, window: Window) -> list[Reading]:
        """The mean of n texts has a relative variance of 1 / n if the spread of lengths equals their mean."""
        if not window.texts or not window.arrived:
            return [] if self._long is None else [Reading(self._long, inf, self._long)]
        self._long = float(np.log(window.arrived / window.texts))
        return [Reading(self._long, 1 / window.texts, self._long)]

    def _curve(self, ramps: list[Prediction], z: float) -> tuple[float, ...]:
        """Survival at every block, `z` standard deviations from the mean; blocks not after a ramp inherit it."""
        curve = np.ones(self._num_blocks)
        curve[self._cuts] = np.clip([_at(ramp, z) for ramp in ramps], 0.0, 1.0)
        return tuple(np.minimum.accumulate(curve).tolist())


def _share(part: int, inputs: float, expected: float, steady: float) -> Reading:
    """The share of `part` among the inputs, with its variance by chance if `expected` was the true share."""
    return Reading(part / inputs, _chance(expected, inputs), steady) if inputs else Reading(steady, inf, steady)


def _chance(share: float, inputs: float) -> float:
    """The variance of a share among this number of inputs, each of which stays with this probability; never 0.

    >>> round(_chance(0.5, 99), 4), _chance(1.0, 9) > 0
    (0.0025, True)
    """
    likely = (inputs * share + 0.5) / (inputs + 1)
    return likely * (1 - likely) / (inputs + 1)


def _at(prediction: Prediction, z: float) -> float:
    return prediction.mean + z * prediction.sd
