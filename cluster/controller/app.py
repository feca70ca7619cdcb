"""What `import_path: cluster.controller.app:build` in a Serve file makes of its `args:`: an application of its own.

Serve restarts it when it dies. No `from __future__ import annotations` here: Serve reads the annotation of `build` to
turn `args:` into its config.
"""

from ray import serve
from ray.serve import Application

from cluster.controller.config import ControllerConfig
from cluster.controller.service import ControllerService
from deployments.logs import logging_config


def build(config: ControllerConfig) -> Application:
    deployment = serve.deployment(
        name="controller",
        num_replicas=1,  # two would change the plan against each other
        max_ongoing_requests=20,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1.0,  # a dead one is noticed after so long
        graceful_shutdown_timeout_s=5.0,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=logging_config(config.log_format, quiet=False),  # a decision is worth a line
    )(serve.ingress()(ControllerService))
    return deployment.bind(config)
