"""Applies a Serve file to the running Serve, and waits until every application answers."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from isobatch.cluster.serving.haproxy import ready
from isobatch.cluster.serving.local import LocalRay
from isobatch.cluster.serving.serve_file import ServeFile, check_apart, name_of
from isobatch.deployments.ray_facts import front_of, serve_client
from isobatch.profiles.errors import UserError, first_wrong

FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
LOOK_EVERY_S = 0.25  # each status call takes processor time that starting applications need
CLIENT_CHECK_S = 0.02  # how often to check whether Serve's controller exists


def beside(content: ServeFile, running: list[dict[str, Any]], others: str | None) -> ServeFile:
    """The same content, with the running applications that are to stay: Serve ends those that a file does not name.

    `running` are the applications that come from Serve files. `others`: whether those of them that are not in this file
    stay ("keep") or end ("end").
    """
    names = [name_of(application) for application in content["applications"]]
    more = [{"args": {}} | application for application in running if name_of(application) not in names]
    if more and others is None:
        choice = "--others keep leaves them, --others end ends them"
        raise UserError(f"{', '.join(map(name_of, more))}: running there and not in the file: {choice}")
    complete = content | {"applications": [*(more if others == "keep" else ()), *content["applications"]]}
    check_apart(complete)
    return complete


def deploy(
    ray: LocalRay, content: ServeFile, patience_s: float, show_progress: Callable[[str], None] = lambda _: None
) -> None:
    """Returns when every application runs and HTTP reaches it."""
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        wrong = first_wrong(error)
        raise UserError(f"the Serve file is not valid: {wrong.place} = {wrong.value!r}: {wrong.reason}") from error
    while (client := serve_client()) is None:  # until Serve's controller exists
        if ray.serving.done():
            ray.serving.result()
        time.sleep(CLIENT_CHECK_S)
    names = [application.name for application in schema.applications]
    # Splits of applications that ran here before may fail while they end, which is no failure of this start.
    leaving = _splits_of(names, _applications())
    client.deploy_apps(schema)
    until_s = time.monotonic() + patience_s
    _wait_until_running(names, leaving, patience_s, show_progress)
    _wait_until_reachable(ray, client, until_s, patience_s)
    ready(ray.folder)


def _applications() -> Mapping[str, Any]:
    from ray import serve

    applications: Mapping[str, Any] = serve.status().applications
    return applications


def _splits_of(fronts: Sequence[str], applications: Iterable[str]) -> set[str]:
    """The applications that run the splits of these fronts: each is named after its front.

    >>> _splits_of(["shop", "shop.de"], ["shop", "shop.de", "shop.3f9a01.v100", "other.3f9a01.v100"])
    {'shop.3f9a01.v100'}
    """
    return {name for name in applications if (front := front_of(name)) != name and front in fronts}


def _wait_until_running(
    names: list[str], leaving: Collection[str], patience_s: float, show_progress: Callable[[str], None]
) -> None:
    deadline_s = time.monotonic() + patience_s
    while True:
        applications = {name: status for name, status in _applications().items() if name not in leaving}
        show_progress(_progress(applications))
        states = [applications[name].status.value if name in applications else "NOT_STARTED" for name in names]
        # Splits come before their front, which cannot know why they failed.
        for name in [*sorted(_splits_of(names, applications)), *names]:
            if name in applications and applications[name].status.value in FAILED:
                raise UserError(f"application {name!r} did not start: {_reason(applications[name])}")
        if all(state == "RUNNING" for state in states):
            return
        if time.monotonic() > deadline_s:
            waiting = ", ".join(f"{name}: {state}" for name, state in zip(names, states, strict=True))
            more = "are there enough CPUs and GPUs, or does it need more time (--patience-s)?"
            raise UserError(f"not ready after {patience_s:.0f} s ({waiting}): {more}")
        time.sleep(LOOK_EVERY_S)


def _wait_until_reachable(ray: LocalRay, client: Any, until_s: float, patience_s: float) -> None:
    """Wait for HTTP. Serve itself gives up after a minute, or when it restarts its proxy; both may be too early."""
    from ray.exceptions import RayActorError

    with suppress(TimeoutError, RayActorError):
        ray.serving.result()
    while True:
        try:
            return client.wait_for_proxies_serving(wait_for_applications_running=True)  # type: ignore[no-any-return]
        except TimeoutError as error:
            if time.monotonic() > until_s:
                raise UserError(f"HTTP cannot be reached after {patience_s:.0f} s: {error}") from error


def _progress(applications: Mapping[str, Any]) -> str:
    """The applications with the number of running replicas of each. A plan's splits are applications too."""
    parts = []
    for name, application in applications.items():
        states = [deployment.replica_states for deployment in application.deployments.values()]
        running = sum(counts.get("RUNNING", 0) for counts in states)
        parts.append(f"{name} {running}/{sum(sum(counts.values()) for counts in states)}")
    return f"Starting {', '.join(parts)}" if parts else "Starting"


def _reason(status: Any) -> str:
    """The last line of a replica's traceback, which is the error itself."""
    messages: list[str] = [deployment.message for deployment in status.deployments.values()] + [status.message]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return (errors or lines or ["no reason was given"])[-1].removeprefix("isobatch.profiles.errors.UserError: ")
