"""A simulated application with the controller of a running one, in virtual time."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from isobatch.cluster.controller.arbiter import Arbiter, FleetDecision
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.control_loop import ControlLoop
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.decide import plan_change
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.cluster.controller.promise_keeper import PromiseKeeper
from isobatch.cluster.controller.record import Event, Events
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import Chunks, Simulation, World
from isobatch.cluster.simulator.table_devices import TableDevices
from isobatch.deployments.front.observed import Observed, StandbyReplica
from isobatch.optimizer.plan import Plan
from isobatch.profiles.windows import History

LOOK_EVERY_S = 30.0  # instead of 5 s, because a look takes milliseconds and a simulated day would have 17,280
PATIENCE = Patience(look_every_s=LOOK_EVERY_S)


class Simulated:
    """A simulation as the application that the controller leads. New replicas take `start_s`.

    `stands_by`: replicas do not end with the use of their devices.
    """

    def __init__(self, simulation: Simulation, start_s: float, stands_by: bool = False) -> None:
        self._simulation, self._start_s = simulation, start_s
        self._standby: tuple[StandbyReplica, ...] | None = () if stands_by else None
        self.plans = [(0.0, simulation.plan)]  # that ran, and since when

    async def observe(self, devices: bool = True) -> Observed:
        return replace(self._simulation.observe(), standby=self._standby, parked=self._simulation.parked)

    async def plan(self) -> Plan:
        return self._simulation.plan

    async def roll_out(self, plan: Plan) -> None:
        if self._simulation.parked or plan_change(self._simulation.plan, plan).starts:
            self._simulation.run_until(self._simulation.now_s + self._start_s)
        self._simulation.follow(plan)
        self.plans.append((self._simulation.now_s, plan))

    async def use(self, device_ids: frozenset[str]) -> None:
        """Simulated devices have no ids: plans use different ones."""

    async def park(self, wakes_in_s: float) -> None:
        self._simulation.park(wakes_in_s)


@dataclass(frozen=True)
class Replanned:
    """The report of a finished run, the plans that ran and since when, and the controller's events in it."""

    report: Report
    plans: tuple[tuple[float, Plan], ...]
    events: tuple[Event, ...]

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
    driven = _Driven(Member(world, problem, inputs, patience), seconds, seed, keeper=keeper, devices=devices)
    asyncio.run(_drive({"": driven}, seconds, patience.react_every_s, None, progress))
    return driven.outcome


@dataclass(frozen=True)
class Member:
    """An application of a simulated fleet. The facts of its world have all devices of the fleet."""

    world: World
    problem: ClassifierPlanningProblem
    inputs: Chunks
    patience: Patience = field(default_factory=Patience)
    stands_by: bool = False


@dataclass(frozen=True)
class ReplannedFleet:
    """`decide_s`: the processor time that the arbiter took for its decisions."""

    applications: Mapping[str, Replanned]
    decisions: tuple[FleetDecision, ...] = ()
    decide_s: float = 0.0

    @property
    def moves(self) -> list[FleetDecision]:
        return [each for each in self.decisions if each.budgets is not None]


class _Driven:
    """A member while it runs."""

    def __init__(
        self, member: Member, seconds: float, seed: int, *, budget: Mapping[str, int] | None = None,
        keeper: PromiseKeeper | None = None, devices: Callable[..., TableDevices] = TableDevices,
    ) -> None:  # fmt: skip
        self.simulation = Simulation(member.world, member.inputs, seconds, seed, devices)
        self.application = Simulated(self.simulation, member.patience.start_s, member.stands_by)
        history, events, plan = History(None), Events(None), member.world.plan
        controller = Controller(
            member.problem, member.patience, history, events, plan, 0.0, keeper=keeper, budget=budget
        )  # fmt: skip
        clock = partial(getattr, self.simulation, "now_s")
        self.loop = ControlLoop(self.application, controller, clock, time.process_time, report=lambda event: None)

    async def until(self, now_s: float) -> None:
        if self.simulation.now_s < now_s:  # else a roll-out has taken the time until then
            self.simulation.run_until(now_s)
            await self.loop.step()

    @property
    def outcome(self) -> Replanned:
        events = self.loop.controller.record.events.all
        return Replanned(self.simulation.finish(), tuple(self.application.plans), events)


def replan_fleet(
    members: Mapping[str, Member],
    seconds: float,
    arbiter: Arbiter | None,
    *,
    seed: int = 0,
    progress: Callable[[float], None] = lambda at_s: None,
) -> ReplannedFleet:
    """Run applications side by side, each with its own controller on the devices of its first plan.

    With an arbiter these change. All devices of its fleet are present.
    """
    driven = {name: _Driven(each, seconds, seed, budget=each.world.plan.devices()) for name, each in members.items()}
    every_s = min(each.patience.react_every_s for each in members.values())
    decisions, decide_s = asyncio.run(_drive(driven, seconds, every_s, arbiter, progress))
    return ReplannedFleet({name: each.outcome for name, each in driven.items()}, tuple(decisions), decide_s)


async def _drive(
    driven: Mapping[str, _Driven], seconds: float, every_s: float, arbiter: Arbiter | None,
    progress: Callable[[float], None],
) -> tuple[list[FleetDecision], float]:  # fmt: skip
    now_s = looked_s = decide_s = 0.0
    decisions = list[FleetDecision]()
    while now_s + every_s <= seconds:
        now_s += every_s
        for each in driven.values():
            await each.until(now_s)
        if arbiter and now_s - looked_s >= arbiter.look_again_s:
            looked_s, before = now_s, arbiter.decisions[-1:]
            took_s = await _grant(driven, arbiter, now_s)
            if arbiter.decisions[-1:] != before:
                decisions.append(arbiter.decisions[-1])
                decide_s += took_s
            if arbiter.is_moving:  # to the takers, what the givers have just freed
                await _grant(driven, arbiter, now_s)
        progress(now_s)
    return decisions, decide_s


async def _grant(driven: Mapping[str, _Driven], arbiter: Arbiter, now_s: float) -> float:
    """Let the arbiter look, and the controllers follow. Returns the processor time of the look."""
    standings = {name: await each.loop.standing() for name, each in driven.items()}
    began_s = time.process_time()
    grants = arbiter.look(standings, arbiter.config.devices, now_s)
    took_s = time.process_time() - began_s
    for name, grant in grants.items():
        await driven[name].loop.grant(grant)
        await driven[name].loop.act()
    return took_s
