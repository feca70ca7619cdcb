"""A Grafana dashboard and alerts for Prometheus, as files that `isobatch dashboards` makes of the tables here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

OURS = '{application=~"$application"}'  # the application that is chosen above the panels
WIDTH, HEIGHT = 12, 8  # of a panel; Grafana's rows are 24 wide
SOURCE = {"type": "prometheus", "uid": "${source}"}
PROMETHEUS = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


@dataclass(frozen=True)
class Panel:
    title: str
    about: str
    unit: Literal["reqps", "ms", "percentunit", "short", "binBps"]
    queries: Mapping[str, str]  # what is asked of Prometheus, by the legend of its lines


@dataclass(frozen=True)
class Alert:
    name: str
    when: str
    for_: str  # how long that must hold, as Prometheus writes it
    severity: Literal["page", "ticket"]
    sentence: str


def _rate(metric: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{OURS}[$__rate_interval]))"


def _quantiles(of: str) -> dict[str, str]:
    buckets = _rate(f"ray_isobatch_{of}_ms_bucket", "le")
    return {f"p{share * 100:g}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.95, 0.99)}


_EXITS, _ROOM, _PAGES = "ray_isobatch_exits_total", "ray_isobatch_launched_room_total", "ray_isobatch_pages"

PANELS = (
    Panel(
        "Goodput",
        "Inputs a second: asked for, answered within their deadline, and what the plan promises.",
        "reqps",
        {
            "asked": _rate("ray_isobatch_arrived_inputs_total"),
            "answered in time": _rate("ray_isobatch_in_time_inputs_total"),
            "the plan promises": f"max(ray_isobatch_promised_per_s{OURS})",
        },
    ),
    Panel("Latency", "Of answered requests.", "ms", _quantiles("latency")),
    Panel(
        "Requests",
        "What became of them.",
        "reqps",
        {"{{outcome}}": _rate("ray_isobatch_requests_total", "outcome")},
    ),
    Panel(
        "Fill",
        "How full launches are. Constant batch size means: the same at every depth.",
        "percentunit",
        {
            "{{group}} from block {{block}}": _rate("ray_isobatch_launched_weight_total", "group, block")
            + f" / {_rate(_ROOM, 'group, block')}"
        },
    ),
    Panel(
        "Waiting",
        "Inputs that wait for a launch.",
        "short",
        {"{{group}} from block {{block}}": f"sum by (group, block) (ray_isobatch_waiting_inputs{OURS})"},
    ),
    Panel(
        "Replicas",
        "Those that a front can reach. No input passes a group without replicas.",
        "short",
        {"{{group}}": f"min by (group) (ray_isobatch_replicas{OURS})"},
    ),
    Panel(
        "Exits",
        "The share of inputs that leaves after each block.",
        "percentunit",
        {"block {{block}}": f"{_rate(_EXITS, 'block')} / ignoring (block) group_left {_rate(_EXITS)}"},
    ),
    Panel(
        "Forecast of survival",
        "The share of inputs that the controller expects at each block in the next window.",
        "percentunit",
        {"block {{block}}": 'max by (block) (ray_isobatch_forecast_survival{bound="mean"})'},
    ),
    Panel(
        "Disagreement",
        "The share of answers that are not the full network's, by audits: estimate and interval.",
        "percentunit",
        {
            "{{bound}} since the start": f"max by (bound) (ray_isobatch_disagreement{OURS})",
            "{{bound}} in ten minutes": f"max by (bound) (ray_isobatch_disagreement_lately{OURS})",
        },
    ),
    Panel(
        "Hidden states",
        "Bytes a second that came to the front (by_value), or were held where they were computed.",
        "binBps",
        {"{{way}}": _rate("ray_isobatch_survivor_bytes_total", "way")},
    ),
    Panel(
        "Decisions",
        "Of the controller, in an hour.",
        "short",
        {"{{what}}": "sum by (what) (increase(ray_isobatch_controller_decisions_total[1h]))"},
    ),
    Panel(
        "Levels",
        "Answers by the level of a cascade, and those for whose next level there was no time.",
        "reqps",
        {
            "level {{level}}": _rate("ray_isobatch_level_answers_total", "level"),
            "level {{level}}, degraded": _rate("ray_isobatch_degraded_answers_total", "level"),
        },
    ),
    Panel(
        "Tokens",
        "Of decoders, a second: those of prompts, and those that were written.",
        "short",
        {
            "of prompts": _rate("ray_isobatch_prompt_tokens_total"),
            "written": _rate("ray_isobatch_written_tokens_total"),
        },
    ),
    Panel("Time to the first token", "Of decoders: from when a text was asked for.", "ms", _quantiles("ttft")),
    Panel("Time from one token to the next", "Of decoders: the mean of each text.", "ms", _quantiles("tpot")),
    Panel(
        "Sequences on replicas",
        "Of decoders: residents, the share of pages that they take, and how many are put out for want of pages.",
        "short",
        {
            "residents": f"sum(ray_isobatch_residents{OURS})",
            "pages used": f'sum({_PAGES}{{state="used", application=~"$application"}}) / sum({_PAGES}{OURS})',
            "put out a second": _rate("ray_isobatch_preempted_total"),
        },
    ),
)


def _of_all(metric: str) -> str:
    return f"sum by (application) (rate({metric}[5m]))"


_GOODPUT, _ASKED = _of_all("ray_isobatch_in_time_inputs_total"), _of_all("ray_isobatch_arrived_inputs_total")
_PROMISED = "max by (application) (ray_isobatch_promised_per_s)"
_LOOKS = "ray_isobatch_controller_looks_total"

ALERTS = (
    Alert(
        "IsobatchGoodputBelowPromise",
        f"{_GOODPUT} < 0.95 * {_PROMISED} and {_GOODPUT} < 0.95 * {_ASKED}",
        "10m",
        "page",
        "{{ $labels.application }} answers fewer in time than its plan promises, though more ask.",
    ),
    Alert(
        "IsobatchRefuses",
        'sum by (application) (rate(ray_isobatch_requests_total{outcome="refused"}[5m])) > '
        f"0.05 * {_of_all('ray_isobatch_requests_total')}",
        "5m",
        "page",
        "{{ $labels.application }} refuses more than one request in twenty.",
    ),
    Alert(
        "IsobatchFails",
        'sum by (application) (rate(ray_isobatch_requests_total{outcome="failed"}[5m])) > '
        f"0.001 * {_of_all('ray_isobatch_requests_total')}",
        "5m",
        "page",
        "The network of {{ $labels.application }}, or its replicas, fail for one request in a thousand.",
    ),
    Alert(
        "IsobatchGroupIsEmpty",
        "min by (application, group) (ray_isobatch_replicas) == 0",
        "2m",
        "page",
        "{{ $labels.application }}: group {{ $labels.group }} has no replica.",
    ),
    Alert(
        "IsobatchLaunchesAreNotFull",
        f"{_of_all('ray_isobatch_launched_weight_total')} / {_of_all('ray_isobatch_launched_room_total')} < 0.6 "
        f"and {_ASKED} > 0.8 * {_PROMISED} and {_PROMISED} > 0",
        "15m",
        "ticket",
        "{{ $labels.application }} has launches that are not full, though it is loaded: its plan is for other inputs.",
    ),
    Alert(
        "IsobatchControllerIsSilent",
        f"sum by (application) (increase({_LOOKS}[10m])) == 0 or (max by (application) "
        f"(present_over_time({_LOOKS}[1d])) unless max by (application) (present_over_time({_LOOKS}[10m])))",
        "5m",
        "ticket",
        "The controller {{ $labels.application }} does not look any more: /controller/status says why.",
    ),
    Alert(
        "IsobatchRollsBackOften",
        'sum by (application) (increase(ray_isobatch_controller_decisions_total{what="rolling back"}[2h])) >= 3',
        "0m",
        "ticket",
        "The controller {{ $labels.application }} takes back what it changes: its tables, or its forecast, are wrong.",
    ),
    Alert(
        "IsobatchAnswersDisagree",
        'ray_isobatch_disagreement_lately{bound="low"} > 0.02',
        "10m",
        "ticket",
        "More than 2 % of the answers of {{ $labels.application }} are not the full network's, and that is sure.",
    ),
    Alert(
        "IsobatchPromiseBroken",
        'max by (application) (ray_isobatch_promise{state="broken"}) == 1',
        "0m",
        "ticket",
        "{{ $labels.application }} breaks its promise of agreement with the full network: /stats says by how much.",
    ),
)


def files() -> dict[str, str]:
    return {
        "dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
        "alerts.yaml": yaml.safe_dump(rules(), sort_keys=False, width=120),
    }


def dashboard() -> dict[str, Any]:
    """To be imported in Grafana (Dashboards, New, Import); it asks which Prometheus is meant."""
    return {
        "uid": "isobatch",
        "title": "isobatch",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [PROMETHEUS, _application()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def rules() -> dict[str, Any]:
    return {"groups": [{"name": "isobatch", "rules": [_rule(alert) for alert in ALERTS]}]}


def _application() -> dict[str, Any]:
    return {
        "name": "application",
        "label": "Application",
        "type": "query",
        "datasource": SOURCE,
        "query": {
            "query": 'label_values({__name__=~"ray_isobatch_(promised_per_s|residents)"}, application)',
            "refId": "application",
        },
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, 24 // WIDTH)
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.about,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": ask, "legendFormat": legend}
            for place, (legend, ask) in enumerate(panel.queries.items())
        ],
    }


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.when,
        "for": alert.for_,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.sentence},
    }
