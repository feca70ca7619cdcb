"""The next value of one series: several methods at once, each of which counts as its own recent errors deserve.

The interval around it comes from how far off that was: what chance does not explain is taken to go on, and the errors
themselves say how many standard deviations hold 95 % of them. Nothing here ever raises.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiles.methods import PLAIN, Arima, Last, Mean, Method, Reading, Smoothing, Transform, WanderingLevel

Floats = NDArray[np.float64]

SPAN = 240  # values that a fit looks back on: eight hours of two-minute windows
FORGET = 0.98  # what a method's past errors still count after one more value
POWER = 4  # a method counts by the inverse of its squared errors to this power: the best of them counts most
LEAST_VARIANCE = 1e-4  # errors are weighed by what chance gives, and no value is seen more exactly than this
ERRORS = 120  # the latest ones, of which the interval is made
FEW_ERRORS, ENOUGH_ERRORS = 4, 20  # from how many on they tell how far it is off, and how they are distributed
UNKNOWN_SD = 1.0  # of the transformed values, of a series too short to judge by
Z = 1.96  # standard deviations on either side that hold 95 % of a normal distribution


@dataclass(frozen=True)
class Prediction:
    """The next value, how far it may be off (1.96 of these hold 95 %), and the method that counts most."""

    mean: float
    sd: float
    method: str


class Spread:
    """How far forecasts were off, beyond what chance explains."""

    def __init__(self) -> None:
        self._squares, self._noises = deque[float](maxlen=ERRORS), deque[float](maxlen=ERRORS)

    def append(self, off: float, noise: float) -> None:
        self._squares.append(off * off)
        self._noises.append(noise)

    def sd(self, noise: float, unknown_sd: float) -> float:
        """Of the next value, to which chance will give this variance. `unknown_sd`: while little is known."""
        if len(self._squares) < FEW_ERRORS:
            return float(np.sqrt(unknown_sd**2 + noise))
        squares, noises = np.array(self._squares), np.array(self._noises)
        beside = max(float((squares - noises).mean()), 0.0)
        sd = float(np.sqrt(beside + noise))
        if len(squares) < ENOUGH_ERRORS:
            return sd
        scaled = np.sqrt(squares / np.maximum(beside + noises, 1e-300))
        return sd * max(1.0, float(np.quantile(scaled, 0.95)) / Z)


class Series:
    """One series of numbers, forecast one step ahead.

    `refit` fits what has to be fitted; until the next one, new values only move its state. `unknown` is what is
    forecast before the first value.

    >>> two = Series([Reading.exactly(1.0), Reading.exactly(3.0)]).predict()
    >>> 1.0 < two.mean <= 3.0, two.sd
    (True, 1.0)
    """

    def __init__(
        self, values: Iterable[Reading] = (), span: int = SPAN, transform: Transform = PLAIN, unknown: float = 0.0
    ) -> None:
        self._seen = deque(values, maxlen=span)
        self._transform, self._unknown = transform, unknown
        self._arima = Arima(transform, span)
        self._replay(np.full(len(self._seen), np.nan))

    def append(self, seen: Reading) -> None:
        """Take in the next value that was seen."""
        self._seen.append(seen)
        self._learn(seen)
        self._arima.append(seen)
        self._look_ahead(self._arima.next())

    def refit(self) -> None:
        """Fit anew, on the latest values, and judge every method by what it would have said of them."""
        self._arima = Arima(self._transform, self._seen.maxlen or SPAN)
        self._replay(self._arima.refit(self._seen))

    def predict(self, noise: float = 0.0) -> Prediction:
        """The next value, to which chance will give this variance."""
        unknown_sd = UNKNOWN_SD * self._transform.slope(self._mean)
        with np.errstate(all="ignore"):
            sd = self._spread.sd(noise, unknown_sd)
        return Prediction(self._mean, sd if np.isfinite(sd) else unknown_sd, self._method)

    def singles(self) -> dict[str, float]:
        """What each method by itself says of the next value; NaN where it has nothing to say."""
        names = [*(method.name for method in self._methods), "arima"]
        return dict(zip(names, self._said.tolist(), strict=True))

    def _replay(self, by_arima: Floats) -> None:
        """Go through all values again, with what an ARIMA says before each of them."""
        self._methods: list[Method] = [Last(), Mean(), Smoothing(), WanderingLevel()]
        self._losses = np.zeros(len(self._methods) + 1)
        self._spread = Spread()
        self._said, self._mean, self._method = np.full(len(self._losses), np.nan), self._unknown, Last.name
        for index, (seen, said) in enumerate(zip(self._seen, by_arima.tolist(), strict=True)):
            if index:
                self._look_ahead(said)
            self._learn(seen)
        if self._seen:
            self._look_ahead(self._arima.next())

    def _learn(self, seen: Reading) -> None:
        """Judge every method by this value, and let it take it in."""
        with np.errstate(all="ignore"):
            if np.isfinite(seen.noise) and not np.isnan(self._said[0]):
                off = np.where(np.isnan(self._said), self._losses_of_silence(seen), self._said - seen.value)
                self._losses = FORGET * self._losses + off**2 / (seen.noise + LEAST_VARIANCE)
                self._spread.append(self._mean - seen.value, seen.noise)
            for method in self._methods:
                method.append(seen)

    def _losses_of_silence(self, seen: Reading) -> float:
        """A method that says nothing is as far off as the worst of the others."""
        return float(np.nanmax(np.abs(self._said - seen.value)))

    def _look_ahead(self, by_arima: float) -> None:
        with np.errstate(all="ignore"):
            self._said = np.array([*(method.next() for method in self._methods), by_arima])
            counts = (self._losses + 1e-9) ** -POWER
            counts = np.where(np.isfinite(self._said) & np.isfinite(counts), counts, 0.0)
            most, total = int(counts.argmax()), counts.sum()
            usable = np.isfinite(total) and total > 0
            counts = counts / total if usable else np.eye(len(counts))[0]
            self._mean = float(counts @ np.where(counts > 0, self._said, 0.0))
        most = most if usable else 0
        self._method = self._methods[most].name if most < len(self._methods) else self._arima.name
