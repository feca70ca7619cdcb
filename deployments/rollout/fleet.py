"""The replicas of each kind of device, as Serve applications: one for each kind, with as many replicas as are wanted.

A replica holds no plan, so all of a kind are alike: what a plan changes within a kind never touches them.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray._private.state import available_resources_per_node
from ray.serve import Application

from deployments.replicas.placed import DEPLOYMENT
from deployments.rollout.steps import Standing

Needs = Mapping[str, float]  # what one replica asks Ray for
_GIVEN_UP = ("DEPLOY_FAILED", "UNHEALTHY")
_GONE = ("NOT_STARTED", "DELETING", "DEPLOY_FAILED")


class ServeFleet:
    """Applications `PREFIX.KIND`, made here and not declared in the user's file: applying that again spares them."""

    def __init__(self, prefix: str, bind: Callable[[str, int], Application], needs: Callable[[str], Needs]) -> None:
        self.prefix = prefix
        self._bind = bind
        self._needs = needs

    def standing(self) -> dict[str, Standing]:
        found = serve.status().applications
        return {name.rpartition(".")[2]: _standing(found[name]) for name in found if self._is_ours(name)}

    def want(self, counts: Mapping[str, int]) -> None:
        found = serve.status().applications
        names = {kind: f"{self.prefix}.{kind}" for kind in counts}
        known = {kind for kind, name in names.items() if name in found and found[name].status.value not in _GONE}
        for kind in known:
            _scale(names[kind], counts[kind])
        targets = [
            serve.RunTarget(self._bind(kind, count), names[kind], route_prefix=None, external_scaler_enabled=True)
            for kind, count in counts.items()
            if count and kind not in known
        ]
        if targets:
            serve.run_many(targets, wait_for_applications_running=False)

    def has_room(self, more: Mapping[str, int]) -> bool:
        needs = [{**self._needs(kind), **declared(kind)} for kind, count in more.items() for _ in range(count)]
        return fits(needs, list(available_resources_per_node().values()))

    def delete(self) -> None:
        for kind in self.standing():
            _delete(f"{self.prefix}.{kind}")

    def _is_ours(self, name: str) -> bool:
        return name.rpartition(".")[0] == self.prefix


def declared(kind: str) -> dict[str, float]:
    """Where nodes declare how many devices of a kind they hold, by a resource of its name, a replica takes one of them.

    That is how virtual devices belong to a node, and are lost with it.
    """
    return {kind: 1.0} if any(kind in node["Resources"] for node in ray.nodes()) else {}


def delete_fleets(application: str, but: str = "") -> None:
    """All fleets of a front application, except those with this prefix. What they have begun they finish."""
    for name in serve.status().applications:
        prefix = name.rpartition(".")[0]
        if name.startswith(f"{application}.") and prefix != but:
            _delete(name)


def fits(needs: Iterable[Needs], nodes: Sequence[Needs]) -> bool:
    """Whether all can be placed on what the nodes have free: the first with room takes each, as nothing is mixed.

    >>> nodes = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}]
    >>> fits([{"GPU": 1.0}, {"CPU": 4.0, "GPU": 0.0}], nodes), fits([{"GPU": 1.0}, {"GPU": 1.0}], nodes)
    (True, False)
    """
    free = [dict(node) for node in nodes]
    for asked in needs:
        need = {name: amount for name, amount in asked.items() if amount}
        node = next((node for node in free if all(node.get(name, 0.0) >= need[name] - 1e-6 for name in need)), None)
        if node is None:
            return False
        for name in need:
            node[name] -= need[name]
    return True


def _delete(name: str) -> None:
    with contextlib.suppress(Exception):
        serve.delete(name, _blocking=False)


def _standing(status: Any) -> Standing:
    deployments = list(status.deployments.values())
    states = [each.replica_states for each in deployments]
    running, stopping = (sum(each.get(state, 0) for each in states) for state in ("RUNNING", "STOPPING"))
    said = "\n".join([each.message for each in deployments] + [status.message]).strip()
    given_up = any(each.status.value in _GIVEN_UP for each in (status, *deployments))
    cannot = given_up and "failed to start" in said  # not one that ran and will be replaced
    return Standing(running, sum(sum(each.values()) for each in states) - running - stopping, stopping, said * cannot)


def _scale(name: str, replicas: int) -> None:
    """What Serve's own endpoint for external scalers does; that needs the dashboard, which may be off."""
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client

    controller = _get_global_client()._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(DEPLOYMENT, name), replicas))
