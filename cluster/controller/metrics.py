"""What the controller tells Prometheus, through Ray."""

import asyncio
from collections.abc import Callable

from cluster.controller.loop import ControlLoop
from deployments.metrics import CONTROLLER, MetricSeries

EVERY_S = 1.0  # Ray tells a gauge only where it was set since the last time


async def export(loop: Callable[[], ControlLoop | None]) -> None:
    """Export until cancelled; works only inside a replica of Serve."""
    from ray.serve import metrics

    series = MetricSeries(CONTROLLER, metrics)
    while True:
        if running := loop():
            await asyncio.to_thread(tell, series, running)  # what a decoder's plan sustains is played
        await asyncio.sleep(EVERY_S)


def tell(series: MetricSeries, loop: ControlLoop) -> None:
    controller = loop.controller
    series.total("isobatch_controller_looks", loop.spent.looks + loop.spent.windows)
    for what, count in loop.decided.items():
        series.total("isobatch_controller_decisions", count, what=what)
    series.now("isobatch_controller_paused", float(controller.record.paused))
    series.now("isobatch_controller_sustains_per_s", controller.sustained(controller.running))
    if forecast := controller.beliefs.forecast:
        bounds = {"low": forecast.survival_low, "mean": forecast.exits.survival, "high": forecast.survival_high}
        for bound, survival in bounds.items():
            for block, share in enumerate(survival):
                series.now("isobatch_forecast_survival", share, block=str(block), bound=bound)
