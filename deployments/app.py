"""The Serve applications. Only this file decides which classes become deployments, and with which options.

No `from __future__ import annotations` here: Serve reads the annotation of `build` to turn `args:` into an AppConfig.
"""

import asyncio
import gc
import time
from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from isobatch.deployments.cluster_checks import check_cluster
from isobatch.deployments.config import AppConfig
from isobatch.deployments.deployer.deployer import Deployer
from isobatch.deployments.deployer.fleet import delete_leftovers
from isobatch.deployments.deployer.steps import DEPLOYER, FRONT, NETWORK
from isobatch.deployments.front import router, shortcut
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.api import limit_http
from isobatch.deployments.front.canary import Canary, Headers, NamedReply
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.follower import Follower
from isobatch.deployments.front.grpc_server import check_port
from isobatch.deployments.front.http import create_api
from isobatch.deployments.front.in_process import InProcess, NamedState
from isobatch.deployments.front.predict import Predict
from isobatch.deployments.front.service import Service
from isobatch.deployments.front.stats import export
from isobatch.deployments.graph import check_depth, check_weights
from isobatch.deployments.named import CanaryTerms
from isobatch.deployments.planning import has_room_beside
from isobatch.deployments.ray_facts import (
    application_name,
    ask_all,
    cluster_state,
    drained_s,
    free_resources,
    labelled,
    nodes,
)
from isobatch.deployments.ray_settings import WITHOUT_PROXY
from isobatch.deployments.replica.serve_replica import DEPLOYMENT, ServeReplica
from isobatch.deployments.resources import declared, devices_of_a_node, requested_amounts
from isobatch.deployments.serve_process import join_serves_log, process_options
from isobatch.profiles.errors import UserError


class Front:
    """One replica of the front: HTTP and the dispatcher, and without a plan the network itself."""

    def __init__(self, config: AppConfig, deployer: Any = None) -> None:
        join_serves_log()
        ask = _ask_fronts if config.replicas > 1 else None
        network = Follower(config, deployer, str(config.folder)) if deployer else InProcess(config, ask)
        self._config, self._network = config, network
        self._service = Service(config, time.perf_counter, network, self._opened)
        self._canary = _canary(config.canary, self._service) if config.canary else None
        self._api = create_api(self._service, self._canary)
        if config.grpc_port:
            check_port(config.grpc_host, config.grpc_port)
        if config.planned:
            check_depth(config, self._service.num_blocks)
            check_weights(config)

    def _opened(self, driver: Driver) -> None:
        if self._canary:
            driver.counts.canary = self._canary.counts
            self._reaching = asyncio.create_task(self._canary.begin())
        self._metrics = asyncio.create_task(export(driver, lambda: self._network.promised_per_s))
        self._cleanup = None if self._config.planned else asyncio.create_task(_clean_up_later(self._config.drain_s))
        limit_http(self._service, self._config.slo_ms)
        gc.freeze()  # imported modules are never freed: scanning them for garbage would take up to 0.1 s

    def __serve_build_asgi_app__(self) -> FastAPI:
        shortcut.apply(self._api, self._api.direct)
        return self._api

    async def computed(self, headers: Headers, body: bytes) -> NamedReply | None:
        """The reply to POST /predict for another front, whose canary this application is; None: it is refused."""
        predict = self._api.direct["/predict"]
        assert isinstance(predict, Predict), "This is a bug: every network has this path."
        with suppress(RefusedError):
            return await predict.computed(headers, body)
        return None

    async def state(self) -> NamedState:
        """The state of this front for another one, which answers /stats."""
        assert isinstance(self._network, InProcess), "This is a bug: the deployer asks the fronts of a plan."
        return self._network.state()

    async def reached(self) -> None:
        """Returns once requests are answered: Serve calls no method before."""


async def _ask_fronts() -> list[NamedState]:
    return await ask_all(serve.get_deployment_handle(NETWORK, application_name()), Front.state.__name__)


def _canary(terms: CanaryTerms, service: Service) -> Canary:
    if service.task.by_score or service.task.by_map:
        raise UserError("args: canary: it compares labels, and this network answers with none: leave it out")
    front: Any = None  # the canary may start later than this application, or not at all

    async def ask(body: bytes, headers: Headers) -> NamedReply | None:
        reply: NamedReply | None = await front.computed.remote(headers, body)
        return reply

    async def reach() -> None:
        nonlocal front
        front = await asyncio.to_thread(serve.get_app_handle, terms.application)
        await front.reached.remote()

    return Canary(terms, ask, reach)


async def _clean_up_later(drain_s: float) -> None:
    """End the replicas of an earlier configuration, once its fronts have had time to drain.

    The deployer of that configuration does the same, but it may never have started.
    """
    await asyncio.sleep(drained_s(drain_s))
    await asyncio.to_thread(delete_leftovers, application_name())


def build(config: AppConfig) -> Application:
    """Build the application of `import_path: isobatch.deployments.app:build` in a Serve file from its `args:`."""
    check_cluster(config, cluster_state())
    deployer = _deployer(config) if config.planned else None
    has_gpu = config.device.startswith("cuda") and not deployer
    options = {"num_cpus": 1, "num_gpus": int(has_gpu)}
    front = serve.deployment(
        name=NETWORK if config.replicas > 1 else FRONT,
        num_replicas=config.fronts,
        # If there is room, a new front starts beside the one that it replaces, which answers until then. Serve rounds
        # one percent up to one replica.
        max_surge_percent=int(has_room_beside(config, requested_amounts(options), nodes(), free_resources())),
        # Without room, every old front ends first: each of them holds the devices that the new ones wait for.
        rolling_update_percentage=1.0,
        # Serve's queue must not refuse before our own, which gives a reason.
        max_ongoing_requests=2 * config.max_inside_all,
        ray_actor_options=options,
        **process_options(config.log_format, config.drain_s),
    )(serve.ingress()(Front))
    return front.bind(config, deployer)


def _deployer(config: AppConfig) -> Application:
    deployment = serve.deployment(
        name=DEPLOYER,
        max_ongoing_requests=1000,  # each front replica holds a lease, which is one request
        ray_actor_options={"num_cpus": 0, "runtime_env": WITHOUT_PROXY},
        # It logs each plan, and ends after the fronts: their leases keep it, and only its end ends the replicas.
        **process_options(config.log_format, drained_s(config.drain_s), quiet=False),
    )
    return deployment(Deployer).bind(config, partial(build_fleet, config))


def build_fleet(config: AppConfig, kind: str, replicas: int) -> Application:
    """The application with this number of replicas on one kind of device. Any of them can run any split."""
    split = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=replicas,
        max_ongoing_requests=16,  # fronts only ask for the address: orders do not go through Serve
        ray_actor_options=config.replica_options(kind, labelled())
        | {"resources": {name: amount / config.sharers for name, amount in declared(kind, nodes()).items()}},
        max_replicas_per_node=devices_of_a_node(kind, nodes()) or config.standby[kind] if config.standby else None,
        request_router_config=RequestRouterConfig(request_router_class=router.PATH),
        health_check_timeout_s=10.0,
        **process_options(config.log_format, config.drain_s),
    )(ServeReplica)
    return split.bind(config, kind, config.model or str(config.folder))  # each node fetches it
