"""Hand a Serve file to the Serve that runs, and wait until it answers."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cluster.serving.haproxy import ready
from cluster.serving.local import LocalRay
from cluster.serving.serve_file import ServeFile
from deployments.ray_facts import serve_client
from profiles.errors import UserError, first_wrong

FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
LOOK_EVERY_S = 0.25  # each look takes processor time of Serve, which is needed for what starts


def deploy(ray: LocalRay, content: ServeFile, patience_s: float, tell: Callable[[str], None] = lambda _: None) -> None:
    """Return when every application runs and HTTP reaches it. Meanwhile `tell` is called with what is starting."""
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        wrong = first_wrong(error)
        raise UserError(f"the Serve file is not valid: {wrong.place} = {wrong.value!r}: {wrong.reason}") from error
    client = _client(ray)
    names = [application.name for application in schema.applications]
    # The splits of what ran here before may fail while they end, which is no failure of this start.
    leaving = _splits_of(names, _applications())
    client.deploy_apps(schema)
    until_s = time.monotonic() + patience_s
    _wait_until_running(names, leaving, patience_s, tell)
    _wait_until_reachable(ray, client, until_s, patience_s)
    ready(ray.folder)


def _client(ray: LocalRay) -> Any:
    """A client of the Serve that is starting, as soon as its controller exists."""
    while (client := serve_client()) is None:
        if ray.serving.done():
            ray.serving.result()
        time.sleep(0.02)
    return client


def _applications() -> Mapping[str, Any]:
    from ray import serve

    found: Mapping[str, Any] = serve.status().applications
    return found


def _splits_of(fronts: Sequence[str], found: Iterable[str]) -> set[str]:
    """The applications that run the splits of these fronts: each is named after its front."""
    return {name for name in found if name.startswith(tuple(f"{front}." for front in fronts))}


def _wait_until_running(
    names: list[str], leaving: Collection[str], patience_s: float, tell: Callable[[str], None]
) -> None:
    deadline_s = time.monotonic() + patience_s
    while True:
        found = {name: each for name, each in _applications().items() if name not in leaving}
        tell(_progress(found))
        states = [found[name].status.value if name in found else "NOT_STARTED" for name in names]
        _raise_failure(names, found)
        if all(state == "RUNNING" for state in states):
            return
        if time.monotonic() > deadline_s:
            waiting = ", ".join(f"{name}: {state}" for name, state in zip(names, states, strict=True))
            raise UserError(
                f"not ready after {patience_s:.0f} s ({waiting}): are there enough CPUs and GPUs for it, or must it "
                "have more time (--patience-s)?"
            )
        time.sleep(LOOK_EVERY_S)


def _wait_until_reachable(ray: LocalRay, client: Any, until_s: float, patience_s: float) -> None:
    """Wait for HTTP. Serve itself gives up after a minute, or when it starts its proxy anew; both may be too soon."""
    from ray.exceptions import RayActorError

    with suppress(TimeoutError, RayActorError):
        ray.serving.result()
    while True:
        try:
            return client.wait_for_proxies_serving(wait_for_applications_running=True)  # type: ignore[no-any-return]
        except TimeoutError as error:
            if time.monotonic() > until_s:
                raise UserError(f"HTTP cannot be reached after {patience_s:.0f} s: {error}") from error


def _raise_failure(names: Sequence[str], found: Mapping[str, Any]) -> None:
    """Raise the reason of the first failure; splits come before their front, which cannot know why they failed."""
    for name in [*sorted(_splits_of(names, found)), *names]:
        if name in found and found[name].status.value in FAILED:
            raise UserError(f"application {name!r} did not start: {_reason(found[name])}")


def _progress(found: Mapping[str, Any]) -> str:
    """Which applications are starting, and how many of their replicas run; a plan's splits are applications too."""
    parts = []
    for name, application in found.items():
        states = [deployment.replica_states for deployment in application.deployments.values()]
        running, wanted = sum(each.get("RUNNING", 0) for each in states), sum(sum(each.values()) for each in states)
        parts.append(f"{name} {running}/{wanted}")
    return f"Starting {', '.join(parts)}" if parts else "Starting"


def _reason(status: Any) -> str:
    """The last line of what a replica raised, which is the error itself."""
    messages: list[str] = [deployment.message for deployment in status.deployments.values()] + [status.message]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return (errors or lines or ["no reason was given"])[-1].removeprefix("profiles.errors.UserError: ")
