"""Runs `isobatch simulate`: turns a configuration and a workload into a simulated run and its report."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from rich.progress import Progress
from rich.table import Table

from cluster.controller.config import ControllerConfig
from cluster.controller.corrections import Corrections
from cluster.controller.planning import ClassifierPlanningProblem, classifier_problem
from cluster.load.traces import trace
from cluster.load.workloads import Floats, Ints, Mix, arrivals, exit_blocks
from cluster.simulator.host import HostCosts
from cluster.simulator.options import read_exits, shares_of
from cluster.simulator.replanning import Replanned, replan
from cluster.simulator.report import Report
from cluster.simulator.simulation import Chunk, World, simulate
from cluster.simulator.troubles import Troubles
from deployments.config import AppConfig
from deployments.dispatch.messages import EARLY_S
from deployments.graph import profile_of, read_graph
from optimizer.tuning import opened
from profiles.errors import UserError
from profiles.exits import ExitProfile
from profiles.lengths import read_lengths

EXITS_SEED = 2  # the random stream that exits are drawn from; the streams of a run have other numbers


@dataclass(frozen=True)
class Workload:
    """The arrivals of a run: a process or a trace at a mean rate for some time; a trace may keep its own rate."""

    rate_per_s: float | None
    seconds: float
    process: str = "poisson"
    cv: float = 3.0
    trace: Path | None = None
    seed: int = 0
    mix: str = ""  # share of easy inputs over time, as SECONDS:SHARE,...
    drifts: bool = False
    exits: Path | None = None  # recorded exits: the block after which each input was sure
    lengths: Path | None = None  # the tokens of each text, in order
    trace_each_s: float | None = None  # the seconds of each count of the trace, where its file does not say

    def times_s(self) -> Floats:
        if self.trace:
            return trace(self.trace, self.rate_per_s, self.seconds, self.seed, self.trace_each_s)
        if self.rate_per_s is None:
            raise UserError("give --rate, or --trace to follow a trace at its own rate")
        return arrivals(self.process, self.rate_per_s, self.seconds, self.seed, self.cv)


def world_of(config: AppConfig, troubles: Troubles, host: HostCosts | None = None) -> World:
    if config.profile is None or (config.plan is None and not isinstance(config.devices, dict)):
        raise UserError("args: a simulation needs profile (of isobatch profile), and plan or devices: KIND: COUNT")
    graph = read_graph(config)
    limits = replace(config.limits(share=1.0), early_s=EARLY_S if host else 0.0)
    profile, slo_s = profile_of(config), config.slo_ms / 1e3
    survival = profile.exits_of(graph.facts.length).planning_survival(opened(graph.plan))
    facts = graph.facts.surviving(survival)  # of all inputs, whether or not a ramp lets them leave
    return World(graph.plan, facts, slo_s, limits, troubles, host, config.front_replicas, profile.lengths)


def controlled_world(
    config: AppConfig, controller: ControllerConfig, world: World
) -> tuple[World, ClassifierPlanningProblem]:
    """The same world with all devices that the controller may use, and the controller's planning problem."""
    problem = classifier_problem(controller, config, profile_of(config))
    facts = problem.in_units_of(world.plan).facts(world.facts.survival, Corrections())
    return replace(world, facts=facts.surviving(world.facts.survival) if problem.answers_early else facts), problem


def run_controlled(world: World, problem: ClassifierPlanningProblem, workload: Workload) -> Replanned:
    """Simulate with a controller that may change the plan."""
    inputs = _inputs(world, workload)
    with Progress(transient=True) as progress:
        task = progress.add_task("simulating", total=workload.seconds)
        return replan(
            world, problem, inputs, workload.seconds, seed=workload.seed,
            progress=lambda at_s: progress.update(task, completed=at_s),
        )  # fmt: skip


def run(world: World, workload: Workload) -> Report:
    """Simulate with a progress bar over simulated time."""
    inputs = _inputs(world, workload)
    with Progress(transient=True) as progress:
        task = progress.add_task("simulating", total=workload.seconds)
        return simulate(
            world, inputs, workload.seconds, workload.seed, lambda at_s: progress.update(task, completed=at_s)
        )


def _inputs(world: World, workload: Workload) -> Iterator[Chunk]:
    """Chunks of arrivals, with the tokens of each input where a file gives them."""
    if not workload.lengths:
        return _arrivals(world, workload)
    if world.facts.length is None:
        why = "the plan counts inputs, not tokens: profile with --data, and plan again"
        raise UserError(f"--lengths {workload.lengths}: {why}")
    tokens = cycle(read_lengths(workload.lengths))
    return (
        (times_s, blocks, np.fromiter(islice(tokens, len(times_s)), np.int64))
        for times_s, blocks in _arrivals(world, workload)
    )


def _arrivals(world: World, workload: Workload) -> Iterator[tuple[Floats, Ints]]:
    """Chunks of arrivals, with exits as recorded, else as drawn from the mix, else as drawn from the profile."""
    times_s, profile = workload.times_s(), ExitProfile(world.facts.survival)
    if workload.exits:
        recorded = read_exits(workload.exits, world.facts.num_blocks)
        return iter([(times_s, np.resize(recorded, len(times_s)))])
    mix = Mix.of(profile, shares_of(workload.mix), workload.drifts) if workload.mix else None
    random = np.random.default_rng([workload.seed, EXITS_SEED])
    parts = np.array_split(times_s, max(1, len(times_s) >> 16))
    return ((each, mix.exit_blocks(each, random) if mix else exit_blocks(profile, len(each), random)) for each in parts)


def decisions(replanned: Replanned) -> Table:
    """A table of the plans that the controller changed to, and why."""
    table = Table("at", "", "why", "promised", "seen", title=f"{len(replanned.changes)} changes of plan")
    for event in replanned.changes:
        gains = ("" if gain is None else f"{gain:+.1%}" for gain in (event.gain_promised, event.gain_seen))
        table.add_row(f"{event.at_s:,.0f} s", event.what, event.why, *gains)
    return table
