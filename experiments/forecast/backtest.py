"""Forecasts each window of a day from earlier windows, with the forecast and with each of its methods alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.forecast.traces import Trace
from isobatch.profiles.forecast import Forecaster
from isobatch.profiles.series import Last

Floats = NDArray[np.float64]
WARM_UP = 60  # windows before the first forecast counts: two hours


@dataclass(frozen=True)
class Backtest:
    """The windows of a day: their survival (windows x cuts), and the forecast of each method."""

    trace: Trace
    actual: Floats
    forecast: Floats
    singles: dict[str, Floats]  # each method alone
    inside: float  # the share of values inside the forecast's interval

    def error(self, way: str) -> float:
        """The mean error of the forecast, or of one method."""
        forecasts = self.singles.get(way, self.forecast)
        return float(np.abs(forecasts - self.actual).mean())


def backtest(trace: Trace) -> Backtest:
    """Forecast every window of the day from earlier ones."""
    windows = trace.windows
    seen = np.array([window.exits.survival for window in windows])
    cuts = [block for block in range(1, seen.shape[1]) if (seen[:, block] != seen[:, block - 1]).any()]
    forecaster = Forecaster.after(windows[:WARM_UP], seen.shape[1], [cut - 1 for cut in cuts])
    forecasts, inside = [], []
    alone: dict[str, list[Floats]] = {}
    for index in range(WARM_UP, len(windows)):
        forecast = forecaster.forecast()
        forecasts.append(np.asarray(forecast.exits.survival)[cuts])
        for way, values in _alone(forecaster).items():
            alone.setdefault(way, []).append(values)
        low, high = (np.asarray(curve)[cuts] for curve in (forecast.survival_low, forecast.survival_high))
        inside.append((low <= seen[index, cuts]) & (seen[index, cuts] <= high))
        forecaster.observe(windows[index])
    actual = seen[WARM_UP:, cuts]
    singles = {way: np.array(values) for way, values in alone.items()}
    return Backtest(trace, actual, np.array(forecasts), singles, float(np.mean(inside)))


def _alone(forecaster: Forecaster) -> dict[str, Floats]:
    """By method: its value for every cut; the last window's value where the method has none."""
    cuts = forecaster.singles()
    forecasts = {way: np.array([cut[way] for cut in cuts]) for way in cuts[0]}
    return {way: np.where(np.isnan(values), forecasts[Last.name], values) for way, values in forecasts.items()}
