"""The state of a controller: as JSON, from which `isobatch status` makes its tables, and as metrics for Prometheus.

The schemas describe all answers of controllers and arbiters for OpenAPI; tests compare them with the answers.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from isobatch.cluster.controller.control_loop import ControlLoop
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.record import Action, Event
from isobatch.cluster.controller.sentences import promised_per_s, shortfall
from isobatch.deployments.front.schemas import Schema
from isobatch.deployments.metrics import CONTROLLER, MetricSeries
from isobatch.deployments.planning import summary
from isobatch.profiles.agreement import agreement_text

STATUS_VERSION = 1  # grows when a field of `/status` changes its meaning or is removed; new fields leave it


class PlanStatus(Schema):
    """The plan that runs."""

    summary: str
    devices: dict[str, int]
    ramps: list[int] = Field(description="The open ramps, by their blocks.")
    promised_per_s: float | None = Field(description="Goodput.")
    promised_ms: float | None = Field(
        description="Of an input that stays to the last block while every launch is full; of texts: the first token."
    )
    simulated_p50_ms: float | None = Field(description="By the simulator, at the promised rate; null: not simulated.")
    simulated_p99_ms: float | None
    simulated_in_time: float | None = Field(description="The share of all inputs.")
    sustains_per_s: float = Field(description="Estimated goodput, by measured launches and by the answers under load.")
    shortfall: str | None = Field(description="Why that is less than was promised, as text.")
    kept: float = Field(description="The share of the estimated goodput that plans reach under load.")


class WindowStatus(Schema):
    """The counts of the window that has not ended."""

    seconds: float
    ends_in_s: float
    arrivals_per_s: float
    length: int | None = Field(description="Tokens of an input, where the plan counts tokens.")
    tokens_per_text: float | None
    goodput_per_s: float
    p50_ms: float | None
    p99_ms: float | None


class ForecastStatus(Schema):
    """The forecast of the next window, with its bounds `low` and `high`."""

    survival: list[float]
    low: list[float]
    high: list[float]
    arrivals_per_s: float
    arrivals_low_per_s: float
    arrivals_high_per_s: float
    tokens_per_text: float | None = Field(description="How long texts will be, where the plan counts tokens.")
    method: str


class EventStatus(Schema):
    """One decision, with its plans as text."""

    number: int
    at_s: float = Field(description="Seconds since 1970.")
    what: Action
    why: str
    before: str
    after: str | None = Field(description="None where the plan stayed.")
    forced: bool = Field(description="The plan before had lost devices.")
    gain_promised: float | None
    gain_seen: float | None = Field(description="Measured against the estimate for the plan before.")
    took_s: float | None
    starts: int = Field(description="Replicas that had to start.")
    arrivals_per_s: float | None
    achieved_per_s: float | None = Field(description="Goodput in the window that led to it.")
    expected_per_s: float | None = Field(description="The goodput that the plan promised for these arrivals.")
    p99_ms: float | None
    worse: float = Field(description="How many times as many answers disagree as `isobatch prepare` measured.")


class EffortStatus(Schema):
    """The time that the controller itself takes."""

    windows: int
    ms_per_window: float | None
    looks: int
    ms_per_look: float | None


class ControllerStatus(Schema):
    schema_version: Literal[1]
    application: str
    promise: str = Field(description="The most that exits may lose, as text.")
    now_s: float = Field(description="Seconds since 1970.")
    paused: bool
    plan: PlanStatus
    window: WindowStatus
    agreement: str | None = Field(description="The share of answers that agree with the full network, as text.")
    devices: dict[str, int] = Field(description="The devices that plans may use now.")
    asked: str | None = Field(description="Devices requested from Ray's autoscaler that have not arrived, as text.")
    forecast: ForecastStatus | None = Field(description="None until a window has ended.")
    survival: list[float] = Field(description="The share that enters each block, of inputs that may leave at any ramp.")
    full_share: float = Field(description="The share of all inputs that ask for the whole network (`X-Full`).")
    corrections: dict[str, dict[str, float]] = Field(
        description="By kind and blocks: measured time over the table's time."
    )
    events: list[EventStatus] = Field(description="The latest 20 of this deployment, oldest first.")
    effort: EffortStatus
    trouble: str | None = Field(description="Why the last look failed.")


class FleetDecisionStatus(Schema):
    at_s: float = Field(description="Seconds since 1970.")
    why: str
    budgets: dict[str, dict[str, int]] | None = Field(description="By application; null: devices stay where they are.")


class MemberStatus(Schema):
    """An application of a fleet, as its controller answered last."""

    devices: dict[str, int] = Field(description="Those that it may use, by kind.")
    arrivals_per_s: float = Field(description="In its controller's present window.")
    goodput_per_s: float
    expected_per_s: float = Field(description="The rate for which it is given devices.")
    state: str = Field(description="What is unusual, as text; often empty.")


class FleetStatus(Schema):
    """The arbiter of a fleet."""

    applications: dict[str, MemberStatus] = Field(description="Those whose controllers have answered.")
    budgets: dict[str, dict[str, int]] = Field(description="The devices that each application may use, by kind.")
    silent: list[str] = Field(description="Applications whose controllers do not answer, and which keep their devices.")
    decisions: list[FleetDecisionStatus] = Field(description="The latest 20, oldest first.")


class PausedStatus(Schema):
    paused: bool


EVENTS = 20  # decisions that `/status` lists


def status_of(loop: ControlLoop, now_s: float) -> dict[str, Any]:
    """The state of the controller, its plan and its last decisions. Unknown numbers are null."""
    controller, spent, keeper = loop.controller, loop.spent, loop.controller.keeper
    return {
        "schema_version": STATUS_VERSION,
        "now_s": now_s,
        "paused": controller.record.paused,
        "plan": _plan(controller),
        "window": _window(controller, now_s),
        "agreement": None if keeper is None else agreement_text(keeper.recent(now_s), keeper.promised),
        "devices": controller.present.counts,
        "asked": controller.device_requests.waiting_text(now_s),
        "forecast": _forecast(controller),
        "survival": list(controller.known.estimate.survival),
        "full_share": controller.known.estimate.full_share,
        "corrections": controller.known.corrections.as_json,
        "events": [as_json(event) for event in controller.record.events.all[-EVENTS:]],
        "effort": {
            "windows": spent.windows,
            "ms_per_window": 1e3 * spent.window_s / spent.windows if spent.windows else None,
            "looks": spent.looks,
            "ms_per_look": 1e3 * spent.look_s / spent.looks if spent.looks else None,
        },
        "trouble": loop.trouble,
    }


def as_json(event: Event) -> dict[str, Any]:
    """An event with its plans as text."""
    plans = {"before": summary(event.before), "after": None if event.after is None else summary(event.after)}
    return {name: getattr(event, name) for name in EventStatus.model_fields} | plans


def _plan(controller: Controller) -> dict[str, Any]:
    running, parked, kept_share = controller.running, controller.window.parked, controller.record.kept_share
    promise = running.promise
    simulated = promise.simulated if promise else None
    sustains_per_s = controller.known.sustains_per_s(running)
    return {
        "summary": summary(running, parked),
        "devices": {} if parked else running.devices(),
        "ramps": list(running.ramps),
        "promised_per_s": promised_per_s(running) or None,
        "promised_ms": 1e3 * promise.latency_s if promise else None,
        "simulated_p50_ms": 1e3 * simulated.p50_s if simulated else None,
        "simulated_p99_ms": 1e3 * simulated.p99_s if simulated else None,
        "simulated_in_time": simulated.in_time if simulated else None,
        "sustains_per_s": sustains_per_s,
        "shortfall": shortfall(running, sustains_per_s, controller.known.corrections, kept_share) or None,
        "kept": kept_share,
    }


def _window(controller: Controller, now_s: float) -> dict[str, Any]:
    observed = controller.window.observed
    p50_s, p99_s = observed.quantile_s(0.5), observed.quantile_s(0.99)
    return {
        "seconds": observed.seconds,
        "ends_in_s": max(0.0, controller.window.began_s + controller.patience.replan_every_s - now_s),
        "arrivals_per_s": observed.arrivals_per_s,
        "length": controller.running.length,
        "tokens_per_text": observed.tokens_per_text,
        "goodput_per_s": observed.goodput_per_s,
        "p50_ms": p50_s and 1e3 * p50_s,
        "p99_ms": p99_s and 1e3 * p99_s,
    }


def _forecast(controller: Controller) -> dict[str, Any] | None:
    if (forecast := controller.known.estimate.forecast) is None:
        return None
    length = 1 if controller.running.writes_texts else controller.running.length  # in tokens, of an input
    return {
        "survival": list(forecast.exits.survival),
        "low": list(forecast.survival_low),
        "high": list(forecast.survival_high),
        "tokens_per_text": length and forecast.inputs_per_text and length * forecast.inputs_per_text,
        "arrivals_per_s": forecast.arrivals_per_s,
        "arrivals_low_per_s": forecast.arrivals_low_per_s,
        "arrivals_high_per_s": forecast.arrivals_high_per_s,
        "method": forecast.method,
    }


log = logging.getLogger(__name__)
EVERY_S = 1.0  # Ray exports a gauge only if it was set since the last export


async def export(loop: Callable[[], ControlLoop | None]) -> None:
    """Export until cancelled, inside a replica of Serve. A failure is logged once, and the next export is tried."""
    from ray.serve import metrics

    series, failed = MetricSeries(CONTROLLER, metrics), False
    while True:
        try:
            if running := loop():
                await asyncio.to_thread(_export_once, series, running)  # which may simulate texts
            failed = False
        except Exception as error:
            if not failed:
                log.warning("the metrics of the controller could not be exported: %s", error, exc_info=True)
            failed = True
        await asyncio.sleep(EVERY_S)


def _export_once(series: MetricSeries, loop: ControlLoop) -> None:
    controller = loop.controller
    series.set_total("isobatch_controller_looks", loop.spent.looks + loop.spent.windows)
    for what, count in list(loop.decided.items()):  # the loop decides meanwhile
        series.set_total("isobatch_controller_decisions", count, what=what)
    series.set("isobatch_controller_paused", float(controller.record.paused))
    series.set("isobatch_controller_sustains_per_s", controller.known.sustains_per_s(controller.running))
    if forecast := controller.known.estimate.forecast:
        bounds = {"low": forecast.survival_low, "mean": forecast.exits.survival, "high": forecast.survival_high}
        for bound, survival in bounds.items():
            for block, share in enumerate(survival):
                series.set("isobatch_forecast_survival", share, block=str(block), bound=bound)
