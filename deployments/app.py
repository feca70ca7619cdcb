"""The Ray Serve applications: the only file that binds.

No `from __future__ import annotations` here: Serve reads the annotation of `build` to turn `args:` into an AppConfig.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from deployments.config import AppConfig
from deployments.driver import Driver
from deployments.front import shortcut
from deployments.front.http import create_api
from deployments.front.metrics import export
from deployments.front.open_inference.rpc import check_port
from deployments.front.service import Service, directory_of
from deployments.front.stats import Seen
from deployments.graph import check_depth
from deployments.in_process import in_process
from deployments.replicas import router
from deployments.replicas.placed import DEPLOYMENT, Placed, resources
from deployments.rollout.deployer import DEPLOYER, Deployer
from deployments.rollout.fleet import declared
from deployments.rollout.on_serve import Follower
from profiles.model import SplitModel

_QUIET = {"enable_access_log": False, "log_level": "WARNING"}  # a line per call costs more than the call


class Front:
    """One replica of the front: HTTP, the dispatcher, and without a plan the network too."""

    def __init__(self, config: AppConfig, deployer: Any = None) -> None:
        self._follower = Follower(config, deployer) if deployer else None
        self._service = Service(config, time.perf_counter, self._connect, self._others, self._plan)
        if config.grpc_port:
            check_port(config.grpc_host, config.grpc_port)
        if config.planned:
            check_depth(config, self._service.num_blocks)

    async def _connect(self, config: AppConfig, model: SplitModel, clock: Callable[[], float]) -> Driver:
        driver = await (self._follower.open(clock) if self._follower else in_process(config, model, clock))
        self._metrics = asyncio.create_task(export(driver))
        gc.freeze()  # what was imported is here to stay: to look through it for garbage would take 0.1 s now and then
        return driver

    def _plan(self) -> str | None:
        return self._follower.plan if self._follower else None

    async def _others(self) -> list[Seen]:
        return await self._follower.others() if self._follower else []

    def __serve_build_asgi_app__(self) -> FastAPI:
        api = create_api(self._service)
        shortcut.lead_to(api)
        return api


def build(config: AppConfig) -> Application:
    """What `import_path: deployments.app:build` in a Serve file makes of its `args:`."""
    deployer = _deployer(config) if config.planned else None
    front = serve.deployment(
        name="front",
        num_replicas=config.front_replicas,
        # Our own queue refuses with a reason; Serve's must not cut in before it.
        max_ongoing_requests=2 * config.max_waiting,
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if config.device.startswith("cuda") and not deployer else 0},
        graceful_shutdown_timeout_s=config.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=_QUIET,
    )(serve.ingress()(Front))
    return front.bind(config, deployer)


def _deployer(config: AppConfig) -> Application:
    # Behind HAProxy an application's first deployment may have no router of its own: HTTP would bypass it. HTTP never
    # reaches a placement (it has no route), so whoever makes its application need not know of HAProxy.
    without_proxy = {"env_vars": {"RAY_SERVE_ENABLE_HA_PROXY": "0"}}
    deployment = serve.deployment(
        name=DEPLOYER,
        max_ongoing_requests=1000,  # a lease for each front replica
        ray_actor_options={"num_cpus": 0, "runtime_env": without_proxy},
        graceful_shutdown_timeout_s=2 * config.drain_s,  # it goes after the fronts
        graceful_shutdown_wait_loop_s=0.1,
        logging_config={"enable_access_log": False},  # what was planned is worth a line
    )
    return deployment(Deployer).bind(config, partial(build_fleet, config))


def build_fleet(config: AppConfig, kind: str, replicas: int) -> Application:
    """The application of so many replicas of one kind. They hold no plan: any can run any split."""
    split = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=replicas,
        max_ongoing_requests=16,  # orders do not come this way: fronts ask where it is
        ray_actor_options=resources(config, kind) | {"resources": declared(kind)},
        request_router_config=RequestRouterConfig(request_router_class=router.PATH),
        health_check_period_s=1.0,  # so long a dead one is not replaced
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=config.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=_QUIET,
    )(Placed)
    return split.bind(config, kind, directory_of(config))
