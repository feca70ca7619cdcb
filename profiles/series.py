"""The next value of one series: ARIMA where it fits, something simpler where it does not, and never an exception."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
T = TypeVar("T")
Order = tuple[int, int, int]

# All difference once: survival and load wander, and only orders of one differencing can be compared by AICc.
ORDERS: tuple[Order, ...] = ((0, 1, 1), (1, 1, 1), (0, 1, 2), (2, 1, 1))
SPAN = 240  # values that a fit looks back on: eight hours of two-minute windows
ENOUGH_FOR_ARIMA = 30
ENOUGH_FOR_SMOOTHING = 4
WEIGHTS = np.linspace(0.05, 1.0, 20)  # of the newest value, that smoothing tries
UNKNOWN_SD = 1.0  # of a series too short to judge by


@dataclass(frozen=True)
class Prediction:
    """The next value, how far it may be off (one standard deviation), and which method says so."""

    mean: float
    sd: float
    method: str


class Series:
    """One series of real numbers, forecast one step ahead.

    `refit` chooses the order of the ARIMA; until the next one, new values only move its state.

    >>> Series([1.0, 3.0]).predict()
    Prediction(mean=3.0, sd=1.0, method='last')
    """

    def __init__(self, values: Iterable[float] = (), span: int = SPAN) -> None:
        self._values = [float(value) for value in values][-span:]
        self._span = span
        self._fit: Any = None  # statsmodels' results, or None where ARIMA does not apply

    def append(self, value: float) -> None:
        """Take in the next value that was seen."""
        self._values = [*self._values[1 - self._span :], float(value)]
        if self._fit is not None:
            self._fit = _quietly(lambda: self._fit.append([float(value)], refit=False))

    def refit(self) -> None:
        """Choose the order anew and fit it, on the latest values."""
        values = np.asarray(self._values)
        orders = ORDERS if len(values) >= ENOUGH_FOR_ARIMA and _varies(values) else ()
        fits = [_quietly(partial(_arima, values, order)) for order in orders]
        self._fit = min((fit for fit in fits if fit is not None), key=lambda fit: float(fit.aicc), default=None)

    def predict(self) -> Prediction:
        """The next value, by the best method that the history allows."""
        values = np.asarray(self._values)
        return _quietly(lambda: self._by_arima(values)) or _quietly(lambda: smoothed(values)) or last(values)

    def _by_arima(self, values: Floats) -> Prediction | None:
        if self._fit is None:
            return None
        step = self._fit.get_forecast(1)
        mean, sd = float(step.predicted_mean[0]), float(step.se_mean[0])
        reach = float(np.ptp(values))
        plausible = values.min() - reach <= mean <= values.max() + reach and np.isfinite(sd)
        p, d, q = self._fit.model.order
        return Prediction(mean, sd, f"arima({p},{d},{q})") if plausible else None


def smoothed(values: Floats) -> Prediction | None:
    """Simple exponential smoothing, with the weight that would have predicted this series best.

    >>> smoothed(np.array([2.0, 2.0, 2.0, 2.0]))
    Prediction(mean=2.0, sd=0.0, method='smoothing')
    """
    if len(values) < ENOUGH_FOR_SMOOTHING:
        return None
    level = np.full(len(WEIGHTS), values[0])
    squares = np.zeros(len(WEIGHTS))
    for value in values[1:]:
        squares += (value - level) ** 2
        level += WEIGHTS * (value - level)
    best = int(np.argmin(squares))
    mean, sd = float(level[best]), float(np.sqrt(squares[best] / (len(values) - 1)))
    return Prediction(mean, sd, "smoothing") if np.isfinite([mean, sd]).all() else None


def last(values: Floats) -> Prediction:
    """The last value again; 0 where none was seen yet."""
    return Prediction(float(values[-1]) if len(values) else 0.0, UNKNOWN_SD, "last")


def _varies(values: Floats) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.ptp(values) > 1e-9 * max(1.0, float(np.abs(values).max())))


def _arima(values: Floats, order: Order) -> Any:
    """Fitted by Hannan-Rissanen: a few regressions, five to ten times faster than maximum likelihood."""
    from statsmodels.tsa.arima.model import ARIMA  # half a second of imports that most commands do not need

    fit = ARIMA(values, order=order, trend="n").fit(method="hannan_rissanen")
    return fit if np.isfinite(fit.aicc) else None


def _quietly(attempt: Callable[[], T]) -> T | None:
    """What `attempt` returns, or None when it fails: numerical code fails in too many ways to name them all."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return attempt()
        except Exception:
            return None
