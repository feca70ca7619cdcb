"""The metrics of the controller, exported to Prometheus through Ray."""

import asyncio
import logging
from collections.abc import Callable

from cluster.controller.loop import ControlLoop
from deployments.metrics import CONTROLLER, MetricSeries

log = logging.getLogger(__name__)
EVERY_S = 1.0  # Ray exports a gauge only if it was set since the last export


async def export(loop: Callable[[], ControlLoop | None]) -> None:
    """Export until cancelled; works only inside a replica of Serve."""
    from ray.serve import metrics

    await keep_exporting(MetricSeries(CONTROLLER, metrics), loop, EVERY_S)


async def keep_exporting(series: MetricSeries, loop: Callable[[], ControlLoop | None], every_s: float) -> None:
    """An export that fails is logged once, and the next one is tried."""
    failed = False
    while True:
        try:
            if running := loop():
                await asyncio.to_thread(export_once, series, running)  # which may simulate texts
            failed = False
        except Exception as error:
            if not failed:
                log.warning("the metrics of the controller could not be exported: %s", error, exc_info=True)
            failed = True
        await asyncio.sleep(every_s)


def export_once(series: MetricSeries, loop: ControlLoop) -> None:
    controller = loop.controller
    series.total("isobatch_controller_looks", loop.spent.looks + loop.spent.windows)
    for what, count in list(loop.decided.items()):  # the loop decides meanwhile
        series.total("isobatch_controller_decisions", count, what=what)
    series.now("isobatch_controller_paused", float(controller.record.paused))
    series.now("isobatch_controller_sustains_per_s", controller.known.sustains_per_s(controller.running))
    if forecast := controller.known.estimate.forecast:
        bounds = {"low": forecast.survival_low, "mean": forecast.exits.survival, "high": forecast.survival_high}
        for bound, survival in bounds.items():
            for block, share in enumerate(survival):
                series.now("isobatch_forecast_survival", share, block=str(block), bound=bound)
