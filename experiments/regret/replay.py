"""Plays every case with the real controller, then each plan that it considered, on the same inputs."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from rich.console import Console

from experiments.regret.judged import PlayedChange, Replay
from experiments.regret.suite import SLO_S, ReplayedTrace, inputs, question, start
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.rehearsal import replan
from isobatch.cluster.load.workloads import Ints
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.optimizer import Plan

HOLD_S = Patience().hold_windows * Patience().replan_every_s  # how long a plan is expected to stay right
MOST_BESIDE = 6  # plans that never ran
console = Console(stderr=True, width=140)


@dataclass(frozen=True)
class Led:
    """A run under the controller: counts by window, its changes, and the plans that stay beside it."""

    window_s: float
    arrived: Ints
    good: Ints
    changes: tuple[PlayedChange, ...]
    plans: tuple[Plan, ...]
    sentences: tuple[str, ...]  # the changes in words


def play(cases: Sequence[ReplayedTrace], cores: Executor) -> dict[str, Replay]:
    """The cases with the most inputs first, so that no core is left with them at the end."""
    ordered = sorted(cases, key=lambda case: -case.percent)
    return {case.name: _beside(case, run, cores) for case, run in zip(ordered, cores.map(led, ordered), strict=True)}


def _beside(case: ReplayedTrace, run: Led, cores: Executor) -> Replay:
    fixed = np.array(list(cores.map(stays, repeat(case), run.plans)))
    replay = Replay(run.window_s, run.arrived, run.good, fixed, run.changes, HOLD_S)
    for each in run.sentences:
        console.print(f"{case.name}, {each}")
    console.print(
        f"{case.name}: {run.arrived.sum():,} inputs, {len(run.plans)} fixed plans, {len(run.changes)} changes; regret "
        f"{replay.regret:.2%}, in the worst hour {replay.worst_hour:.2%}, {len(replay.harmed)} windows harmed, "
        f"{replay.hindsight_share:.2%} of hindsight's"
    )
    for window in replay.harmed:
        console.print(
            f"{case.name}, harmed at {window * run.window_s:.0f} s: {run.arrived[window]} came, {run.good[window]} in "
            f"time; the plan before answers {fixed[replay.judged[window], window]}"
        )
    return replay


def led(case: ReplayedTrace) -> Led:
    """One case with the controller."""
    problem, (first, facts) = question(), start()
    run = replan(World(first, facts, SLO_S), problem, [inputs(case)], case.seconds, patience=Patience())
    ran = [each for event in run.changes for each in (event.before, event.after) if each]
    plans = played([first, *ran], problem.considered)
    changes = tuple(PlayedChange(event.at_s, plans.index(event.before.unpromised)) for event in run.changes)
    tally = run.report.tally
    sentences = tuple(f"{event.at_s:.0f} s, {event.what}: {event.why}" for event in run.changes)
    return Led(case.seconds / len(tally.good), tally.arrived, tally.good, changes, plans, sentences)


def played(ran: Iterable[Plan], considered: Sequence[Plan]) -> tuple[Plan, ...]:
    """The plans that stay: all that ran, and of those that did not one of each shape, the shapes most often considered.

    Each is played for as long as the controller's own run, and a controller considers dozens that hardly differ.
    """
    result = dict.fromkeys(plan.unpromised for plan in ran)
    shapes = Counter(shape(each) for each in considered if shape(each) not in set(map(shape, result)))
    for often, _ in shapes.most_common(MOST_BESIDE):
        result[next(each for each in considered if shape(each) == often).unpromised] = None
    return tuple(result)


def shape(plan: Plan) -> Hashable:
    """Its cuts and devices; batch sizes and ramps always differ a little."""
    return tuple(
        (placement.kind, placement.replicas, split.start, split.stop)
        for pipeline in plan.pipelines
        for placement in pipeline.placements
        for split in placement.splits
    )


def stays(case: ReplayedTrace, plan: Plan) -> Ints:
    """The answers in time of each window, of the same inputs, where this plan stays."""
    _, facts = start()
    return simulate(World(plan, facts, SLO_S), [inputs(case)], case.seconds).tally.good
