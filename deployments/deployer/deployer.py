"""Starts the replicas of a plan, switches all fronts from one plan to another, and remembers which plan runs."""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from isobatch.deployments import ray_facts
from isobatch.deployments.config import AppConfig
from isobatch.deployments.deployer.fleet import ServeFleet, delete_fleets, delete_leftovers, fleets_of
from isobatch.deployments.deployer.fronts import Fronts
from isobatch.deployments.deployer.steps import (
    BLAMELESS,
    CannotStartError,
    Moved,
    Undone,
    most_of,
    move,
    start,
    with_benched,
)
from isobatch.deployments.front.messages import FrontMessage, FrontState, Question
from isobatch.deployments.front.observed import Observed
from isobatch.deployments.graph import Graph, graph_of, plan_hash, profile_of, read_graph, replica_hash
from isobatch.deployments.planning import plan_for_fewer
from isobatch.deployments.ray_facts import StoredPlan, stored_plan
from isobatch.deployments.serve_process import join_serves_log, own_task
from isobatch.optimizer.plan import Plan
from isobatch.profiles.errors import UserError

_LEADERS = "leaders:"  # followed by the application's name: the key under which its leaders are stored


class Leadership:
    """Lets one deployer take the lead, and find out whether it still has it.

    After another deployer replaces one, the old one runs until its fronts have no requests, and must leave the replicas
    alone. `fleet` is the prefix of the applications that hold the replicas.
    """

    def __init__(self, application: str, fleet: str) -> None:
        self._key, self._fleet = f"{_LEADERS}{application}", fleet
        self._name = uuid4().hex

    def take(self) -> None:
        """Make this deployer the leader of the application and its fleet."""
        others = {fleet: name for fleet, name in self._leaders().items() if fleet != self._fleet}
        ray_facts.remember(self._key, json.dumps(others | {self._fleet: self._name}))

    def of_application(self) -> bool:
        """Whether this deployer still leads the application."""
        return [*self._leaders().values()][-1:] == [self._name]

    def of_fleet(self) -> bool:
        """Whether no other deployer leads the fleet."""
        return self._leaders().get(self._fleet, self._name) == self._name

    def forget(self) -> None:
        ray_facts.forget(self._key)

    def _leaders(self) -> dict[str, str]:
        """The leader of each fleet, the latest last: it also leads the application."""
        return dict(json.loads(ray_facts.recall(self._key) or "{}"))


log = logging.getLogger("ray.serve")
PATIENCE_S = 600.0  # for the replicas of a plan to start, since a large network takes long to load
FOLLOW_WITHIN_S = 5.0  # for the fronts to follow a new plan; a late front is dropped
CLEAN_UP_EVERY_S = 10.0  # between two attempts to end leftover replicas
COUNT_WITHIN_S = 2.0  # for the fronts to report their counts
NONE_BENCHED: Mapping[str, str] = {}
UNREACHABLE = (OSError, RayError, RayServeException)  # Ray or Serve did not answer, for which no plan is to blame


class Deployer:
    """A deployment of the front application. `bind` makes an application with a number of replicas of one kind.

    The deployer may be killed at any time: replicas keep running, fronts follow the plan that they have, and the next
    deployer reads from Ray's store which plan that is.
    """

    def __init__(self, config: AppConfig, bind: Callable[[str, int], Application]) -> None:
        join_serves_log()
        self._application = ray_facts.application_name()
        self._config, self._profile = config, profile_of(config)
        prefix = f"{self._application}.{replica_hash(config)}"
        self._leadership = Leadership(self._application, prefix)
        self._fleet = ServeFleet(prefix, bind, config.replica_needs, self._leadership.of_fleet)
        self._fronts = Fronts()
        self._starting, self._moving = asyncio.Lock(), asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running = self._rolling_out = False
        self._cannot: CannotStartError | None = None
        self._graph = self._first()
        self._take_over()

    # Calls of the fronts

    async def lease(self, front: str, config: AppConfig) -> AsyncIterator[FrontMessage]:
        """The messages and requests for this front, beginning with the plan once its replicas run.

        The replicas stay while any front listens: Serve lets a deployment finish its calls before it ends it, so this
        deployer lives while a front drains. A front with another configuration has another deployer and gets nothing.
        """
        if config != self._config:
            return
        async with self._starting:
            await self._start()
        async for message in self._fronts.messages(front, self._graph):
            yield message

    async def reply(self, front: str, number: int, content: object) -> None:
        self._fronts.reply(front, number, content)

    async def arrived(self, front: str, per_s: float) -> None:
        self._fronts.arrived(front, per_s)

    # Calls of other fronts and of the controller

    async def config(self) -> AppConfig:
        return self._config

    async def plan(self) -> Plan:
        return self._graph.plan

    async def states(self, front: str) -> list[FrontState]:
        """The states of all living fronts except this one."""
        replies = await self._fronts.ask(Question.STATE, COUNT_WITHIN_S)
        return [reply for name, reply in replies.items() if name != front and isinstance(reply, FrontState)]

    async def counted(self) -> dict[str, Observed]:
        """The counts of each living front since it started."""
        return await self._fronts.ask(Question.COUNTS, COUNT_WITHIN_S)

    async def apply(
        self, plan: Plan, patience_s: float = PATIENCE_S, benched: Mapping[str, str] = NONE_BENCHED
    ) -> Moved | Undone:
        """Switch the application to another plan. The move is completed even if the caller ends meanwhile.

        `benched`: the slow replicas that the plan does not count on, with their kinds. They stay, because they may
        become fast again.
        """
        if self._rolling_out or not self._running:
            reason = "another plan is being rolled out" if self._running else "the application is not running yet"
            return Undone(reason, blameless=True)
        self._rolling_out = True
        return await asyncio.shield(own_task(self._apply(plan, patience_s, benched), self._tasks))

    async def _apply(self, plan: Plan, patience_s: float, benched: Mapping[str, str]) -> Moved | Undone:
        async with self._moving:  # waits for the clean-up after a restart
            try:
                before, after = self._graph, self._changed(plan, benched=dict(benched), wakes_in_s=None)

                async def switch(to: Plan) -> None:
                    graph = after if to is after.plan else before
                    await self._send(replace(graph, version=self._graph.version + 1))

                old, stay = None if before.parked else before.plan, Counter(benched.values())
                # Kinds of which only benched replicas were left are not in the plan before.
                standby = most_of(self._config.standby, dict.fromkeys(before.benched.values(), 0))
                return await move(self._fleet, old, after.plan, switch, self._use_interim, patience_s, stay, standby)
            except (UserError, CannotStartError) as error:
                return Undone(str(error), blameless=isinstance(error, BLAMELESS))
            except Exception as error:
                log.exception("a plan could not be rolled out")
                return Undone(f"{type(error).__name__}: {error}", blameless=isinstance(error, UNREACHABLE))
            finally:
                self._rolling_out = False

    async def use(self, device_ids: frozenset[str]) -> None:
        """Let all fronts use the standby replicas on these devices only; the plan stays."""
        async with self._moving:
            await self._send(self._changed(device_ids=device_ids))

    async def park(self, wakes_in_s: float) -> None:
        """End all replicas; the next roll-out starts some. `wakes_in_s`: the expected time from the next input until
        they run.
        """
        async with self._moving:
            if not self._graph.parked:
                await self._send(self._changed(wakes_in_s=wakes_in_s))
            await asyncio.to_thread(self._scale)

    def _changed(self, plan: Plan | None = None, **changes: Any) -> Graph:
        """The present graph with another plan or other changes. Raises UserError if the plan does not fit."""
        if plan:
            changes["plan"], changes["facts"] = plan, graph_of(plan, self._profile, self._config).facts
        return replace(self._graph, version=self._graph.version + 1, **changes)

    async def _send(self, graph: Graph, stored: Graph | None = None) -> None:
        """Send all fronts a graph. It is stored first, or the one with which a restarted deployer should continue."""
        await asyncio.to_thread(self._remember, stored or graph)  # Ray's store may be unreachable for a while
        self._graph = graph
        await self._fronts.ask(graph, FOLLOW_WITHIN_S)

    async def _use_interim(self, counts: Mapping[str, int]) -> None:
        """Send all fronts the best plan for the devices that remain while others are freed, if there is one.

        If this deployer ends during the move, the next one must return to the previous plan. So that plan is stored,
        with a version that no front follows yet.
        """
        before = self._graph
        smaller = await asyncio.to_thread(plan_for_fewer, before.plan, counts, self._config, self._profile)
        if smaller:
            graph = self._changed(replace(smaller, thresholds=before.plan.thresholds))
            await self._send(graph, stored=replace(before, version=graph.version + 1))

    # Start and end

    def _first(self) -> Graph:
        """The plan that ran before a restart, unless the part of the user's file that decides the plan has changed."""
        memory = stored_plan(self._application)
        self._origin, self._recalled = plan_hash(self._config), bool(memory and memory.fleet == self._fleet.prefix)
        if memory and memory.origin == self._origin:
            graph = graph_of(Plan.from_json(memory.plan), self._profile, self._config)
            benched = memory.benched if self._recalled else {}  # only these replicas still run
            graph = replace(graph, version=memory.version, benched=benched, wakes_in_s=memory.wakes_in_s)
            if self._config.standby and memory.device_ids is not None:  # without standby, replicas have no ids
                graph = replace(graph, device_ids=frozenset(memory.device_ids))
        else:
            graph = replace(read_graph(self._config), version=memory.version + 1 if memory else 0)
            if memory and memory.wakes_in_s is not None and not self._fleet.has_room(graph.plan.devices()):
                graph = replace(graph, wakes_in_s=memory.wakes_in_s)  # others use its devices until its next input
        return replace(graph, fleet=self._fleet.prefix)

    def _take_over(self) -> None:
        """Take the lead before the first front joins. Replicas of a previous deployer end now if it has ended.

        Otherwise they end with their last front. They must not stay: new replicas may wait for their devices.
        """
        self._leadership.take()
        memory = stored_plan(self._application)
        if memory and memory.ended:
            delete_fleets(fleets_of(self._application, but=self._fleet.prefix))

    async def _start(self) -> None:
        if self._running:
            return
        if self._recalled or self._graph.parked:  # fronts wait for no replicas
            await asyncio.to_thread(self._scale)
        elif self._cannot:
            raise self._cannot  # a second attempt would hide Serve's report of the first one
        else:
            try:
                await start(self._fleet, self._graph.plan.devices(), PATIENCE_S, wanted=lambda: not self._graph.parked)
            except CannotStartError as error:
                self._cannot = error
                raise
            if self._config.standby:
                await asyncio.to_thread(self._scale)
        async with self._moving:  # or an older plan could be stored last
            await asyncio.to_thread(self._remember, self._graph)
        left = await asyncio.to_thread(fleets_of, self._application, but=self._fleet.prefix)
        self._running = True
        own_task(self._clean_up_later(left), self._tasks)

    def _scale(self) -> None:
        self._fleet.scale_to(self._counts)

    @property
    def _counts(self) -> dict[str, int]:
        states, graph = self._fleet.states(), self._graph
        if graph.parked:
            return dict.fromkeys(states, 0)
        benched, of_plan = Counter(graph.benched.values()), most_of(graph.plan.devices(), self._config.standby)
        return with_benched(dict.fromkeys(benched, 0) | of_plan, benched, states)

    def _remember(self, graph: Graph) -> None:
        """Store which plan runs, unless another deployer, with another file, has taken the lead meanwhile."""
        if self._leadership.of_application():
            ids = None if graph.device_ids is None else sorted(graph.device_ids)
            of_plan = graph.fleet, self._origin, graph.version, graph.plan.to_json()
            stored = StoredPlan(*of_plan, device_ids=ids, wakes_in_s=graph.wakes_in_s, benched=dict(graph.benched))
            stored.store(self._application)

    async def _clean_up_later(self, left: Sequence[str]) -> None:
        """End the replicas that the previous deployer has left, once its fronts have had time to drain. While Serve or
        Ray's store is unreachable, this is tried again: the replicas hold devices.

        If the next deployer has started meanwhile, it may use any of these replicas, and cleans up itself.
        """

        def clean_up() -> None:
            if self._leadership.of_application():
                self._fleet.scale_to(dict.fromkeys(self._fleet.states(), 0) | self._counts)
                delete_fleets(left)

        await asyncio.sleep(ray_facts.drained_s(self._config.drain_s))
        while True:
            try:
                async with self._moving:
                    return await asyncio.to_thread(clean_up)
            except Exception as error:
                log.warning("replicas of an earlier deployment may still run: %s", error)
            await asyncio.sleep(CLEAN_UP_EVERY_S)

    def __del__(self) -> None:
        """Serve calls this when no front listens any longer: end the replicas, unless another deployer needs them."""
        with contextlib.suppress(Exception):
            memory = stored_plan(self._application)
            if delete_leftovers(self._application):
                self._leadership.forget()
            elif not self._leadership.of_fleet():
                return  # the deployer that leads these replicas decides about them
            elif self._leadership.of_application() and memory and memory.fleet == self._fleet.prefix:
                replace(memory, ended=True).store(self._application)  # the next deployer decides what it can use
                if self._leadership.of_fleet() and not self._leadership.of_application():
                    self._fleet.delete()  # the next deployer had begun another fleet before this one ended
            else:
                self._fleet.delete()  # the next deployer has another fleet, which may wait for these devices
