"""Starts and ends the replicas of an application, as one Serve application for each kind of device.

A replica holds no plan, so all of a kind are alike, and a change of plan within a kind never touches them.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from deployments import ray_facts, resources
from deployments.deployer.steps import ReplicaStates
from deployments.replica.serve_replica import DEPLOYMENT

_FAILED = "DEPLOY_FAILED"
_GIVEN_UP = (_FAILED, "UNHEALTHY")
_GONE = ("NOT_STARTED", "DELETING", _FAILED)


class ServeFleet:
    """The applications `PREFIX.KIND`. They are not in the user's Serve file, so that applying it again spares them."""

    def __init__(
        self, prefix: str, bind: Callable[[str, int], Application], needs: Callable[[str], resources.Resources]
    ) -> None:
        self.prefix = prefix
        self._bind = bind
        self._needs = needs

    def standing(self) -> dict[str, ReplicaStates]:
        found = serve.status().applications
        return {name.rpartition(".")[2]: _standing(found[name]) for name in found if self._is_ours(name)}

    def want(self, counts: Mapping[str, int]) -> None:
        found = serve.status().applications
        names = {kind: f"{self.prefix}.{kind}" for kind in counts}
        states = {kind: found[name].status.value for kind, name in names.items() if name in found}
        known = {kind for kind, state in states.items() if state not in _GONE}
        for kind in known:
            ray_facts.scale(names[kind], DEPLOYMENT, counts[kind])
        delete_fleets(names[kind] for kind, state in states.items() if state == _FAILED and not counts[kind])
        targets = [
            serve.RunTarget(self._bind(kind, count), names[kind], route_prefix=None, external_scaler_enabled=True)
            for kind, count in counts.items()
            if count and kind not in known
        ]
        if targets:
            serve.run_many(targets, wait_for_applications_running=False)

    def has_room(self, more: Mapping[str, int]) -> bool:
        wanted = resources.needed(more, self._needs, ray_facts.nodes())
        return all(resources.first_fit(wanted, ray_facts.free_resources()))

    def lacks(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Each kind is counted for itself, with what others hold: what is lacking here is not there at all."""
        nodes, found = ray_facts.nodes(), dict[str, int]()
        for kind, count in counts.items():
            wanted = resources.needed({kind: count}, self._needs, nodes)
            found[kind] = sum(not fits for fits in resources.first_fit(wanted, nodes))
        return {kind: lacking for kind, lacking in found.items() if lacking}

    def delete(self) -> None:
        for kind in self.standing():
            _delete(f"{self.prefix}.{kind}")

    def _is_ours(self, name: str) -> bool:
        return name.rpartition(".")[0] == self.prefix


def fleets_of(application: str, but: str = "") -> list[str]:
    """The applications of a front application's replicas, except those with this prefix."""
    return [
        name
        for name in serve.status().applications
        if ray_facts.front_of(name) == application != name and name.rpartition(".")[0] != but
    ]


def delete_fleets(names: Iterable[str]) -> None:
    """They finish their launches first."""
    for name in names:
        _delete(name)


def _delete(name: str) -> None:
    with contextlib.suppress(Exception):
        ray_facts.delete_soon(name)


def _standing(status: Any) -> ReplicaStates:
    deployments = list(status.deployments.values())
    states = [each.replica_states for each in deployments]
    running, stopping = (sum(each.get(state, 0) for each in states) for state in ("RUNNING", "STOPPING"))
    said = "\n".join([each.message for each in deployments] + [status.message]).strip()
    given_up = any(each.status.value in _GIVEN_UP for each in (status, *deployments))
    cannot = given_up and "failed to start" in said  # a replica that ran before does not count, as Serve replaces it
    return ReplicaStates(
        running, sum(sum(each.values()) for each in states) - running - stopping, stopping, said * cannot
    )
