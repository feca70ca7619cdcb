"""Serve's request router for splits: it reports the list of replicas to a listener, and sends calls to a named replica.

The session id of a call is the name of its replica.
"""

from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

PATH = "isobatch.deployments.front.router:NamedReplicaRouter"

ReplicaListener = Callable[[frozenset[str]], None]

listeners: dict[str, ReplicaListener] = {}


def watch(application: str, listener: ReplicaListener) -> None:
    """Call `listener` with the names of an application's replicas, now and whenever they change, in this process."""
    listeners[application] = listener


class NamedReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wanted = pending_request.metadata.session_id if pending_request else ""
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        # If the replica has just gone, another one answers with its own name. Without a candidate Serve would wait.
        return [named or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._notify()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._notify()

    def _notify(self) -> None:
        # Serve pickles this class by value, with a copy of its module's globals; the import reaches the real listeners.
        from isobatch.deployments.front.router import listeners

        if listener := listeners.get(self.app_name):
            listener(frozenset(replica_id.unique_id for replica_id in self.curr_replicas))
