"""Starts and ends the replicas of an application, in one Serve application for each kind of device.

Replicas have no plan, so those of one kind are interchangeable: a new plan for the same devices restarts none of them.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve import Application

from isobatch.deployments import ray_facts, resources
from isobatch.deployments.deployer.steps import DEPLOYER, ReplicaStates
from isobatch.deployments.replica.serve_replica import DEPLOYMENT

_FAILED = "DEPLOY_FAILED"
_GIVEN_UP = (_FAILED, "UNHEALTHY")
_GONE = ("NOT_STARTED", "DELETING", _FAILED)
# The beginning of Serve's message once it has given up. Earlier, an unhealthy deployment may report that "a replica
# failed to start", for instance on a node that was ending: Serve starts another one.
NONE_STARTED = "The deployment failed to start"


@dataclass(frozen=True)
class ServeFleet:
    """The applications `PREFIX.KIND`. They are not in the user's Serve file, so applying it again does not end them.

    While `leads()` is false, another deployer leads these replicas, and no number of them changes here.
    """

    prefix: str
    bind: Callable[[str, int], Application]
    needs: Callable[[str], resources.Resources]
    leads: Callable[[], bool]

    def states(self) -> dict[str, ReplicaStates]:
        applications = serve.status().applications
        return {
            ray_facts.kind_in(name): _states_of(status)
            for name, status in applications.items()
            if name.startswith(f"{self.prefix}.")
        }

    def scale_to(self, counts: Mapping[str, int]) -> None:
        if not self.leads():
            return
        applications = serve.status().applications
        names = {kind: f"{self.prefix}.{kind}" for kind in counts}
        states = {kind: applications[name].status.value for kind, name in names.items() if name in applications}
        existing = {kind for kind, state in states.items() if state not in _GONE}
        for kind in existing:
            ray_facts.scale(names[kind], DEPLOYMENT, counts[kind])
        delete_fleets(names[kind] for kind, state in states.items() if state == _FAILED and not counts[kind])
        targets = [
            serve.RunTarget(self.bind(kind, count), names[kind], route_prefix=None, external_scaler_enabled=True)
            for kind, count in counts.items()
            if count and kind not in existing
        ]
        if targets:
            serve.run_many(targets, wait_for_applications_running=False)

    def has_room(self, more: Mapping[str, int]) -> bool:
        needs = resources.needed(more, self.needs, ray_facts.nodes())
        return all(resources.first_fit(needs, ray_facts.free_resources()))

    def missing_devices(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Each kind is counted alone, on nodes without load, so a missing device does not exist at all."""
        nodes, missing = ray_facts.nodes(), dict[str, int]()
        for kind, count in counts.items():
            needs = resources.needed({kind: count}, self.needs, nodes)
            missing[kind] = sum(not fits for fits in resources.first_fit(needs, nodes))
        return {kind: count for kind, count in missing.items() if count}

    def delete(self) -> None:
        delete_fleets(f"{self.prefix}.{kind}" for kind in self.states())


def fleets_of(application: str, but: str = "") -> list[str]:
    """The applications with the replicas of a front application, except those with the prefix `but`."""
    return [
        name
        for name in ray_facts.undeclared_applications()
        if ray_facts.front_of(name) == application != name and not name.startswith(f"{but}.")
    ]


def delete_leftovers(application: str) -> bool:
    """Whether the application no longer has a deployer. Then its replicas are deleted, and its plan is forgotten."""
    if not ray_facts.is_gone(application, DEPLOYER):
        return False
    delete_fleets(fleets_of(application))
    ray_facts.forget(application)
    return True


def delete_fleets(names: Iterable[str]) -> None:
    """Delete these applications. Their replicas finish their launches first."""
    for name in names:
        with contextlib.suppress(Exception):
            ray_facts.delete_soon(name)


def _states_of(status: Any) -> ReplicaStates:
    deployments = list(status.deployments.values())
    states = [deployment.replica_states for deployment in deployments]
    running, stopping = (sum(counts.get(state, 0) for counts in states) for state in ("RUNNING", "STOPPING"))
    total = sum(sum(counts.values()) for counts in states)
    message = "\n".join([deployment.message for deployment in deployments] + [status.message]).strip()
    given_up = any(part.status.value in _GIVEN_UP for part in (status, *deployments))
    # A replica that has run before is no failure, because Serve replaces it.
    failed = message if given_up and NONE_STARTED in message else ""
    return ReplicaStates(running, total - running - stopping, stopping, failed)
