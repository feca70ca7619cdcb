"""A simulated application with its controller: the very loop that leads a running one, in virtual time."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.controller.config import Patience
from cluster.controller.core import Core
from cluster.controller.events import Event, Events
from cluster.controller.loop import Controller, Effort
from cluster.controller.moving import moving
from cluster.controller.question import Question
from deployments.front.observed import Observed
from experiments.simulator import Inputs, Simulation, World
from experiments.tally import Report
from optimizer.plan import Plan
from profiles.history import History

LOOK_EVERY_S = 30.0  # a look costs milliseconds, and a simulated day has 17,280 times five seconds
PATIENCE = Patience(look_every_s=LOOK_EVERY_S)


class Simulated:
    """A simulation, as the controller asks for it. Replicas start in `start_s`; the old plan serves meanwhile."""

    def __init__(self, simulation: Simulation, start_s: float) -> None:
        self._simulation, self._start_s = simulation, start_s

    async def observe(self) -> Observed:
        return self._simulation.observe()

    async def plan(self) -> Plan:
        return self._simulation.plan

    async def roll_out(self, plan: Plan) -> None:
        if moving(self._simulation.plan, plan).starts:
            self._simulation.run_until(self._simulation.now_s + self._start_s)
        self._simulation.follow(plan)


@dataclass(frozen=True)
class Replanned:
    """A finished run, and what the controller did in it."""

    report: Report
    events: tuple[Event, ...]
    effort: Effort

    @property
    def changes(self) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.what in ("rolled out", "rolled back"))


def replan(
    world: World, asked: Question, inputs: Inputs, seconds: float, *, seed: int = 0, patience: Patience = PATIENCE,
    progress: Callable[[float], None] = lambda at_s: None,
) -> Replanned:  # fmt: skip
    """Run until every input has ended, under the eyes of a controller that knows nothing yet."""
    simulation = Simulation(world, inputs, seconds, seed)
    core = Core(asked, patience, History(None), Events(None), world.plan, 0.0)
    application = Simulated(simulation, patience.start_s)
    controller = Controller(application, core, lambda: simulation.now_s, time.process_time, told=lambda event: None)
    asyncio.run(_lead(controller, simulation, seconds, patience.look_every_s, progress))
    return Replanned(simulation.finish(), core.record.events.all, controller.effort)


async def _lead(
    controller: Controller,
    simulation: Simulation,
    seconds: float,
    look_every_s: float,
    progress: Callable[[float], None],
) -> None:
    while simulation.now_s + look_every_s <= seconds:
        simulation.run_until(simulation.now_s + look_every_s)
        await controller.step()
        progress(simulation.now_s)
