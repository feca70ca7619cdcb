"""What a deployer remembers when it is restarted: the plan that its fronts follow. Kept where Serve keeps its state."""

import json
from dataclasses import asdict, dataclass

from ray.experimental import internal_kv

_NAMESPACE = "isobatch"


@dataclass(frozen=True)
class Memory:
    """Of one application: its fleet, and the plan that its fronts follow.

    `origin` is what the user's file said of plans when this was written: another file means another plan.
    """

    fleet: str
    origin: str
    version: int
    plan: str
    ended: bool = False  # whoever wrote it has gone, with all its fronts

    def keep(self, application: str) -> None:
        internal_kv._internal_kv_put(application, json.dumps(asdict(self)), overwrite=True, namespace=_NAMESPACE)


def recall(application: str) -> Memory | None:
    kept = internal_kv._internal_kv_get(application, namespace=_NAMESPACE)
    return Memory(**json.loads(kept)) if kept else None


def forget(application: str) -> None:
    internal_kv._internal_kv_del(application, namespace=_NAMESPACE)
