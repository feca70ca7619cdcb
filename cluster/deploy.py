"""Hand a Serve file to the Serve that runs, and wait until it answers."""

import time
from typing import Any

from cluster.local import LocalRay
from cluster.serve_file import ServeFile
from profiles.errors import UserError

FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


def deploy(ray: LocalRay, content: ServeFile, patience_s: float) -> None:
    """Return when every application runs and HTTP reaches it."""
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(f"the Serve file is not valid: {field} = {first['input']!r}: {first['msg']}") from error
    client = _client(ray)
    client.deploy_apps(schema)
    _wait_until_running([application.name for application in schema.applications], patience_s)
    ray.serving.result()
    client.wait_for_proxies_serving(wait_for_applications_running=True)


def _client(ray: LocalRay) -> Any:
    """A client of the Serve that starts, as soon as its controller is there."""
    from ray.serve.context import _get_global_client

    while (client := _get_global_client(raise_if_no_controller_running=False)) is None:
        if ray.serving.done():
            ray.serving.result()
        time.sleep(0.02)
    return client


def _wait_until_running(names: list[str], patience_s: float) -> None:
    from ray import serve

    deadline_s = time.monotonic() + patience_s
    while True:
        found = serve.status().applications
        states = [found[name].status.value if name in found else "NOT_STARTED" for name in names]
        for name, state in zip(names, states, strict=True):
            if state in FAILED:
                raise UserError(f"application {name!r} did not start: {_reason(found[name])}")
        if all(state == "RUNNING" for state in states):
            return
        if time.monotonic() > deadline_s:
            waiting = ", ".join(f"{name}: {state}" for name, state in zip(names, states, strict=True))
            raise UserError(f"not ready after {patience_s:.0f} s ({waiting}): are there enough CPUs and GPUs for it?")
        time.sleep(0.1)


def _reason(status: Any) -> str:
    """The last line of what a replica raised, which is the error itself."""
    messages: list[str] = [deployment.message for deployment in status.deployments.values()] + [status.message]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return (errors or lines or ["no reason was given"])[-1].removeprefix("profiles.errors.UserError: ")
