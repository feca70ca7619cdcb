"""What is told of a controller: as JSON over HTTP, from which `isobatch status` makes its tables."""

from typing import Any

from cluster.controller.core import Core
from cluster.controller.events import Event
from cluster.controller.loop import Controller
from deployments.planning import summary
from profiles.forecast import Forecast

EVENTS = 20


def told(controller: Controller, now_s: float) -> dict[str, Any]:
    """Numbers that are not known yet are null."""
    core, effort = controller.core, controller.effort
    return {
        "schema_version": 1,
        "now_s": now_s,
        "paused": core.record.paused,
        "plan": _plan(core),
        "window": _window(core, now_s),
        "devices": core.present.counts,
        "forecast": _forecast(core.beliefs.forecast),
        "survival": list(core.beliefs.survival),
        "corrections": core.corrections.told,
        "events": [brief(event) for event in core.record.events.all[-EVENTS:]],
        "effort": {
            "windows": effort.windows,
            "ms_per_window": 1e3 * effort.window_s / effort.windows if effort.windows else None,
            "looks": effort.looks,
            "ms_per_look": 1e3 * effort.look_s / effort.looks if effort.looks else None,
        },
        "trouble": controller.trouble,
    }


def brief(event: Event) -> dict[str, Any]:
    """An event with its plans in words."""
    fields = event.as_json()
    del fields["corrections"]
    return fields | {
        "before": summary(event.before),
        "after": None if event.after is None else summary(event.after),
    }


def _plan(core: Core) -> dict[str, Any]:
    promise = core.running.promise
    return {
        "summary": summary(core.running),
        "devices": core.running.devices(),
        "ramps": list(core.running.ramps),
        "promised_per_s": promise.goodput_per_s if promise else None,
        "promised_ms": 1e3 * promise.latency_s if promise else None,
        "sustains_per_s": core.sustained(core.running),
        "kept": core.record.kept(core.running),
    }


def _window(core: Core, now_s: float) -> dict[str, Any]:
    seen = core.seen()
    quantiles_s = {share: seen.quantile_s(share) for share in (0.5, 0.99)}
    return {
        "seconds": seen.seconds,
        "ends_in_s": max(0.0, core.began_s + core.patience.replan_every_s - now_s),
        "arrivals_per_s": seen.arrivals_per_s,
        "goodput_per_s": seen.goodput_per_s,
        "p50_ms": None if quantiles_s[0.5] is None else 1e3 * quantiles_s[0.5],
        "p99_ms": None if quantiles_s[0.99] is None else 1e3 * quantiles_s[0.99],
    }


def _forecast(forecast: Forecast | None) -> dict[str, Any] | None:
    if forecast is None:
        return None
    return {
        "survival": list(forecast.exits.survival),
        "low": list(forecast.survival_low),
        "high": list(forecast.survival_high),
        "arrivals_per_s": forecast.arrivals_per_s,
        "arrivals_low_per_s": forecast.arrivals_low_per_s,
        "arrivals_high_per_s": forecast.arrivals_high_per_s,
        "method": forecast.method,
    }
