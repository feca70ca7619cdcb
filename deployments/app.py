"""The Ray Serve application: the only file that binds.

No `from __future__ import annotations` here: Serve reads the annotation of `build` to turn `args:` into an AppConfig.
"""

import time

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from deployments.config import AppConfig
from deployments.http import create_api
from deployments.service import Service


class Front:
    """One replica: a network behind HTTP."""

    def __init__(self, config: AppConfig) -> None:
        self._service = Service(config, clock=time.perf_counter)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(self._service)

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.close()


def build(config: AppConfig) -> Application:
    """What `import_path: deployments.app:build` in a Serve file makes of its `args:`."""
    front = serve.deployment(
        name="front",
        # Our own queue refuses with a reason; Serve's must not cut in before it.
        max_ongoing_requests=2 * config.max_waiting,
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if config.device.startswith("cuda") else 0},
        graceful_shutdown_timeout_s=config.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config={"enable_access_log": False},
    )(serve.ingress()(Front))
    return front.bind(config)
