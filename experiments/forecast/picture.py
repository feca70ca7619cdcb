"""The picture of forecast and reality: batch sizes at two cuts, as in figure 21 of E3, and the whole day."""

from pathlib import Path

import numpy as np

from experiments.forecast.backtest import Backtest

ENTERING = 8  # inputs per batch at the first block
SHOWN = 10  # how many windows have bars
ACTUAL, FORECAST = "#1f2933", "#2a6fbb"


def draw(test: Backtest, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 2, width_ratios=(1, 2), sharey="row")
    cuts = (0, test.actual.shape[1] // 2)
    for (bars, day), cut in zip(axes, cuts, strict=True):
        actual, forecast = (ENTERING * series[:, cut] for series in (test.actual, test.forecast))
        windows = np.arange(SHOWN)
        bars.bar(windows - 0.2, actual[:SHOWN], 0.4, label="seen", color=ACTUAL)
        bars.bar(windows + 0.2, forecast[:SHOWN], 0.4, label="forecast", color=FORECAST)
        day.plot(actual, label="seen", color=ACTUAL, linewidth=0.8)
        day.plot(forecast, label="forecast", color=FORECAST, linewidth=1.2)
        bars.set(ylabel=f"inputs left of {ENTERING} at cut {cut + 1}")
        day.set_title(f"mean error {np.abs(actual - forecast).mean():.2f} inputs", fontsize="medium")
    axes[0][1].legend(loc="lower right")
    axes[1][0].set(xlabel=f"the first {SHOWN} windows of two minutes", xticks=range(SHOWN))
    axes[1][1].set(xlabel="all windows of the day")
    trace = test.trace
    figure.suptitle(f"{trace.network}, mix by {trace.mix}, {trace.inputs} inputs a window")
    figure.savefig(path, dpi=110)
