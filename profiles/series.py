"""The next value of one series, by several methods at once, each weighted by its recent errors.

The interval around the forecast comes from earlier errors: the part that chance does not explain is assumed to go on,
and the distribution of the errors gives the standard deviations that hold 95 % of them. Nothing in this file raises.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.forecast_methods import (
    PLAIN,
    Arima,
    Last,
    Mean,
    Method,
    Reading,
    Smoothing,
    Transform,
    WanderingLevel,
)

Floats = NDArray[np.float64]

SPAN = 240  # values that a fit uses: eight hours of two-minute windows
FORGET = 0.98  # the weight of a method's earlier errors after one more value
POWER = 4  # the weight of a method is the inverse of its squared errors to this power: the best one counts most
# Errors are weighted by the inverse variance of chance, but no value counts as more exact than this variance.
LEAST_VARIANCE = 1e-4
ERRORS = 120  # the latest errors, from which the interval is made
FEW_ERRORS = 4  # from this number of errors on, they give the standard deviation
ENOUGH_ERRORS = 20  # from this number of errors on, they also give the quantile
UNKNOWN_SD = 1.0  # the standard deviation of transformed values while the series is too short to estimate it
# Standard deviations on either side that hold 95 % of a normal distribution.
Z = 1.96


@dataclass(frozen=True)
class Prediction:
    """The forecast value, its standard deviation (1.96 of these hold 95 %), and the method with the largest weight."""

    mean: float
    sd: float
    method: str


class Spread:
    """The errors of earlier forecasts beyond those by chance."""

    def __init__(self) -> None:
        self._squares, self._noises = deque[float](maxlen=ERRORS), deque[float](maxlen=ERRORS)

    def append(self, off: float, noise: float) -> None:
        self._squares.append(off * off)
        self._noises.append(noise)

    def sd(self, noise: float, unknown_sd: float) -> float:
        """The standard deviation of the next value, whose variance by chance is `noise`.

        `unknown_sd` holds while there are few errors.
        """
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

    `refit` fits its methods; until the next fit, new values only update their state. `unknown` is the forecast before
    the first value.

    >>> two = Series([Reading.exactly(1.0), Reading.exactly(3.0)]).predict()
    >>> 1.0 < two.mean <= 3.0, two.sd
    (True, 1.0)
    """

    def __init__(
        self, values: Iterable[Reading] = (), span: int = SPAN, transform: Transform = PLAIN, unknown: float = 0.0
    ) -> None:
        self._readings = deque(values, maxlen=span)
        self._transform, self._unknown = transform, unknown
        self._arima = Arima(transform, span)
        self._replay(np.full(len(self._readings), np.nan))

    def append(self, reading: Reading) -> None:
        self._readings.append(reading)
        self._learn(reading)
        self._arima.append(reading)
        self._look_ahead(self._arima.next())

    def refit(self) -> None:
        """Fit again on the latest values, and judge every method by its forecasts of them."""
        self._arima = Arima(self._transform, self._readings.maxlen or SPAN)
        self._replay(self._arima.refit(self._readings))

    def predict(self, noise: float = 0.0) -> Prediction:
        """The forecast of the next value, whose variance by chance will be `noise`."""
        unknown_sd = UNKNOWN_SD * self._transform.slope(self._mean)
        with np.errstate(all="ignore"):
            sd = self._spread.sd(noise, unknown_sd)
        return Prediction(self._mean, sd if np.isfinite(sd) else unknown_sd, self._method)

    def singles(self) -> dict[str, float]:
        """The forecast of each method by itself; NaN if it has none."""
        names = [*(method.name for method in self._methods), "arima"]
        return dict(zip(names, self._forecasts.tolist(), strict=True))

    def _replay(self, by_arima: Floats) -> None:
        """Go through all values again, with an ARIMA's forecast of each."""
        self._methods: list[Method] = [Last(), Mean(), Smoothing(), WanderingLevel()]
        self._losses = np.zeros(len(self._methods) + 1)
        self._spread = Spread()
        self._forecasts, self._mean, self._method = np.full(len(self._losses), np.nan), self._unknown, Last.name
        for index, (reading, forecast) in enumerate(zip(self._readings, by_arima.tolist(), strict=True)):
            if index:
                self._look_ahead(forecast)
            self._learn(reading)
        if self._readings:
            self._look_ahead(self._arima.next())

    def _learn(self, reading: Reading) -> None:
        """Judge every method by this value, and let each learn it."""
        with np.errstate(all="ignore"):
            if np.isfinite(reading.noise) and not np.isnan(self._forecasts[0]):
                off = np.where(
                    np.isnan(self._forecasts), self._error_of_silence(reading), self._forecasts - reading.value
                )
                self._losses = FORGET * self._losses + off**2 / (reading.noise + LEAST_VARIANCE)
                self._spread.append(self._mean - reading.value, reading.noise)
            for method in self._methods:
                method.append(reading)

    def _error_of_silence(self, reading: Reading) -> float:
        """A method without a forecast is judged as if it were as far off as the worst of the others."""
        return float(np.nanmax(np.abs(self._forecasts - reading.value)))

    def _look_ahead(self, by_arima: float) -> None:
        with np.errstate(all="ignore"):
            self._forecasts = np.array([*(method.next() for method in self._methods), by_arima])
            counts = (self._losses + 1e-9) ** -POWER
            counts = np.where(np.isfinite(self._forecasts) & np.isfinite(counts), counts, 0.0)
            most, total = int(counts.argmax()), counts.sum()
            usable = np.isfinite(total) and total > 0
            counts = counts / total if usable else np.eye(len(counts))[0]
            self._mean = float(counts @ np.where(counts > 0, self._forecasts, 0.0))
        most = most if usable else 0
        self._method = self._methods[most].name if most < len(self._methods) else self._arima.name
