"""The controller of a running application: its start, its loop, and its HTTP API."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import Response
from starlette.types import Scope

from isobatch.cluster.controller.application import Application, RunningApplication, leader_of
from isobatch.cluster.controller.arbiter import Grant
from isobatch.cluster.controller.available_devices import Inventory
from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.control_loop import ControlLoop
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.fleet_division import Standing
from isobatch.cluster.controller.input_planning import allowed, classifier_problem
from isobatch.cluster.controller.knowledge import PlanningProblem
from isobatch.cluster.controller.memory import Memory, configuration_of, deployment_of
from isobatch.cluster.controller.promise_keeper import PromiseKeeper
from isobatch.cluster.controller.record import Event
from isobatch.cluster.controller.status import ControllerStatus, EventStatus, PausedStatus, as_json, export, status_of
from isobatch.cluster.controller.text_planning import text_problem
from isobatch.deployments.config import AppConfig, ServedConfig
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.api import Api
from isobatch.deployments.front.headers import key_in, path_below
from isobatch.deployments.front.openapi import BY_GUARD, documented, in_json
from isobatch.deployments.front.page import EXPLAINING
from isobatch.deployments.graph import profile_of
from isobatch.deployments.named import VIRTUAL
from isobatch.deployments.planning import device, first_plan
from isobatch.deployments.ray_facts import ask_autoscaler, autoscaler_refuses, nodes_beside_others
from isobatch.deployments.serve_process import join_serves_log
from isobatch.optimizer import Plan
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.promise import NOTHING, agreement_in, promise_in, thresholds_in

RETRY_S = 1.0  # between two tries to reach the application
_REFUSALS = *BY_GUARD, 500, 503
log = logging.getLogger("ray.serve")  # the log of Serve's own lines about a replica


class ControllerService:
    """The one replica of the controller's application: it runs the loop and serves the HTTP API."""

    def __init__(self, config: ControllerConfig) -> None:
        self.config, self.name, self.hosts = config, config.application, config.allowed_hosts
        self.key = key_in(config.api_key_variable)
        self.loop: ControlLoop | None = None
        self._request: Callable[[Mapping[str, int]], None] = request_nothing
        self._stays: Callable[[], Awaitable[bool]]  # whether the application keeps the configuration of the loop
        self.waits_for, self.promise = "the application to run", NOTHING
        self._memory: Memory | None = None
        self._virtual = False  # whether the application's devices compute nothing

    async def run(self) -> None:
        """Control the application, and begin again when it is deployed with another configuration."""
        join_serves_log()
        self._metrics = asyncio.create_task(export(lambda: self.loop))
        while True:
            try:
                loop = await self._begin()
            except Exception as error:
                waits_for = f"the application to run ({type(error).__name__}: {error})"
                if waits_for != self.waits_for:
                    log.info("the controller waits for %s", waits_for)
                self.waits_for = waits_for
                if self.loop:
                    self.loop.trouble = f"it waits for {self.waits_for}"
                await asyncio.sleep(RETRY_S)
                continue
            if self.loop:
                loop.continue_from(self.loop)
            self.loop = loop
            await loop.run(self._stays)

    async def _begin(self) -> ControlLoop:
        from ray import serve

        name = self.config.application
        leader = await asyncio.to_thread(leader_of, name)
        deployed = RunningApplication(name, leader=leader)
        app_config, running = await deployed.config(), await deployed.plan()
        self._stays = partial(deployed.is_as, app_config)
        memory = await asyncio.to_thread(self._memory_for, app_config)
        await deployed.observe()  # earlier counts may span hours, and do not belong to the first window
        if isinstance(app_config, AppConfig):
            return self._inputs_loop(app_config, deployed, running, memory)
        pinned = await serve.get_deployment_handle(leader, name).pinned.remote()
        return _loop_for(text_problem(app_config, running), self.config, deployed, running, memory, pinned)

    def _inputs_loop(
        self, app_config: AppConfig, deployed: RunningApplication, running: Plan, memory: Memory
    ) -> ControlLoop:
        """The loop for a classifier, which counts devices and may ask for more."""
        name, profile = self.config.application, profile_of(app_config)
        self.promise = str((app_config.prepared_folder and promise_in(app_config.prepared_folder)) or NOTHING)
        most, room = allowed(self.config, app_config, profile), app_config.room_for
        self._virtual = app_config.backend == VIRTUAL
        known = self.config.grow_to if self._virtual else ()
        nodes, fronts = partial(nodes_beside_others, name), app_config.front_cpus
        deployed.inventory = Inventory(most, app_config.replica_needs, nodes, known, app_config.sharers, fronts)

        def request(devices: Mapping[str, int]) -> None:
            ask_autoscaler(name, [room(kind) for kind in devices for _ in range(devices[kind])])

        self._request = request if self.config.grow_to else request_nothing
        problem = classifier_problem(self.config, app_config, profile)
        beyond = [device(kind, count) for kind, count in running.devices().items() if kind not in most]
        problem = replace(problem, fleet=(*problem.fleet, *beyond))  # not counted, so the next look lacks them
        pinned = first_plan(app_config, profile) if app_config.pinned else None
        keeper = keeper_of(self.config, app_config, profile.num_blocks)
        return _loop_for(problem, self.config, deployed, running, memory, pinned, keeper, self._request)

    def _memory_for(self, app_config: ServedConfig) -> Memory:
        """The memory of the present deployment. The memory of another deployment is closed."""
        name = deployment_of(self.config.application, configuration_of(self.config, app_config), time.time())
        if self._memory and self._memory.folder.name != name:
            self._memory.close()
            self._memory = None
        self._memory = self._memory or Memory(self.config.memory, self.config.application, name)
        return self._memory

    async def standing(self) -> Standing:
        """The answer to the fleet's arbiter. The call fails until the application runs."""
        return replace(await self._running_loop().standing(), virtual=self._virtual)

    async def grant(self, grant: Grant) -> None:
        """The devices that the fleet's arbiter grants to the application."""
        await self._running_loop().grant(grant)

    def _running_loop(self) -> ControlLoop:
        if self.loop is None:
            raise ConnectionError(f"the controller waits for {self.waits_for}")
        return self.loop

    def end(self) -> None:
        """Withdraw requests for devices: idle ones may end, and the next controller requests them again."""
        self._request({})

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(self)


def request_nothing(devices: Mapping[str, int]) -> None:
    """Without `grow_to`, no autoscaler is asked for devices."""


def _loop_for(
    problem: PlanningProblem, config: ControllerConfig, application: Application, running: Plan, memory: Memory,
    pinned: Plan | None, keeper: PromiseKeeper | None = None,
    request: Callable[[Mapping[str, int]], None] = request_nothing,
) -> ControlLoop:  # fmt: skip
    history, events = memory.history(), memory.events()
    budget = running.devices() if config.shared else None
    controller = Controller(
        problem, config, history, events, running, time.time(), pinned, keeper, config.grow_to, budget
    )
    report = partial(_log, config.application)
    return ControlLoop(
        application, controller, time.time, time.perf_counter, asyncio.to_thread, report, request, autoscaler_refuses
    )


def keeper_of(config: ControllerConfig, app_config: AppConfig, num_blocks: int) -> PromiseKeeper | None:
    """The keeper of the promise of agreement; None without a promise. Thresholds change only with an exit table."""
    folder = app_config.prepared_folder
    promised = app_config.agreement or (agreement_in(folder) if folder else None)
    if promised is None:
        return None
    evidence = Evidence.read(folder / EVIDENCE) if folder and (folder / EVIDENCE).exists() else None
    if evidence and evidence.test.num_ramps + 1 != num_blocks:
        evidence = None
    prepared = thresholds_in(folder) if folder else {}
    answers_early = app_config.early_budget is not None
    return PromiseKeeper(
        promised, evidence, prepared, config.under_load, config.strict, answers_early, config.least_gain
    )


def _log(application: str, event: Event) -> None:
    """Write one line for each decision. In JSON it also has the figures that led to the decision."""
    figures = {name: value for name, value in as_json(event).items() if value is not None and name != "why"}
    log.log(
        logging.INFO if event.what == "stayed" else logging.WARNING,
        "%s: %s: %s",
        application,
        event.what,
        event.why,
        extra={"decision": figures},
    )


class _Api(Api):
    service: "ControllerService"
    costly_paths = ("/would",)

    def refusal(self, scope: Scope) -> RefusedError | None:
        self.key = self.service.key
        refused = super().refusal(scope)
        if not refused and self.service.loop is None and path_below(scope) not in EXPLAINING:
            return RefusedError(503, f"the controller waits for {self.service.waits_for}")
        return refused


def create_api(service: ControllerService) -> FastAPI:
    """Paths below the route prefix of the controller's application."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(service.run())
        yield
        running.cancel()
        service.end()

    about = f"Watches {service.name} and changes its plan"
    api = _Api(title="isobatch controller", description=about, lifespan=life)
    api.service, api.hosts, api.open_paths = service, service.hosts, EXPLAINING
    api.include_router(_routes(service))
    return api


def _routes(service: ControllerService) -> APIRouter:
    routes = APIRouter()

    def loop() -> ControlLoop:
        assert service.loop, "This is a bug: requests are refused before."
        return service.loop

    @routes.get("/status", **documented(ControllerStatus, *_REFUSALS))
    async def status() -> Response:
        """The running plan, its figures, the forecast, and the last decisions."""
        state = status_of(loop(), time.time())
        return in_json({"application": service.name, "promise": service.promise, **state})

    @routes.post("/pause", **documented(PausedStatus, *_REFUSALS))
    async def pause() -> dict[str, Any]:
        """Keep watching, but change nothing until `resume`."""
        await loop().pause(True)
        return {"paused": True}

    @routes.post("/resume", **documented(PausedStatus, *_REFUSALS))
    async def resume() -> dict[str, Any]:
        """Change the plan again where it is worth it."""
        await loop().pause(False)
        return {"paused": False}

    @routes.post("/force", **documented(EventStatus, *_REFUSALS))
    async def force() -> dict[str, Any]:
        """Plan again now, and roll out the best plan."""
        return as_json(await loop().force())

    @routes.get("/would", **documented(EventStatus, *_REFUSALS))
    async def would() -> dict[str, Any]:
        """The decision that would be made now; nothing changes."""
        return as_json(await loop().preview())

    return routes
