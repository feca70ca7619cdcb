"""Forecasts one day window by window, each from those before it, beside two simpler methods."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.forecast.traces import Trace
from profiles.forecast import Forecaster

Floats = NDArray[np.float64]
WARM_UP = 60  # windows before the first forecast counts: two hours


@dataclass(frozen=True)
class Backtest:
    """One day, window by window: what came (windows x cuts), and what each method had forecast."""

    trace: Trace
    actual: Floats
    forecast: Floats
    last: Floats
    mean10: Floats
    inside: float  # the share of what came that lay within the forecast's interval
    arrivals: Floats  # relative errors: forecast, last window, mean of ten

    def error(self, way: str) -> float:
        difference: Floats = np.abs(getattr(self, way) - self.actual)
        return float(difference.mean())


def backtest(trace: Trace) -> Backtest:
    """Forecast every window of the day from those before it."""
    windows = trace.windows
    seen = np.array([window.exits.survival for window in windows])
    rates = np.array([window.arrivals_per_s for window in windows])
    cuts = [block for block in range(1, seen.shape[1]) if (seen[:, block] != seen[:, block - 1]).any()]
    forecaster = Forecaster.after(windows[:WARM_UP], seen.shape[1], [cut - 1 for cut in cuts])
    said, inside, arrivals = [], [], []
    for index in range(WARM_UP, len(windows)):
        forecast = forecaster.forecast()
        said.append(np.asarray(forecast.exits.survival)[cuts])
        low, high = (np.asarray(curve)[cuts] for curve in (forecast.survival_low, forecast.survival_high))
        inside.append((low <= seen[index, cuts]) & (seen[index, cuts] <= high))
        guesses = np.array([forecast.arrivals_per_s, rates[index - 1], rates[index - 10 : index].mean()])
        arrivals.append(np.abs(guesses / rates[index] - 1))
        forecaster.observe(windows[index])
    actual = seen[WARM_UP:, cuts]
    means = np.stack([seen[index - 10 : index, cuts].mean(axis=0) for index in range(WARM_UP, len(seen))])
    last = seen[WARM_UP - 1 : -1, cuts]
    return Backtest(trace, actual, np.array(said), last, means, float(np.mean(inside)), np.array(arrivals))
