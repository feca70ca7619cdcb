"""Builds the applications of controllers from a Serve file, by their `import_path:`.

`isobatch.cluster.controller.app:build` is the controller of one application, `isobatch.cluster.controller.app:arbiter`
the arbiter of a fleet. Serve restarts them when they die. No `from __future__ import annotations` here: Serve reads the
annotations of these functions to turn `args:` into their config.
"""

from ray import serve
from ray.serve import Application

from isobatch.cluster.controller.config import ArbiterConfig, ControllerConfig
from isobatch.cluster.controller.fleet_service import FleetService
from isobatch.cluster.controller.service import ControllerService
from isobatch.deployments.serve_process import process_options

MOST_CALLS = 1000  # under way: those that force or preview a plan, and grants, wait until a roll-out has ended


def build(config: ControllerConfig) -> Application:
    return _bound("controller", ControllerService, config)


def arbiter(config: ArbiterConfig) -> Application:
    return _bound("arbiter", FleetService, config)


def _bound(name: str, service: type, config: ControllerConfig | ArbiterConfig) -> Application:
    deployment = serve.deployment(
        name=name,
        num_replicas=1,  # two would change the plan against each other
        max_ongoing_requests=MOST_CALLS,
        ray_actor_options={"num_cpus": 0},
        **process_options(config.log_format, 5.0, quiet=False),  # each decision is logged
    )(serve.ingress()(service))
    return deployment.bind(config)
