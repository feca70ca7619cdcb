"""Builds the controller's own application from a Serve file: `import_path: isobatch.cluster.controller.app:build`.

Serve restarts it when it dies. No `from __future__ import annotations` here: Serve reads the annotation of `build` to
turn `args:` into its config.
"""

from ray import serve
from ray.serve import Application

from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.service import ControllerService
from isobatch.deployments.serve_process import process_options


def build(config: ControllerConfig) -> Application:
    deployment = serve.deployment(
        name="controller",
        num_replicas=1,  # two controllers would change the plan against each other
        max_ongoing_requests=20,
        ray_actor_options={"num_cpus": 0},
        **process_options(config.log_format, 5.0, quiet=False),  # each decision is logged
    )(serve.ingress()(ControllerService))
    return deployment.bind(config)
