"""A simulated application with its controller, which is the same control loop as in service, in virtual time."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from isobatch.cluster.controller.arbiter import Arbiter
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


@dataclass(frozen=True)
class Member:
    """An application of a simulated fleet. The facts of its world have all devices of the fleet."""

    world: World
    problem: ClassifierPlanningProblem
    inputs: Chunks


def replan_fleet(
    members: Mapping[str, Member],
    seconds: float,
    arbiter: Arbiter | None,
    *,
    seed: int = 0,
    patience: Patience = PATIENCE,
    progress: Callable[[float], None] = lambda at_s: None,
) -> dict[str, Replanned]:
    """Run applications side by side, each with its own controller on the devices of its first plan.

    With an arbiter these change. All devices of its fleet are present.
    """
    loops = dict[str, tuple[Simulation, Simulated, ControlLoop]]()
    for name, each in members.items():
        simulation, plan = Simulation(each.world, each.inputs, seconds, seed), each.world.plan
        application, budget = Simulated(simulation, patience.start_s), plan.devices()
        controller = Controller(each.problem, patience, History(None), Events(None), plan, 0.0, budget=budget)
        clock = partial(getattr, simulation, "now_s")
        loop = ControlLoop(application, controller, clock, time.process_time, report=lambda event: None)
        loops[name] = simulation, application, loop
    asyncio.run(_drive_fleet(loops, seconds, arbiter, patience, progress))
    return {
        name: Replanned(simulation.finish(), tuple(application.plans), loop.controller.record.events.all, loop.spent)
        for name, (simulation, application, loop) in loops.items()
    }


async def _drive_fleet(
    loops: Mapping[str, tuple[Simulation, Simulated, ControlLoop]], seconds: float, arbiter: Arbiter | None,
    patience: Patience, progress: Callable[[float], None],
) -> None:  # fmt: skip
    now_s = looked_s = 0.0
    while now_s + patience.react_every_s <= seconds:
        now_s += patience.react_every_s
        for simulation, _, loop in loops.values():
            if simulation.now_s < now_s:  # no plan is being rolled out, which takes the time until then
                simulation.run_until(now_s)
                await loop.step()
        if arbiter and now_s - looked_s >= arbiter.look_again_s:
            looked_s = now_s
            standings = {name: await loop.standing() for name, (_, _, loop) in loops.items()}
            for name, grant in arbiter.look(standings, arbiter.config.devices, now_s).items():
                await loops[name][2].grant(grant)
        progress(now_s)


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
