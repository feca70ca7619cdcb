"""A simulated application with its controller, which is the same control loop as in service, in virtual time."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.control_loop import ControlLoop, Spent
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.decide import plan_change
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.cluster.controller.promise_keeper import PromiseKeeper
from isobatch.cluster.controller.record import Event, Events
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import Chunks, Simulation, World
from isobatch.cluster.simulator.table_devices import TableDevices
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer.plan import Plan
from isobatch.profiles.windows import History

LOOK_EVERY_S = 30.0  # instead of 5 s, because a look takes milliseconds and a simulated day would have 17,280
PATIENCE = Patience(look_every_s=LOOK_EVERY_S)


class Simulated:
    """A simulation as the application that the controller leads. New replicas take `start_s`."""

    def __init__(self, simulation: Simulation, start_s: float) -> None:
        self._simulation, self._start_s = simulation, start_s
        self.plans = [(0.0, simulation.plan)]  # that ran, and since when

    async def observe(self, devices: bool = True) -> Observed:
        return self._simulation.observe()

    async def plan(self) -> Plan:
        return self._simulation.plan

    async def roll_out(self, plan: Plan) -> None:
        if plan_change(self._simulation.plan, plan).starts:
            self._simulation.run_until(self._simulation.now_s + self._start_s)
        self._simulation.follow(plan)
        self.plans.append((self._simulation.now_s, plan))


@dataclass(frozen=True)
class Replanned:
    """The report of a finished run, the plans that ran and since when, and the controller's events and effort in it."""

    report: Report
    plans: tuple[tuple[float, Plan], ...]
    events: tuple[Event, ...]
    spent: Spent

    @property
    def changes(self) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.what in ("rolled out", "rolled back"))


def replan(
    world: World,
    problem: ClassifierPlanningProblem,
    inputs: Chunks,
    seconds: float,
    *,
    seed: int = 0,
    patience: Patience = PATIENCE,
    progress: Callable[[float], None] = lambda at_s: None,
    keeper: PromiseKeeper | None = None,
    devices: Callable[..., TableDevices] = TableDevices,
) -> Replanned:
    """Run until every input has ended, with a controller that starts without any history."""
    simulation = Simulation(world, inputs, seconds, seed, devices)
    controller = Controller(problem, patience, History(None), Events(None), world.plan, 0.0, keeper=keeper)
    application = Simulated(simulation, patience.start_s)
    loop = ControlLoop(application, controller, lambda: simulation.now_s, time.process_time, report=lambda event: None)
    asyncio.run(_drive(loop, simulation, seconds, patience.react_every_s, progress))
    return Replanned(simulation.finish(), tuple(application.plans), controller.record.events.all, loop.spent)


async def _drive(
    loop: ControlLoop,
    simulation: Simulation,
    seconds: float,
    every_s: float,
    progress: Callable[[float], None],
) -> None:
    while simulation.now_s + every_s <= seconds:
        simulation.run_until(simulation.now_s + every_s)
        await loop.step()
        progress(simulation.now_s)
