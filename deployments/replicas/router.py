"""Serve's request router for splits: a call goes to the very replica that the dispatcher chose.

The choice travels as the call's session id. Who there is to choose from is told to whoever watches.
"""

from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

PATH = "deployments.replicas.router:ChosenReplicaRouter"

Listener = Callable[[frozenset[str]], None]

listeners: dict[str, Listener] = {}


def watch(application: str, listener: Listener) -> None:
    """Call `listener` with the names of an application's replicas, now and whenever they change, in this process."""
    listeners[application] = listener


class ChosenReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wanted = pending_request.metadata.session_id if pending_request else ""
        chosen = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        # The chosen one may just have gone: any other can run the call, which carries all it needs.
        return [chosen or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        # Serve carries this class over by value, with a copy of its module: the true one is where others can reach it.
        from deployments.replicas.router import listeners

        if listener := listeners.get(self.app_name):
            listener(frozenset(replica_id.unique_id for replica_id in self.curr_replicas))
