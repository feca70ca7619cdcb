"""Methods to forecast the next value of a series. Each learns from every value."""

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
T = TypeVar("T")
ArimaOrder = tuple[int, int, int]

# All difference once: survival and load wander, and AICc can only compare orders with the same differencing.
ORDERS: tuple[ArimaOrder, ...] = ((0, 1, 1), (1, 1, 1), (0, 1, 2), (2, 1, 1))
DEEPEST = 2  # the most earlier rises and errors that an order of these uses
ENOUGH_FOR_ARIMA = 30  # values: with fewer, no ARIMA is fitted
UNSETTLED = 5  # fitted values at the start of a series, which are not used
WEIGHTS = np.linspace(0.05, 1.0, 20)  # weights of the newest value that smoothing tries
MEAN_OF = 10  # values in the mean
# Variances that the wandering level tries: of its own steps, and of jumps around it beyond chance.
STEPS, JUMPS = (grid.ravel() for grid in np.meshgrid(np.logspace(-8, 0, 17), [0.0, *np.logspace(-6, -1, 6)]))
FORGET = 0.99  # the weight of the past after one more value, when the variances are judged
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


class Method(Protocol):
    """One method. It is not asked for a forecast before the first value."""

    @property
    def name(self) -> str: ...

    def append(self, reading: Reading) -> None:
        """Learn the next value."""

    def next(self) -> float:
        """The forecast of the next value."""


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
            self._likely = FORGET * self._likely - (np.log(expected) + off * off / expected) / 2
            self._means, self._variances = self._means + gain * off, self._variances * (1 - gain)
        self._variances = self._variances + STEPS

    def next(self) -> float:
        assert self._means is not None
        shares = np.exp(self._likely - self._likely.max())
        return float(shares @ self._means / shares.sum())


class Transform(NamedTuple):
    """A map to a scale without limits, as ARIMA needs it, and the way back."""

    to: Callable[[float], float]
    back: Callable[[Any], Any]
    slope: Callable[[float], float]  # the growth of a value per unit of the transformed value


PLAIN = Transform(float, np.asarray, lambda value: 1.0)


class Arima:
    """ARIMA, once differenced. statsmodels chooses and fits its order (`refit`); in between, a forecast is a sum."""

    def __init__(self, transform: Transform, span: int) -> None:
        self._transform, self._values = transform, deque[float](maxlen=span)
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
        fits = [_quietly(partial(_arima, values, order)) for order in orders]
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
    """A fit by Hannan-Rissanen: a few regressions, five to ten times faster than maximum likelihood."""
    from statsmodels.tsa.arima.model import ARIMA  # half a second of imports that most commands do not need

    fit = ARIMA(values, order=order, trend="n").fit(method="hannan_rissanen")
    return fit if np.isfinite([fit.aicc, *fit.params]).all() else None


def _quietly(attempt: Callable[[], T]) -> T | None:
    """The result of `attempt`, or None if it fails: numerical code fails in too many ways to name them all."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return attempt()
        except Exception:
            return None
