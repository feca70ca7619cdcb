"""The panels of the dashboard and the alerts, in one table each: what is asked of Prometheus, and why."""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["reqps", "ms", "percentunit", "short", "binBps"]
OURS = '{application=~"$application"}'  # the application that is chosen above the panels


@dataclass(frozen=True)
class Query:
    ask: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    about: str
    unit: Unit
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Alert:
    name: str
    when: str
    for_: str  # how long that must hold, as Prometheus writes it
    severity: Literal["page", "ticket"]
    sentence: str


def _rate(metric: str, by: str = "", over: str = "$__rate_interval") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{OURS}[{over}]))"


def _quantile(share: float, of: str = "latency") -> Query:
    ask = f"histogram_quantile({share}, {_rate(f'ray_isobatch_{of}_ms_bucket', 'le')})"
    return Query(ask, f"p{share * 100:g}")


def _fill(by: str) -> str:
    return f"{_rate('ray_isobatch_launched_weight_total', by)} / {_rate('ray_isobatch_launched_room_total', by)}"


PANELS = (
    Panel(
        "Goodput",
        "Inputs a second: asked for, answered within their deadline, and what the plan promises.",
        "reqps",
        (
            Query(_rate("ray_isobatch_arrived_inputs_total"), "asked"),
            Query(_rate("ray_isobatch_in_time_inputs_total"), "answered in time"),
            Query(f"max(ray_isobatch_promised_per_s{OURS})", "the plan promises"),
        ),
    ),
    Panel("Latency", "Of answered requests.", "ms", (_quantile(0.5), _quantile(0.95), _quantile(0.99))),
    Panel(
        "Requests",
        "What became of them.",
        "reqps",
        (Query(_rate("ray_isobatch_requests_total", "outcome"), "{{outcome}}"),),
    ),
    Panel(
        "Fill",
        "How full launches are. Constant batch size means: the same at every depth.",
        "percentunit",
        (Query(_fill("group, block"), "{{group}} from block {{block}}"),),
    ),
    Panel(
        "Waiting",
        "Inputs that wait for a launch.",
        "short",
        (Query(f"sum by (group, block) (ray_isobatch_waiting_inputs{OURS})", "{{group}} from block {{block}}"),),
    ),
    Panel(
        "Replicas",
        "Those that a front can reach. A group without any is one that nothing passes.",
        "short",
        (Query(f"min by (group) (ray_isobatch_replicas{OURS})", "{{group}}"),),
    ),
    Panel(
        "Exits",
        "The share of inputs that leaves after each block.",
        "percentunit",
        (
            Query(
                f"{_rate('ray_isobatch_exits_total', 'block')} / ignoring (block) group_left "
                f"{_rate('ray_isobatch_exits_total')}",
                "block {{block}}",
            ),
        ),
    ),
    Panel(
        "Forecast of survival",
        "The share of inputs that the controller expects at each block in the next window.",
        "percentunit",
        (Query('max by (block) (ray_isobatch_forecast_survival{bound="mean"})', "block {{block}}"),),
    ),
    Panel(
        "Disagreement",
        "The share of answers that are not the full network's, as audits tell: estimate and interval.",
        "percentunit",
        (
            Query(f"max by (bound) (ray_isobatch_disagreement{OURS})", "{{bound}} since the start"),
            Query(f"max by (bound) (ray_isobatch_disagreement_lately{OURS})", "{{bound}} in ten minutes"),
        ),
    ),
    Panel(
        "Hidden states",
        "Bytes a second that came to the front (by_value), or were held where they were computed.",
        "binBps",
        (Query(_rate("ray_isobatch_survivor_bytes_total", "way"), "{{way}}"),),
    ),
    Panel(
        "Decisions",
        "Of the controller, in an hour.",
        "short",
        (Query("sum by (what) (increase(ray_isobatch_controller_decisions_total[1h]))", "{{what}}"),),
    ),
    Panel(
        "Levels",
        "Answers by the level of a cascade, and those for whose next level there was no time.",
        "reqps",
        (
            Query(_rate("ray_isobatch_level_answers_total", "level"), "level {{level}}"),
            Query(_rate("ray_isobatch_degraded_answers_total", "level"), "level {{level}}, degraded"),
        ),
    ),
    Panel(
        "Tokens",
        "Of decoders, a second: those of prompts, and those that were written.",
        "short",
        (
            Query(_rate("ray_isobatch_prompt_tokens_total"), "of prompts"),
            Query(_rate("ray_isobatch_written_tokens_total"), "written"),
        ),
    ),
    Panel(
        "Time to the first token",
        "Of decoders: from when a text was asked for.",
        "ms",
        (_quantile(0.5, "ttft"), _quantile(0.95, "ttft"), _quantile(0.99, "ttft")),
    ),
    Panel(
        "Time from one token to the next",
        "Of decoders: the mean of each text.",
        "ms",
        (_quantile(0.5, "tpot"), _quantile(0.95, "tpot"), _quantile(0.99, "tpot")),
    ),
    Panel(
        "Sequences on replicas",
        "Of decoders: residents, the share of pages that they take, and how many are put out for want of pages.",
        "short",
        (
            Query(f"sum(ray_isobatch_residents{OURS})", "residents"),
            Query(
                f'sum(ray_isobatch_pages{{state="used", application=~"$application"}}) / sum(ray_isobatch_pages{OURS})',
                "pages used",
            ),
            Query(_rate("ray_isobatch_preempted_total"), "put out a second"),
        ),
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
