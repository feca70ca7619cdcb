"""The next value of one series, by several methods at once, each weighted by its recent errors.

The interval around the forecast comes from earlier errors: the part that chance does not explain is assumed to last,
and the distribution of the errors gives the standard deviations that hold 95 % of them. Nothing in this file raises.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ArimaOrder = tuple[int, int, int]

# All difference once: survival and load wander, and AICc can only compare orders with the same differencing.
ORDERS: tuple[ArimaOrder, ...] = ((0, 1, 1), (1, 1, 1), (0, 1, 2), (2, 1, 1))
DEEPEST = 2  # the most earlier rises and errors that an order of these uses
ENOUGH_FOR_ARIMA = 30  # values: with fewer, no ARIMA is fitted
SPAN = 240  # values that a fit uses: eight hours of two-minute windows
UNSETTLED = 5  # fitted values at the start of a series, which are not used
WEIGHTS = np.linspace(0.05, 1.0, 20)  # weights of the newest value that smoothing tries
MEAN_OF = 10  # values in the mean
# Variances that the wandering level tries: of its own steps, and of jumps around it beyond chance.
STEPS, JUMPS = (grid.ravel() for grid in np.meshgrid(np.logspace(-8, 0, 17), [0.0, *np.logspace(-6, -1, 6)]))
KEEP = 0.99  # the weight of the past after one more value, when the variances are judged
FIRST_VARIANCE = 0.1  # the variance of the level after the first value


@dataclass(frozen=True)
class Reading:
    """One value of a series. `noise` is its variance by chance; infinite if nothing was observed.

    `steady` is the estimate after this value: a window with few inputs hardly moves it.
    """

    value: float
    noise: float
    steady: float

    @classmethod
    def exactly(cls, value: float) -> "Reading":
        return cls(value, 0.0, value)


# Methods: `append` learns the next value, and `next` is the forecast of the one after it, once there is a first value.


class Last:
    name = "last"

    def append(self, reading: Reading) -> None:
        self._value = reading.steady

    def next(self) -> float:
        return self._value


class Mean:
    name = f"mean of {MEAN_OF}"

    def __init__(self) -> None:
        self._values = deque[float](maxlen=MEAN_OF)

    def append(self, reading: Reading) -> None:
        self._values.append(reading.steady)

    def next(self) -> float:
        return sum(self._values) / len(self._values)


class Smoothing:
    """Simple exponential smoothing, with the weight that would have predicted this series best."""

    name = "smoothing"

    def __init__(self) -> None:
        self._levels: Floats | None = None
        self._squares = np.zeros(len(WEIGHTS))

    def append(self, reading: Reading) -> None:
        if self._levels is None:
            self._levels = np.full(len(WEIGHTS), reading.steady)
        off = reading.steady - self._levels
        self._squares += off**2
        self._levels = self._levels + WEIGHTS * off

    def next(self) -> float:
        assert self._levels is not None
        return float(self._levels[self._squares.argmin()])


class WanderingLevel:
    """A wandering level with noise: Kalman's filter at many variances, weighted by their likelihoods.

    Only this method knows the number of inputs behind a value: the fewer, the less the value moves it.
    """

    name = "level"

    def __init__(self) -> None:
        self._means: Floats | None = None
        self._variances = np.zeros(len(STEPS))
        self._likely = np.zeros(len(STEPS))  # log-likelihoods of the variances

    def append(self, reading: Reading) -> None:
        if self._means is None:
            self._means = np.full(len(STEPS), reading.value)
            self._variances += FIRST_VARIANCE
        if np.isfinite(reading.noise):
            expected = self._variances + JUMPS + (reading.noise + 1e-12)
            off, gain = reading.value - self._means, self._variances / expected
            self._likely = KEEP * self._likely - (np.log(expected) + off * off / expected) / 2
            self._means, self._variances = self._means + gain * off, self._variances * (1 - gain)
        self._variances = self._variances + STEPS

    def next(self) -> float:
        assert self._means is not None
        shares = np.exp(self._likely - self._likely.max())
        return float(shares @ self._means / shares.sum())


Method = Last | Mean | Smoothing | WanderingLevel


class Transform(NamedTuple):
    """A map to a scale without limits, as ARIMA needs it, and the way back."""

    to: Callable[[float], float]
    back: Callable[[Any], Any]
    slope: Callable[[float], float]  # the growth of a value per unit of the transformed value


PLAIN = Transform(float, np.asarray, lambda value: 1.0)


class Arima:
    """ARIMA, once differenced. statsmodels chooses and fits its order (`refit`); in between, a forecast is a sum."""

    def __init__(self, transform: Transform) -> None:
        self._transform, self._values = transform, deque[float](maxlen=SPAN)
        self._fit: Any = None  # statsmodels' results, or None where ARIMA does not apply
        self._errors = deque[float](maxlen=DEEPEST)  # the newest first

    @property
    def name(self) -> str:
        return "arima({},{},{})".format(*self._fit.model.order)

    def append(self, reading: Reading) -> None:
        value = self._transform.to(reading.steady)
        if self._fit is not None:
            self._errors.appendleft(value - self._expected())
        self._values.append(value)

    def next(self) -> float:
        """The forecast, or NaN without a fit or far outside the range of the values."""
        mean = self._expected() if self._fit is not None else np.nan
        low, high = (min(self._values), max(self._values)) if self._values else (0.0, 0.0)
        return float(self._transform.back(mean)) if 2 * low - high <= mean <= 2 * high - low else np.nan

    def refit(self, readings: Sequence[Reading]) -> Floats:
        """Choose the order again and fit it; returns its forecasts of these values, or NaN."""
        self._values.extend(self._transform.to(each.steady) for each in readings)
        values = np.asarray(self._values)
        orders = ORDERS if len(values) >= ENOUGH_FOR_ARIMA and _varies(values) else ()
        fits = [_arima(values, order) for order in orders]
        self._fit = min((fit for fit in fits if fit is not None), key=lambda fit: float(fit.aicc), default=None)
        if self._fit is None:
            return np.full(len(values), np.nan)
        self._errors.extend(self._fit.resid[: -1 - DEEPEST : -1])
        fitted = np.asarray(self._transform.back(self._fit.fittedvalues), float)
        return np.where(np.arange(len(fitted)) < UNSETTLED, np.nan, fitted)

    def _expected(self) -> float:
        newest = [self._values[-1 - back] for back in range(DEEPEST + 1)]
        rises = [late - early for late, early in pairwise(newest)]
        by_rises = sum(weight * rise for weight, rise in zip(self._fit.arparams, rises, strict=False))
        by_errors = sum(weight * error for weight, error in zip(self._fit.maparams, self._errors, strict=False))
        return float(newest[0] + by_rises + by_errors)


def _varies(values: Floats) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.ptp(values) > 1e-9 * max(1.0, float(np.abs(values).max())))


def _arima(values: Floats, order: ArimaOrder) -> Any:
    """A fit by Hannan-Rissanen: a few regressions, five to ten times faster than maximum likelihood.

    None if it fails: numerical code fails in too many ways to name them all.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            from statsmodels.tsa.arima.model import ARIMA  # half a second of imports that most commands do not need

            fit = ARIMA(values, order=order, trend="n").fit(method="hannan_rissanen")
            return fit if np.isfinite([fit.aicc, *fit.params]).all() else None
        except Exception:
            return None


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

    def __init__(self, values: Iterable[Reading] = (), transform: Transform = PLAIN, unknown: float = 0.0) -> None:
        self._readings = deque(values, maxlen=SPAN)
        self._transform, self._unknown = transform, unknown
        self._arima = Arima(transform)
        self._replay(np.full(len(self._readings), np.nan))

    def append(self, reading: Reading) -> None:
        self._readings.append(reading)
        self._learn(reading)
        self._arima.append(reading)
        self._look_ahead(self._arima.next())

    def refit(self) -> None:
        """Fit again on the latest values, and judge every method by its forecasts of them."""
        self._arima = Arima(self._transform)
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
                off = self._forecasts - reading.value
                off = np.where(
                    np.isnan(off), np.nanmax(np.abs(off)), off
                )  # without a forecast: as far off as the worst
                self._losses = FORGET * self._losses + off**2 / (reading.noise + LEAST_VARIANCE)
                self._spread.append(self._mean - reading.value, reading.noise)
            for method in self._methods:
                method.append(reading)

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
