"""Every metric of isobatch, in one table. Processes report them; dashboards, alerts and docs/watching.md name them."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

MetricKind = Literal["Counter", "Gauge", "Histogram"]
LATENCY_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)  # of the histograms' buckets


@dataclass(frozen=True)
class MetricFamily:
    """One metric, with the labels that distinguish its series."""

    name: str
    kind: MetricKind
    about: str
    labels: tuple[str, ...] = ()


LAUNCHES = ("isobatch_launches", "isobatch_launched_inputs", "isobatch_launched_weight", "isobatch_launched_room")
_WHERE = ("group", "block")  # the group of replicas, and the first block that a launch runs there
_REQUESTS = (
    MetricFamily("isobatch_requests", "Counter", "Requests by outcome; refused includes malformed ones.", ("outcome",)),
    MetricFamily("isobatch_latency_ms", "Histogram", "Latency of answered requests."),
)
_RUN = (
    MetricFamily("isobatch_exits", "Counter", "Inputs (LLMs: tokens) by the block after which they left.", ("block",)),
    MetricFamily("isobatch_launches", "Counter", "Launches by the group and block where they began.", _WHERE),
    MetricFamily("isobatch_launched_inputs", "Counter", "Inputs (LLMs: sequences) in those launches.", _WHERE),
    MetricFamily("isobatch_launched_weight", "Counter", "The weight of those inputs.", _WHERE),
    MetricFamily("isobatch_launched_room", "Counter", "The weight that those launches had room for.", _WHERE),
    MetricFamily("isobatch_waiting_inputs", "Gauge", "Inputs (LLMs: sequences) that wait.", _WHERE),
)

FRONT = (
    *_REQUESTS,
    MetricFamily("isobatch_arrived_inputs", "Counter", "Inputs that arrived, admitted or not."),
    MetricFamily(
        "isobatch_arrived_weight", "Counter", "Their weight: tokens if the plan counts tokens, otherwise 1 each."
    ),
    MetricFamily("isobatch_in_time_inputs", "Counter", "Inputs that were answered within their deadline."),
    MetricFamily("isobatch_promised_per_s", "Gauge", "Inputs per second that the plan promises in time; 0: nothing."),
    *_RUN,
    MetricFamily("isobatch_replicas", "Gauge", "Replicas that the front can reach.", ("group",)),
    MetricFamily("isobatch_parked", "Gauge", "1 while the application is parked."),
    MetricFamily(
        "isobatch_survivor_bytes", "Counter", "Bytes of hidden states; `by_value`: sent to the front.", ("way",)
    ),
    MetricFamily("isobatch_audits", "Counter", "Audited inputs by the result of the comparison.", ("outcome",)),
    MetricFamily(
        "isobatch_disagreement", "Gauge", "The share of answers that differ from the full network's.", ("bound",)
    ),
    MetricFamily(
        "isobatch_disagreement_lately", "Gauge", "The same over the last ten minutes; 0 to 1: unknown.", ("bound",)
    ),
    MetricFamily(
        "isobatch_promise", "Gauge", "1 for the current state of the promise: kept, broken or not watched.", ("state",)
    ),
    MetricFamily(
        "isobatch_canary_requests",
        "Counter",
        "Requests that a canary computed too, split by their inputs: kept, missed; withdrawn: 1 once it gets none.",
        ("outcome",),
    ),
    MetricFamily(
        "isobatch_level_answers", "Counter", "Answers by the level of the cascade that gave them.", ("level",)
    ),
)
CONTROLLER = (
    MetricFamily("isobatch_controller_looks", "Counter", "Times the controller has read its counts."),
    MetricFamily("isobatch_controller_decisions", "Counter", "The controller's decisions.", ("what",)),
    MetricFamily("isobatch_controller_paused", "Gauge", "1 while the controller is paused by hand."),
    MetricFamily(
        "isobatch_controller_sustains_per_s",
        "Gauge",
        "Inputs per second that the plan sustains, by launches and under load.",
    ),
    MetricFamily(
        "isobatch_forecast_survival", "Gauge", "The forecast share of inputs that reach a block.", ("block", "bound")
    ),
)
TEXT_FRONT = (
    *_REQUESTS,
    MetricFamily("isobatch_prompt_tokens", "Counter", "Tokens of the prompts."),
    MetricFamily("isobatch_written_tokens", "Counter", "Tokens that were written."),
    MetricFamily("isobatch_ttft_ms", "Histogram", "Time from a request to its first token."),
    MetricFamily("isobatch_tpot_ms", "Histogram", "Time from one token to the next, on average over a text."),
)
TEXT_REPLICA = (
    *_RUN,
    MetricFamily("isobatch_residents", "Gauge", "Sequences that have a place on a replica."),
    MetricFamily("isobatch_pages", "Gauge", "Pages of memory for keys and values, free and used.", ("state",)),
    MetricFamily("isobatch_preempted", "Counter", "Sequences that were evicted because pages ran short."),
    MetricFamily(
        "isobatch_prefix_positions",
        "Counter",
        "Positions before first tokens; `shared`: in pages of other texts already.",
        ("way",),
    ),
)
METRICS = tuple(dict.fromkeys(FRONT + CONTROLLER + TEXT_FRONT + TEXT_REPLICA))


class MetricSeries:
    """The metrics of one process. `made_by` is a module with Ray's metric classes, or others of the same names."""

    def __init__(self, families: tuple[MetricFamily, ...], made_by: Any) -> None:
        self._metrics = {family.name: _made(family, made_by) for family in families}
        self._totals: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def set_total(self, name: str, total: float, **labels: str) -> None:
        """Set a counter to its new total. Ray's counters take increments, so the difference is added."""
        series = name, *labels.values()
        if (increment := total - self._totals[series]) > 0:
            self._metrics[name].inc(increment, labels)
            self._totals[series] = total

    def inc(self, name: str, more: float, **labels: str) -> None:
        self._metrics[name].inc(more, labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._metrics[name].set(value, labels)

    def set_launches(self, group: str, block: int, count: int, inputs: int, weight: int, room: int) -> None:
        """Set the totals of the launches of one group from one block on."""
        for name, total in zip(LAUNCHES, (count, inputs, weight, room), strict=True):
            self.set_total(name, total, group=group, block=str(block))

    def observe(self, name: str, value: float) -> None:
        self._metrics[name].observe(value)


def _made(family: MetricFamily, made_by: Any) -> Any:
    bounds = [list(LATENCY_BOUNDS_MS)] if family.kind == "Histogram" else []
    return getattr(made_by, family.kind)(family.name, family.about, *bounds, family.labels)
