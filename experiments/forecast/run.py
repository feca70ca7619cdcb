"""Claim: the forecast of survival is as accurate as the best single method, and takes milliseconds.

On days of recorded arrivals and exits, each window is forecast from earlier ones. The controls are the last window
taken as forecast, and each method of the forecast alone.
"""

import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from experiments.forecast.backtest import Backtest, backtest
from experiments.forecast.traces import traces
from isobatch.profiles.forecast import Forecaster
from isobatch.profiles.series import Last
from isobatch.profiles.windows import Window

SHOWN = 1  # the day in the picture: the first network, tenants, 300 inputs a window
PICTURE = Path(__file__).parents[2] / "docs" / "forecast.png"
ENTERING = 8  # inputs per batch at the first block
BARS = 10  # windows with bars
ACTUAL, FORECAST = "#1f2933", "#2a6fbb"


def measure() -> dict[str, float]:
    days = list(traces())
    tests = [backtest(day) for day in track(days, "back-testing", console=Console(stderr=True), transient=True)]
    draw(tests[SHOWN], PICTURE)
    errors = {way: float(np.mean([test.error(way) for test in tests])) for way in ("forecast", *tests[0].singles)}
    single = {way: error for way, error in errors.items() if way != "forecast"}
    return {
        "mae_forecast": errors["forecast"],
        **{f"mae_single_{way.replace(' ', '_')}": error for way, error in single.items()},
        "mae_last": single[Last.name],
        "mae_best_single": min(single.values()),
        "inside_95_interval": float(np.mean([test.inside for test in tests])),
        "ms_12_ramps": 1000 * steady_s(ramps=12),
    }


def wandering(ramps: int, count: int, inputs: int = 5000) -> list[Window]:
    """Windows of a network with this number of ramps and wandering exits, for timing."""
    random = np.random.default_rng(0)
    level = np.cumsum(random.normal(0, 0.03, count))[:, None] + random.normal(0, 0.1, (count, ramps))
    staying = np.cumprod(1 - 1 / (1 + np.exp(2.5 - level)), axis=1)
    inside = np.hstack([np.ones((count, 1)), staying, np.zeros((count, 1))])
    lefts = (random.multinomial(inputs, chances) for chances in -np.diff(inside, axis=1))
    return [Window(120.0 * index, 120.0, inputs, tuple(map(int, left))) for index, left in enumerate(lefts)]


def steady_s(ramps: int, count: int = 48) -> float:
    """Seconds to add a window and forecast the next one: the mean over two refits of every ramp, on one thread."""
    windows = wandering(ramps, 240 + count)
    forecaster = Forecaster.after(windows[:240], ramps + 1)
    start = time.thread_time()
    for window in windows[240:]:
        forecaster.observe(window)
        forecaster.forecast()
    return (time.thread_time() - start) / count


def draw(test: Backtest, path: Path) -> None:
    """Draw forecast and reality: batch sizes at two cuts, as in figure 21 of E3, and the whole day."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 2, width_ratios=(1, 2), sharey="row")
    cuts = (0, test.actual.shape[1] // 2)
    for (bars, day), cut in zip(axes, cuts, strict=True):
        actual, forecast = (ENTERING * series[:, cut] for series in (test.actual, test.forecast))
        windows = np.arange(BARS)
        bars.bar(windows - 0.2, actual[:BARS], 0.4, label="seen", color=ACTUAL)
        bars.bar(windows + 0.2, forecast[:BARS], 0.4, label="forecast", color=FORECAST)
        day.plot(actual, label="seen", color=ACTUAL, linewidth=0.8)
        day.plot(forecast, label="forecast", color=FORECAST, linewidth=1.2)
        bars.set(ylabel=f"inputs left of {ENTERING} at cut {cut + 1}")
        day.set_title(f"mean error {np.abs(actual - forecast).mean():.2f} inputs", fontsize="medium")
    axes[0][1].legend(loc="lower right")
    axes[1][0].set(xlabel=f"the first {BARS} windows of two minutes", xticks=range(BARS))
    axes[1][1].set(xlabel="all windows of the day")
    trace = test.trace
    figure.suptitle(f"{trace.network}, mix by {trace.mix}, {trace.inputs} inputs a window")
    figure.savefig(path, dpi=110)
