"""The report of a simulated run: rates, costs and how full batches were, as tables and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from isobatch.cluster.load.workloads import Floats
from isobatch.cluster.simulator.table_devices import group_names
from isobatch.cluster.simulator.tally import LaunchKey, Tally
from isobatch.optimizer.plan import Plan, Split
from isobatch.optimizer.problem import Problem
from isobatch.profiles.picture import BLUE, ORANGE, RED, plain, plain_logarithmic

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        latency = f"{report.tally.quantile_s(share) * 1e3:,.1f} ms" if report.answered else "-"
        table.add_row(f"latency p{share * 100:g}", latency)
    if promise := report.plan.promise:
        dollars, goodput_per_s = promise.cost_per_hour, report.goodput_per_s
        each = f", ${dollars / (goodput_per_s * 3.6e-3):,.2f} per million answers" if goodput_per_s else ""
        table.add_row("cost", f"${dollars:,.2f} per hour{each}")
    return table


def _fills(report: Report) -> Table:
    """One row for each split of a lane, whose pipelines launch together."""
    since_s = report.tally.launched_since_s
    title = f"splits, since {since_s:,.0f} s" if since_s else "splits"
    table = Table("blocks", "on", "launches", "batch", "mean fill", "busy", title=title)
    seconds = max(0.0, report.tally.seconds - since_s)  # while inputs arrived
    lanes = report.facts.lanes(report.plan)
    for lane in sorted(set(lanes)):
        pipelines = [each for each, its in zip(report.plan.pipelines, lanes, strict=True) if its == lane]
        for split in pipelines[0].splits:
            kind, fill = pipelines[0].placement_of(split).kind, report.fills[lanes.index(lane)][split.start]
            replicas = sum(each.placement_of(split).replicas for each in pipelines)
            busy = fill.busy_s / (seconds * replicas) if seconds else 0.0
            table.add_row(
                split.blocks_text, f"{replicas} {kind}", f"{fill.launches:,}",
                str(split.batch_size), f"{fill.share:.0%}", f"{busy:.0%}",
            )  # fmt: skip
    return table


UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))  # of the time axis, with their seconds
MANY = 3  # a run of fewer than this many of a unit is shown in the next smaller one


def draw(report: Report, slo_s: float, path: Path, changes_s: Sequence[float] = ()) -> None:
    from matplotlib.figure import Figure

    tally = report.tally
    unit_s, unit = next((each for each in UNITS if tally.seconds >= MANY * each[0]), UNITS[-1])
    at = (np.arange(len(tally.arrived)) + 0.5) * tally.seconds / len(tally.arrived) / unit_s
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    for draw_one, each in zip((_load, _latency, _lost), axes, strict=True):
        draw_one(each, at, tally, slo_s)
        for number, at_s in enumerate(changes_s):
            each.axvline(at_s / unit_s, color=RED, linewidth=0.7, alpha=0.5, label="" if number else "new plan")
        each.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
        plain(each)
    axes[-1].set_xlabel(f"simulated {unit}")
    figure.suptitle(f"{report.goodput_per_s:,.0f} inputs per second within {slo_s * 1e3:g} ms, simulated", fontsize=10)
    figure.savefig(path, dpi=120)


def _load(axes: "Axes", at: Floats, tally: Tally, slo_s: float) -> None:
    axes.fill_between(at, tally.arrived * _per_s(tally), color="#dddddd", label="arrive")
    axes.plot(at, tally.good * _per_s(tally), color=BLUE, label="answered in time")
    axes.set(ylabel="inputs per second", ylim=(0, None))


def _latency(axes: "Axes", at: Floats, tally: Tally, slo_s: float) -> None:
    axes.axhline(slo_s * 1e3, color=RED, linewidth=0.8, label="SLO")
    axes.plot(at, tally.quantiles_s(0.5) * 1e3, color=BLUE, label="p50")
    axes.plot(at, tally.quantiles_s(0.99) * 1e3, color=ORANGE, label="p99")
    axes.set(ylabel="latency (ms)", yscale="log")
    plain_logarithmic(axes.yaxis)


def _lost(axes: "Axes", at: Floats, tally: Tally, slo_s: float) -> None:
    for name, colour in (("refused", ORANGE), ("expired", RED)):
        axes.plot(at, getattr(tally, name) * _per_s(tally), color=colour, label=name)
    axes.set(ylabel="not answered, per second", ylim=(0, max(1.0, axes.get_ylim()[1])))


def _per_s(tally: Tally) -> float:
    return len(tally.arrived) / tally.seconds
