"""Measures how many more inputs are in time if the rule of admission is chosen in hindsight, on the same inputs.

A rule admits all inputs, or refuses an input if a certain number of inputs is inside.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np

from isobatch.cluster.load.workloads import arrivals, exit_blocks
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import Simulation, World
from isobatch.deployments.dispatch.admission import soonest
from isobatch.deployments.dispatch.batching import Ticket
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Place, Refusal
from isobatch.profiles.exits import ExitProfile

LOADS = (1.0, 1.2, 2.0)  # of what the plan promises
SHARES = (
    0.4,
    0.6,
    0.8,
    1.0,
)  # the limits of inputs inside, over the promised rate times the SLO
INPUTS = 3000


class Hindsight(NamedTuple):
    """At one load: the gain of the best rule, as a share, and the share of admitted inputs that were late."""

    gain: float
    late: float


class CappedDispatcher(Dispatcher):
    """Admits an input if fewer inputs than a limit are inside."""

    def __init__(self, most: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._most = most

    def admit(
        self, now_s: float, deadline_s: float, place: Place, weight: int = 1, full: bool = False
    ) -> Ticket | Refusal:
        if self.inside >= self._most:
            return Refusal("too many inside", 0.0)
        return self._add(*soonest(self._open, now_s, weight), deadline_s, place, weight, full)


def hindsight(world: World, promised_per_s: float, seed: int) -> list[Hindsight]:
    """The hindsight of this plan at each load."""
    inside = world.slo_s * promised_per_s
    caps = [inf, *(max(1.0, share * inside) for share in SHARES)]
    result = []
    for load in LOADS:
        ours = _run(world, load * promised_per_s, seed, Dispatcher)
        best = max(_run(world, load * promised_per_s, seed, partial(CappedDispatcher, most)).good for most in caps)
        late = ours.answered - ours.good + ours.expired
        result.append(Hindsight(best / max(1, ours.good) - 1, late / max(1, ours.arrived - ours.refused)))
    return result


def _run(world: World, rate: float, seed: int, dispatcher: Callable[..., Dispatcher]) -> Report:
    seconds = INPUTS / rate
    times_s = arrivals("poisson", rate, seconds, seed)
    depths = exit_blocks(ExitProfile(world.facts.survival), len(times_s), np.random.default_rng(seed))
    return Simulation(world, [(times_s, depths)], seconds, seed, dispatcher=dispatcher).finish()
