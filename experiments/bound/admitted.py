"""Who is refused though there was time, and who is admitted and late, in one random problem.

Whether there was time is found by replay: the same inputs come again, and one of those that were refused is let in. It
may be in time and take the place of another, so it is also counted how many are in time of all.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from cluster.load.workloads import arrivals, exit_blocks
from cluster.simulator.report import Report
from cluster.simulator.simulation import Simulation, World
from deployments.dispatch.admission import soonest
from deployments.dispatch.batching import Ticket
from deployments.dispatch.dispatcher import Dispatcher
from deployments.dispatch.messages import Fault, Outcome, Place, Refusal
from experiments.planner.random_problems import random_problem
from optimizer.model.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.search.exact import search
from profiles.exits import ExitProfile

LOADS = (0.5, 0.85, 1.0, 1.3)  # of what the plan promises
TIMES = (1.5, 4.0)  # the SLO, times what the fastest plan takes
INPUTS, REPLAYED = 2000, 8  # of each problem at each load; and of those who were refused there
ROUNDING_S = 1e-9
WARM = 0.2  # the share of a run's inputs before which nobody is replayed


@dataclass
class Replayed:
    """Inputs of some problems."""

    replayed: int = 0  # of those who were refused
    in_time: int = 0  # of those who were replayed
    gained: int = 0  # how many more were in time of all, summed over replays
    admitted: int = 0
    late: int = 0  # of those who were admitted

    def __add__(self, other: "Replayed") -> "Replayed":
        each = zip(astuple(self), astuple(other), strict=True)
        return Replayed(*(mine + theirs for mine, theirs in each))


@dataclass
class Watched:
    """The one of those who are refused, by its number, that is let in; and what became of it."""

    which: int
    refused: int = 0  # until now
    ticket: Ticket | None = None
    due_s: float = 0.0
    in_time: bool = False


class InsistentDispatcher(Dispatcher):
    """Lets in one of those whom it refuses."""

    def __init__(self, watched: Watched, clock: Callable[[], float], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._watched, self._clock = watched, clock

    def admit(
        self, now_s: float, deadline_s: float, place: Place, weight: int = 1, full: bool = False
    ) -> Ticket | Refusal:
        result, watched = super().admit(now_s, deadline_s, place, weight, full), self._watched
        if not isinstance(result, Refusal):
            return result
        watched.refused += 1
        if watched.refused - 1 != watched.which:
            return result
        watched.due_s = deadline_s
        watched.ticket = self._add(*soonest(self._open, now_s, weight), deadline_s, place, weight, full)
        return watched.ticket

    def _end(self, tickets: Iterable[Ticket], outcome: Outcome, reason: str = "", fault: Fault | None = None) -> None:
        ending, watched = list(tickets), self._watched
        if any(ticket is watched.ticket and not ticket.ended for ticket in ending):
            watched.in_time = outcome is Outcome.ANSWERED and self._clock() <= watched.due_s + ROUNDING_S
        super()._end(ending, outcome, reason, fault)


def replayed(seed: int) -> Replayed:
    """The inputs of one problem."""
    result = Replayed()
    for world, rate in _cases(seed):
        _add(result, world, rate, seed)
    return result


def _cases(seed: int) -> Iterator[tuple[World, float]]:
    """A random problem's plan at an SLO that is tight or not, at several loads."""
    facts = random_problem(seed)
    fastest = search(facts, Objective(goal="latency"))
    if fastest is None:
        return
    times = np.random.default_rng([seed, 1]).uniform(*TIMES)
    slo_s = float(times * evaluate(fastest, facts).latency_s)
    plan = search(facts, Objective(slo_s=slo_s))
    if plan is None:
        return
    for load in LOADS:
        yield World(plan, facts, slo_s), load * evaluate(plan, facts).goodput_per_s


def _add(result: Replayed, world: World, rate: float, seed: int) -> None:
    report, watched = _run(world, rate, seed)
    result.admitted += report.arrived - report.refused
    result.late += report.answered - report.good + report.expired
    first, last = int(WARM * watched.refused), watched.refused - 1
    for which in np.unique(np.linspace(first, last, REPLAYED).astype(int)).tolist() if watched.refused else ():
        again, let_in = _run(world, rate, seed, which)
        result.replayed += 1
        result.in_time += let_in.in_time
        result.gained += again.good - report.good


def _run(world: World, rate: float, seed: int, which: int = -1) -> tuple[Report, Watched]:
    """A run; the one of this number of those who would be refused is let in."""
    seconds, watched = INPUTS / rate, Watched(which)
    times_s = arrivals("poisson", rate, seconds, seed)
    depths = exit_blocks(ExitProfile(world.facts.survival), len(times_s), np.random.default_rng(seed))
    simulation = Simulation(
        world, [(times_s, depths)], seconds, seed,
        dispatcher=lambda *arguments: InsistentDispatcher(watched, lambda: simulation.now_s, *arguments),
    )  # fmt: skip
    return simulation.finish(), watched
