"""The arbiter of a running fleet: it asks the controllers of all applications, and sends them their budgets.

If it ends, each application keeps its devices.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from ray import serve

from isobatch.cluster.controller.arbiter import Arbiter
from isobatch.cluster.controller.config import ArbiterConfig
from isobatch.cluster.controller.fleet_division import Standing
from isobatch.cluster.controller.status import FleetStatus
from isobatch.deployments import ray_facts
from isobatch.deployments.front.api import Api
from isobatch.deployments.front.headers import key_in
from isobatch.deployments.front.openapi import BY_GUARD, documented, in_json
from isobatch.deployments.front.page import EXPLAINING, show_fleet
from isobatch.deployments.resources import Resources, declared, devices_on
from isobatch.deployments.serve_process import join_serves_log
from isobatch.profiles.devices import is_cpu, whole_kind

ANSWERS_WITHIN_S = 10.0  # for a controller to answer; an application without an answer keeps its devices
SILENT_S = 1.0  # the same for a controller that was silent last time, so that the others do not wait for it
log = logging.getLogger("ray.serve")


class FleetDevices:
    """Counts the devices of a fleet on nodes. Virtual ones that no node ever declared are all present.

    >>> count = FleetDevices({"v100": 2, "k80": 3})
    >>> count([{"v100": 2.0}, {"CPU": 4.0}], virtual=True), count([{"CPU": 4.0}], virtual=True)
    ({'v100': 2, 'k80': 3}, {'v100': 0, 'k80': 3})
    >>> FleetDevices({"v100": 2, "cpu": 3})([{"CPU": 4.0}], virtual=False)
    {'v100': 0, 'cpu': 3}
    >>> FleetDevices({"v100/2": 6})([{"v100": 2.0}], virtual=False)
    {'v100/2': 4}
    """

    def __init__(self, most: Mapping[str, int]) -> None:
        self._most, self._seen = dict(most), set[str]()

    def __call__(self, nodes: Iterable[Resources], virtual: bool) -> dict[str, int]:
        every = list(nodes)
        gpus = {kind: count for kind, count in devices_on(every).items() if kind != "cpu"}
        wholes = {kind: whole_kind(kind) for kind in self._most}
        counts = gpus | {
            whole: int(sum(node.get(whole, 0) for node in every))
            for kind, (whole, _) in wholes.items()
            if declared(kind, every)
        }
        self._seen |= counts.keys()
        uncounted = {whole for whole, _ in wholes.values() if virtual or is_cpu(whole)} - self._seen
        return {
            kind: self._most[kind] if whole in uncounted else min(self._most[kind], sharers * counts.get(whole, 0))
            for kind, (whole, sharers) in wholes.items()
        }


class FleetService:
    """The one replica of the arbiter's application: it runs the arbiter, and answers `/` and `/status`."""

    def __init__(self, config: ArbiterConfig) -> None:
        self.config, self.arbiter = config, Arbiter(config)
        self._count = FleetDevices(config.devices)
        self._controllers = {each.name: each.controller for each in config.applications}
        self._silent = list(self._controllers)  # the applications whose controllers did not answer
        self._standings = dict[str, Standing]()  # the last answer of each

    async def run(self) -> None:
        join_serves_log()
        while True:
            try:
                await self._look()
            except Exception as error:
                log.warning("the arbiter could not look: %s", error, exc_info=True)
            await asyncio.sleep(self.arbiter.look_again_s)

    async def _look(self) -> None:
        names = list(self._controllers)
        answers = await asyncio.gather(*(self._call(name, "standing") for name in names), return_exceptions=True)
        standings = {name: each for name, each in zip(names, answers, strict=True) if isinstance(each, Standing)}
        self.note(standings)
        virtual = any(each.virtual for each in self._standings.values())
        present = self._count(await asyncio.to_thread(ray_facts.nodes_beside_others, *names), virtual)
        before = self.arbiter.decisions[-1:]
        grants = await asyncio.to_thread(self.arbiter.look, standings, present, time.time())
        for decision in self.arbiter.decisions[-1:]:
            if [decision] != before:
                log.log(logging.INFO if decision.budgets is None else logging.WARNING, "fleet: %s", decision.why)
        sent = await asyncio.gather(
            *(self._call(name, "grant", each) for name, each in grants.items()), return_exceptions=True
        )
        self.arbiter.send_again(
            [name for name, each in zip(grants, sent, strict=True) if isinstance(each, BaseException)]
        )

    def note(self, standings: Mapping[str, Standing]) -> None:
        """Keep the answers of the controllers that have answered; the others are silent."""
        self._standings |= standings
        self._silent = [name for name in self._controllers if name not in standings]

    def status(self) -> dict[str, Any]:
        """The devices and the goodput of each application, and the last decisions."""
        applications = {
            name: {
                "devices": self.arbiter.budgets.get(name, each.budget),
                "arrivals_per_s": each.arrivals_per_s,
                "goodput_per_s": each.goodput_per_s,
                "expected_per_s": each.expected_per_s,
                "state": self._state(name, each),
            }
            for name, each in self._standings.items()
        }
        decisions = [asdict(each) for each in self.arbiter.decisions]
        budgets, silent = self.arbiter.budgets, self._silent
        return {"applications": applications, "budgets": budgets, "silent": silent, "decisions": decisions}

    def _state(self, name: str, standing: Standing) -> str:
        if name in self._silent:
            return "its controller does not answer: it keeps its devices"
        if standing.paused:
            return "paused: it keeps its devices"
        if name in self.arbiter.asleep:
            return f"parked: no inputs for {standing.quiet_s:.0f} s"
        if name in self.arbiter.parked or standing.parked:
            return "its replicas start as soon as they have devices" if standing.parked else "gets a device"
        return "refuses inputs" if standing.refuses else ""

    async def _call(self, name: str, method: str, *arguments: Any) -> Any:
        handle: Any = serve.get_deployment_handle("controller", self._controllers[name])
        within_s = SILENT_S if name in self._silent and name in self._standings else ANSWERS_WITHIN_S
        return await asyncio.wait_for(getattr(handle, method).remote(*arguments), within_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        @asynccontextmanager
        async def life(_: FastAPI) -> AsyncIterator[None]:
            running = asyncio.create_task(self.run())
            yield
            running.cancel()

        api = Api(title="isobatch arbiter", description="Moves devices between applications", lifespan=life)
        api.key, api.hosts = key_in(self.config.api_key_variable), self.config.allowed_hosts
        api.open_paths = EXPLAINING | show_fleet(api)

        @api.get("/status", **documented(FleetStatus, *BY_GUARD, 500))
        async def status() -> Response:
            """The devices and the goodput of each application, and the last decisions."""
            return in_json(self.status())

        return api
