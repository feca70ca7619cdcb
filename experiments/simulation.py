"""`isobatch simulate`, behind the command line: a configuration and a workload in, a table and a picture out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.progress import Progress
from rich.table import Table

from cluster.controller.config import ControllerConfig
from cluster.controller.corrections import Corrections
from cluster.controller.live import question
from cluster.controller.question import Question
from deployments.config import AppConfig
from deployments.dispatch.messages import EARLY_S, Limits
from deployments.graph import profile_of, read_graph
from experiments.devices import Troubles
from experiments.host import Host
from experiments.replanned import Replanned, replan
from experiments.simulator import World, simulate
from experiments.tally import Report
from experiments.traces import trace
from experiments.wishes import read_exits, shares_of
from experiments.workloads import Floats, Ints, Mix, arrivals, exit_blocks
from profiles.errors import UserError
from profiles.exits import ExitProfile

DEPTHS = 2  # a stream of random numbers of its own


@dataclass(frozen=True)
class Load:
    """What comes: a process or a trace at a mean rate, for so long; a trace may keep its own rate."""

    rate_per_s: float | None
    seconds: float
    process: str = "poisson"
    cv: float = 3.0
    trace: Path | None = None
    seed: int = 0
    mix: str = ""  # share of easy inputs over time, as SECONDS:SHARE,...
    drifts: bool = False
    exits: Path | None = None  # recorded: after which block each input was sure

    def times_s(self) -> Floats:
        if self.trace:
            return trace(self.trace, self.rate_per_s, self.seconds, self.seed)
        if self.rate_per_s is None:
            raise UserError("give --rate, or --trace to follow a trace at its own rate")
        return arrivals(self.process, self.rate_per_s, self.seconds, self.seed, self.cv)


def world(config: AppConfig, troubles: Troubles, host: Host | None = None) -> World:
    if config.profile is None or (config.plan is None and not isinstance(config.devices, dict)):
        raise UserError("args: a simulation needs profile (of isobatch profile), and plan or devices: KIND: COUNT")
    graph = read_graph(config)
    limits = Limits(backlog=config.max_waiting, early_s=EARLY_S if host else 0.0)
    return World(graph.plan, graph.facts, config.slo_ms / 1e3, limits, troubles, host, config.front_replicas)


def steered_world(config: AppConfig, controller: ControllerConfig, here: World) -> tuple[World, Question]:
    """The same with all that the controller may plan with, and what it will ask the planner."""
    asked = question(controller, config, profile_of(config))
    return replace(here, facts=asked.facts(here.facts.survival, Corrections())), asked


def run_steered(here: World, asked: Question, load: Load) -> Replanned:
    """The same with a controller that may change the plan."""
    inputs = _inputs(here, load)
    with Progress(transient=True) as progress:
        task = progress.add_task("simulating", total=load.seconds)
        return replan(
            here, asked, inputs, load.seconds, seed=load.seed,
            progress=lambda at_s: progress.update(task, completed=at_s),
        )  # fmt: skip


def run(here: World, load: Load) -> Report:
    """With a progress bar: simulated time is what advances."""
    inputs = _inputs(here, load)
    with Progress(transient=True) as progress:
        task = progress.add_task("simulating", total=load.seconds)
        return simulate(here, inputs, load.seconds, load.seed, lambda at_s: progress.update(task, completed=at_s))


def _inputs(here: World, load: Load) -> Iterator[tuple[Floats, Ints]]:
    """As they were recorded; or as easy and hard as the mix says; or as the profile says."""
    times_s, profile = load.times_s(), ExitProfile(here.facts.survival)
    if load.exits:
        recorded = read_exits(load.exits, here.facts.num_blocks)
        return iter([(times_s, np.resize(recorded, len(times_s)))])
    mix = Mix.of(profile, shares_of(load.mix), load.drifts) if load.mix else None
    random = np.random.default_rng([load.seed, DEPTHS])
    parts = np.array_split(times_s, max(1, len(times_s) >> 16))
    return ((each, mix.exit_blocks(each, random) if mix else exit_blocks(profile, len(each), random)) for each in parts)


def decisions(replanned: Replanned) -> Table:
    """What the controller changed, and why."""
    table = Table("at", "", "why", "promised", "seen", title=f"{len(replanned.changes)} changes of plan")
    for event in replanned.changes:
        gains = ("" if gain is None else f"{gain:+.1%}" for gain in (event.gain_promised, event.gain_seen))
        table.add_row(f"{event.at_s:,.0f} s", event.what, event.why, *gains)
    return table


def tables(report: Report, here: World) -> tuple[Table, Table]:
    return _summary(report, here), _fills(report, here)


def _summary(report: Report, here: World) -> Table:
    table = Table("", "", title=f"{report.tally.seconds:,.0f} s simulated", show_header=False)
    arrived = max(1, report.arrived)
    table.add_row("arrived", f"{report.arrived:,} ({report.arrived / report.tally.seconds:,.1f} per second)")
    table.add_row(f"goodput (within {here.slo_s * 1e3:g} ms)", f"{report.goodput_per_s:,.1f} per second")
    for name in ("good", "refused", "expired", "failed"):
        count = getattr(report, name)
        table.add_row(name, f"{count:,} ({count / arrived:.2%})")
    table.add_row("answered late", f"{report.answered - report.good:,}")
    for share in (0.5, 0.9, 0.99, 0.999):
        table.add_row(f"latency p{share * 100:g}", f"{report.tally.quantile_s(share) * 1e3:,.1f} ms")
    if promise := here.plan.promise:
        table.add_row("cost", _cost(promise.cost_per_hour, report.goodput_per_s))
    return table


def _cost(dollars_per_hour: float, goodput_per_s: float) -> str:
    each = f", ${dollars_per_hour / (goodput_per_s * 3.6e-3):,.2f} per million answers" if goodput_per_s else ""
    return f"${dollars_per_hour:,.2f} per hour{each}"


def _fills(report: Report, here: World) -> Table:
    table = Table("blocks", "on", "launches", "batch", "mean fill", "busy", title="splits")
    for lane, fills in zip(here.plan.lanes, report.fills, strict=True):
        for split in lane.splits:
            placement, fill = lane.placement_of(split), fills[split.start]
            busy = fill.busy_s / (report.tally.seconds * placement.replicas)
            table.add_row(
                f"{split.start}..{split.stop - 1}", f"{placement.replicas} {placement.kind}", f"{fill.launches:,}",
                str(split.batch_size), f"{fill.share:.0%}", f"{busy:.0%}",
            )  # fmt: skip
    return table
