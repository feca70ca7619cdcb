"""Every metric that isobatch has, in one table: the processes tell them, and dashboards, alerts and pages name them."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

MetricKind = Literal["Counter", "Gauge", "Histogram"]
LATENCY_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
OF_SERVE = ("application", "deployment", "replica")  # labels that Serve adds to each series


@dataclass(frozen=True)
class MetricFamily:
    """One metric, with the labels that tell its series apart."""

    name: str
    kind: MetricKind
    about: str
    labels: tuple[str, ...] = ()

    @property
    def scraped(self) -> tuple[str, ...]:
        """What Ray calls it where Prometheus reads it.

        >>> MetricFamily("isobatch_requests", "Counter", "").scraped
        ('ray_isobatch_requests_total',)
        """
        ends = {"Counter": ("_total",), "Gauge": ("",), "Histogram": ("_bucket", "_sum", "_count")}
        return tuple(f"ray_{self.name}{end}" for end in ends[self.kind])


_WHERE = ("group", "block")  # the group of replicas, and the first block that a launch runs there
_ASKED = (
    MetricFamily("isobatch_requests", "Counter", "Requests by what became of them.", ("outcome",)),
    MetricFamily("isobatch_latency_ms", "Histogram", "What answered requests took."),
)
_RUN = (
    MetricFamily("isobatch_exits", "Counter", "Inputs, of a decoder tokens, by the block they left after.", ("block",)),
    MetricFamily("isobatch_launches", "Counter", "Launches by where they began.", _WHERE),
    MetricFamily("isobatch_launched_inputs", "Counter", "Inputs, of a decoder sequences, in those launches.", _WHERE),
    MetricFamily("isobatch_launched_weight", "Counter", "What they weigh.", _WHERE),
    MetricFamily("isobatch_launched_room", "Counter", "What would have had room in those launches.", _WHERE),
    MetricFamily("isobatch_waiting_inputs", "Gauge", "Inputs, of a decoder sequences, that wait.", _WHERE),
)

FRONT = (
    *_ASKED,
    MetricFamily("isobatch_arrived_inputs", "Counter", "Inputs that asked, admitted or not."),
    MetricFamily("isobatch_arrived_weight", "Counter", "What they weigh: tokens, where the plan counts them, or 1."),
    MetricFamily("isobatch_in_time_inputs", "Counter", "Inputs that were answered within their deadline."),
    MetricFamily("isobatch_promised_per_s", "Gauge", "Inputs per second that the plan promises in time; 0: nothing."),
    *_RUN,
    MetricFamily("isobatch_replicas", "Gauge", "Replicas that the front can reach.", ("group",)),
    MetricFamily("isobatch_survivor_bytes", "Counter", "Hidden states: `by_value` came to the front.", ("way",)),
    MetricFamily("isobatch_audits", "Counter", "Inputs that ran on to the end, by what came out.", ("outcome",)),
    MetricFamily("isobatch_disagreement", "Gauge", "The share of answers unlike the full network's.", ("bound",)),
    MetricFamily(
        "isobatch_disagreement_lately", "Gauge", "The same of the last ten minutes; 0 to 1: unknown.", ("bound",)
    ),
    MetricFamily("isobatch_promise", "Gauge", "1 for what is known of it: kept, broken or not watched.", ("state",)),
    MetricFamily("isobatch_level_answers", "Counter", "Answers by the level of a cascade.", ("level",)),
    MetricFamily("isobatch_degraded_answers", "Counter", "Answers without the next level of it.", ("level",)),
)
CONTROLLER = (
    MetricFamily("isobatch_controller_looks", "Counter", "How often the controller looked."),
    MetricFamily("isobatch_controller_decisions", "Counter", "Its decisions.", ("what",)),
    MetricFamily("isobatch_controller_paused", "Gauge", "1 while it changes nothing, by hand."),
    MetricFamily("isobatch_controller_sustains_per_s", "Gauge", "What the plan sustains, by launches and under load."),
    MetricFamily("isobatch_forecast_survival", "Gauge", "The share that will reach a block.", ("block", "bound")),
)
DECODER_FRONT = (
    *_ASKED,
    MetricFamily("isobatch_prompt_tokens", "Counter", "Tokens of the prompts that were written on from."),
    MetricFamily("isobatch_written_tokens", "Counter", "Tokens that were written."),
    MetricFamily("isobatch_ttft_ms", "Histogram", "From when a text was asked for to its first token."),
    MetricFamily("isobatch_tpot_ms", "Histogram", "From one token to the next, on average over a text."),
)
DECODER_REPLICA = (
    *_RUN,
    MetricFamily("isobatch_residents", "Gauge", "Sequences that have a place on a replica."),
    MetricFamily("isobatch_pages", "Gauge", "Pages of memory for keys and values.", ("state",)),
    MetricFamily("isobatch_preempted", "Counter", "Sequences that were put out as pages ran short."),
)
METRICS = tuple(dict.fromkeys(FRONT + CONTROLLER + DECODER_FRONT + DECODER_REPLICA))


class MetricSeries:
    """The metrics of one process. `made_by` has Ray's classes, or others of the same names."""

    def __init__(self, families: tuple[MetricFamily, ...], made_by: Any) -> None:
        self._metrics = {family.name: _made(family, made_by) for family in families}
        self._told: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def total(self, name: str, total: float, **labels: str) -> None:
        """Add what came since the last time, as Ray's counters take increments."""
        series = name, *labels.values()
        if (more := total - self._told[series]) > 0:
            self._metrics[name].inc(more, labels)
            self._told[series] = total

    def more(self, name: str, more: float, **labels: str) -> None:
        """So much came now."""
        self._metrics[name].inc(more, labels)

    def now(self, name: str, value: float, **labels: str) -> None:
        self._metrics[name].set(value, labels)

    def value(self, name: str, value: float) -> None:
        """One more value of a histogram."""
        self._metrics[name].observe(value)


def _made(family: MetricFamily, made_by: Any) -> Any:
    make = getattr(made_by, family.kind)
    if family.kind == "Histogram":
        return make(family.name, family.about, list(LATENCY_BOUNDS_MS), family.labels)
    return make(family.name, family.about, family.labels)
