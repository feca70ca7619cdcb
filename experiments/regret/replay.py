"""Replays every case with the real controller, then with each plan that stays, on the same inputs."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import repeat

from rich.console import Console

from experiments.regret.suite import SLO_S, ReplayedTrace, inputs, question, start
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.rehearsal import replan
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.optimizer import Plan

MOST_BESIDE = 6  # plans that never ran
console = Console(stderr=True, width=140)


@dataclass(frozen=True)
class ControlledRun:
    """A run under the controller: its answers in time, its changes in words, and the plans that could have stayed."""

    good: int
    changes: tuple[str, ...]
    plans: tuple[Plan, ...]


def play(cases: Sequence[ReplayedTrace], cores: Executor) -> dict[str, float]:
    """The regret of each case. Cases with the most inputs begin, so that no core ends alone with a long one."""
    ordered = sorted(cases, key=lambda case: -case.percent)
    return {
        case.name: _regret(case, run, cores) for case, run in zip(ordered, cores.map(controlled, ordered), strict=True)
    }


def _regret(case: ReplayedTrace, run: ControlledRun, cores: Executor) -> float:
    best = max(cores.map(good_of, repeat(case), run.plans))
    result = lost_share(run.good, best)
    for sentence in run.changes:
        console.print(f"{case.name}, {sentence}")
    console.print(f"{case.name}: {len(run.plans)} plans that stay, {len(run.changes)} changes, regret {result:.2%}")
    return result


def lost_share(good: int, best: int) -> float:
    """The share of the best fixed plan's answers in time that is lost; below 0 where more inputs are in time.

    >>> lost_share(98, 100), lost_share(17, 16), lost_share(0, 0)
    (0.02, -0.0625, 0.0)
    """
    return (best - good) / best if best else 0.0


def controlled(case: ReplayedTrace) -> ControlledRun:
    problem, (first, facts) = question(), start()
    run = replan(World(first, facts, SLO_S), problem, [inputs(case)], case.seconds, patience=Patience())
    ran = [each for event in run.changes for each in (event.before, event.after) if each]
    changes = tuple(f"{event.at_s:.0f} s, {event.what}: {event.why}" for event in run.changes)
    return ControlledRun(run.report.good, changes, plans_that_stay([first, *ran], problem.considered))


def plans_that_stay(ran: Iterable[Plan], considered: Sequence[Plan]) -> tuple[Plan, ...]:
    """All plans that ran; of the other plans that the controller considered, one of each of the most frequent shapes.

    A controller considers dozens of plans that hardly differ, and each is simulated for the whole time.
    """
    result = dict.fromkeys(plan.unpromised for plan in ran)
    shapes = Counter(shape(each) for each in considered if shape(each) not in set(map(shape, result)))
    for frequent, _ in shapes.most_common(MOST_BESIDE):
        result[next(each for each in considered if shape(each) == frequent).unpromised] = None
    return tuple(result)


def shape(plan: Plan) -> Hashable:
    """Cuts and devices, without batch sizes and ramps, which always differ a little."""
    return tuple(
        (placement.kind, placement.replicas, split.start, split.stop)
        for pipeline in plan.pipelines
        for placement in pipeline.placements
        for split in placement.splits
    )


def good_of(case: ReplayedTrace, plan: Plan) -> int:
    """The answers in time where this plan stays."""
    _, facts = start()
    return simulate(World(plan, facts, SLO_S), [inputs(case)], case.seconds).good
