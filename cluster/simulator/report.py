"""The report of a simulated run: rates, costs and how full batches were, and the tables that the command prints."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rich.table import Table

from cluster.simulator.table_devices import group_names
from cluster.simulator.tally import LaunchKey, Tally
from optimizer.model.evaluate import evaluate
from optimizer.plan import Plan, Split
from optimizer.problem import Problem


@dataclass(frozen=True)
class SplitFill:
    """How full the launches of one split were."""

    batch: int
    launches: int = 0
    inputs: int = 0
    busy_s: float = 0.0

    @property
    def share(self) -> float:
        """The mean number of inputs per launch, as a share of the full batch."""
        return self.inputs / (self.launches * self.batch) if self.launches else 0.0


@dataclass(frozen=True)
class Report:
    """A finished run. Rates are per second of simulated time."""

    tally: Tally = field(repr=False)
    plan: Plan  # the last plan of the run
    facts: Problem = field(repr=False)

    @cached_property
    def fills(self) -> tuple[dict[int, SplitFill], ...]:
        """The fill of every split of every pipeline since the last plan runs, in order of their first blocks."""
        names, launched = iter(group_names(self.plan, self.facts)), self.tally.new_launches
        return tuple(
            {
                split.start: _fill(split, name, launched)
                for placement, name in zip(pipeline.placements, names, strict=False)
                for split in placement.splits
            }
            for pipeline in self.plan.pipelines
        )

    @property
    def filled_s(self) -> float:
        """The time since the last plan runs, while inputs arrived: the fills are of this time."""
        return max(0.0, self.tally.seconds - self.tally.launched_since_s)

    @property
    def cost_per_hour(self) -> float:
        return evaluate(self.plan, self.facts).cost_per_hour

    @property
    def arrived(self) -> int:
        return int(self.tally.arrived.sum())

    @property
    def good(self) -> int:
        return int(self.tally.good.sum())

    @property
    def answered(self) -> int:
        return int(self.tally.answered.sum())

    @property
    def refused(self) -> int:
        return int(self.tally.refused.sum())

    @property
    def degraded(self) -> int:
        """The number of answers that an earlier level of a cascade gave, as there was no time for the next."""
        return int(self.tally.degraded.sum())

    @property
    def expired(self) -> int:
        return int(self.tally.expired.sum())

    @property
    def failed(self) -> int:
        return int(self.tally.failed.sum())

    @property
    def goodput_per_s(self) -> float:
        return self.good / self.tally.seconds

    @property
    def good_share(self) -> float:
        return self.good / self.arrived if self.arrived else 1.0


def _fill(split: Split, group: str, launched: Mapping[LaunchKey, tuple[float, float]]) -> SplitFill:
    rows = [
        (size, *took)
        for (name, _, start, stop, size), took in launched.items()
        if name == group and (start, stop) == (split.start, split.stop)
    ]
    launches, inputs = sum(int(times) for _, times, _ in rows), sum(int(size * times) for size, times, _ in rows)
    return SplitFill(split.batch_size, launches, inputs, sum(seconds for *_, seconds in rows))


def tables(report: Report, slo_s: float) -> tuple[Table, Table]:
    return _summary(report, slo_s), _fills(report)


def _summary(report: Report, slo_s: float) -> Table:
    table = Table("", "", title=f"{report.tally.seconds:,.0f} s simulated", show_header=False)
    arrived = max(1, report.arrived)
    table.add_row("arrived", f"{report.arrived:,} ({report.arrived / report.tally.seconds:,.1f} per second)")
    table.add_row(f"goodput (within {slo_s * 1e3:g} ms)", f"{report.goodput_per_s:,.1f} per second")
    if length := report.facts.length:
        table.add_row("tokens", _tokens(report, length))
    for name in ("good", *(["degraded"] if report.degraded else []), "refused", "expired", "failed"):
        count = getattr(report, name)
        table.add_row(name, f"{count:,} ({count / arrived:.2%})")
    table.add_row("answered late", f"{report.answered - report.good:,}")
    if audits := sum(report.tally.audited):
        table.add_row("audited to the end", f"{audits:,} ({audits / arrived:.2%})")
    for share in (0.5, 0.9, 0.99, 0.999):
        table.add_row(f"latency p{share * 100:g}", f"{report.tally.quantile_s(share) * 1e3:,.1f} ms")
    if promise := report.plan.promise:
        table.add_row("cost", _cost(promise.cost_per_hour, report.goodput_per_s))
    return table


def _tokens(report: Report, length: int) -> str:
    tally = report.tally
    arrived, good = tally.arrived_weight / tally.seconds, tally.good_weight / tally.seconds
    each = tally.arrived_weight / max(1, report.arrived)
    return f"{arrived:,.0f} per second arrived, {good:,.0f} in time; {each:.1f} a text (planned: {length})"


def _cost(dollars_per_hour: float, goodput_per_s: float) -> str:
    each = f", ${dollars_per_hour / (goodput_per_s * 3.6e-3):,.2f} per million answers" if goodput_per_s else ""
    return f"${dollars_per_hour:,.2f} per hour{each}"


def _fills(report: Report) -> Table:
    since_s = report.tally.launched_since_s
    title = f"splits, since {since_s:,.0f} s" if since_s else "splits"
    table, seconds = Table("blocks", "on", "launches", "batch", "mean fill", "busy", title=title), report.filled_s
    for pipeline, fills in zip(report.plan.pipelines, report.fills, strict=True):
        for split in pipeline.splits:
            placement, fill = pipeline.placement_of(split), fills[split.start]
            busy = fill.busy_s / (seconds * placement.replicas) if seconds else 0.0
            table.add_row(
                split.blocks_text, f"{placement.replicas} {placement.kind}", f"{fill.launches:,}",
                str(split.batch_size), f"{fill.share:.0%}", f"{busy:.0%}",
            )  # fmt: skip
    return table
