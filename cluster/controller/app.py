"""The controller as a small Serve application of its own: restarted by Serve if it dies, asked over HTTP.

No `from __future__ import annotations` here: Serve reads the annotation of `build` to turn `args:` into its config.
"""

import asyncio
from functools import partial

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from cluster.controller.api import create_api
from cluster.controller.config import ControllerConfig
from cluster.controller.live import allowed, controller_of, lead
from cluster.controller.loop import Controller
from cluster.inventory import Inventory
from cluster.rollout import RunningApplication
from deployments.config import AppConfig
from deployments.front.keys import key_in
from deployments.graph import profile_of
from deployments.replicas.placed import needs
from deployments.rollout.deployer import DEPLOYER

AGAIN_S = 1.0


class Steering:
    """One replica: the loop, and who asks about it."""

    def __init__(self, config: ControllerConfig) -> None:
        self.config, self.name, self.key = config, config.application, key_in(config.api_key_variable)
        self.controller: Controller | None = None
        self.waits_for = "the application to run"

    async def lead(self) -> None:
        while self.controller is None:
            try:
                self.controller = await self._begin()
            except Exception as error:
                self.waits_for = f"the application to run ({type(error).__name__}: {error})"
                await asyncio.sleep(AGAIN_S)
        await lead(self.controller, self.config.look_every_s)

    async def _begin(self) -> Controller:
        deployer = serve.get_deployment_handle(DEPLOYER, self.config.application)
        app_config: AppConfig = await deployer.config.remote()
        profile = profile_of(app_config)
        running = await RunningApplication(self.config.application).plan()
        inventory = Inventory(allowed(self.config, app_config, profile), partial(needs, app_config))
        application = RunningApplication(self.config.application, inventory)
        await application.observe()  # what was counted before is not of the first window: it may be of hours ago
        return controller_of(self.config, app_config, profile, application, running)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(self)


def build(config: ControllerConfig) -> Application:
    """What `import_path: cluster.controller.app:build` in a Serve file makes of its `args:`."""
    deployment = serve.deployment(
        name="controller",
        num_replicas=1,  # two would pull in two directions
        max_ongoing_requests=20,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=5.0,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )(serve.ingress()(Steering))
    return deployment.bind(config)
