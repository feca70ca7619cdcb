"""The report of a simulated run: rates, costs and how full batches were, as tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rich.table import Table

from isobatch.cluster.simulator.table_devices import group_names
from isobatch.cluster.simulator.tally import LaunchKey, Tally
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.plan import Plan, Split
from isobatch.optimizer.problem import Problem


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
        return self.tally.answered

    @property
    def refused(self) -> int:
        return int(self.tally.refused.sum())

    @property
    def expired(self) -> int:
        return int(self.tally.expired.sum())

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
        tally = report.tally
        arrived_per_s, good_per_s = tally.arrived_weight / tally.seconds, tally.good_weight / tally.seconds
        each = f"{tally.arrived_weight / arrived:.1f} a text (planned: {length})"
        table.add_row("tokens", f"{arrived_per_s:,.0f} per second arrived, {good_per_s:,.0f} in time; {each}")
    for name in ("good", "refused", "expired"):
        count = getattr(report, name)
        table.add_row(name, f"{count:,} ({count / arrived:.2%})")
    table.add_row("answered late", f"{report.answered - report.good:,}")
    if audits := sum(report.tally.audited):
        table.add_row("audited to the end", f"{audits:,} ({audits / arrived:.2%})")
    for share in (0.5, 0.9, 0.99, 0.999):
        table.add_row(f"latency p{share * 100:g}", f"{report.tally.quantile_s(share) * 1e3:,.1f} ms")
    if promise := report.plan.promise:
        dollars, goodput_per_s = promise.cost_per_hour, report.goodput_per_s
        each = f", ${dollars / (goodput_per_s * 3.6e-3):,.2f} per million answers" if goodput_per_s else ""
        table.add_row("cost", f"${dollars:,.2f} per hour{each}")
    return table


def _fills(report: Report) -> Table:
    since_s = report.tally.launched_since_s
    title = f"splits, since {since_s:,.0f} s" if since_s else "splits"
    table = Table("blocks", "on", "launches", "batch", "mean fill", "busy", title=title)
    seconds = max(0.0, report.tally.seconds - since_s)  # while inputs arrived
    for pipeline, fills in zip(report.plan.pipelines, report.fills, strict=True):
        for split in pipeline.splits:
            placement, fill = pipeline.placement_of(split), fills[split.start]
            busy = fill.busy_s / (seconds * placement.replicas) if seconds else 0.0
            table.add_row(
                split.blocks_text, f"{placement.replicas} {placement.kind}", f"{fill.launches:,}",
                str(split.batch_size), f"{fill.share:.0%}", f"{busy:.0%}",
            )  # fmt: skip
    return table
