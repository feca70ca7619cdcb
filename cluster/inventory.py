"""Which devices are there, by what Ray says of its nodes: of those that may be used, as many as these can hold."""

from collections.abc import Callable, Iterable, Mapping

Needs = Mapping[str, float]  # what one replica asks Ray for
FRONT: Needs = {"CPU": 1.0}


class Inventory:
    """Asked now and then. `most` are the devices that may be used, `needs` what a replica on a kind asks Ray for.

    Where nodes declare a resource by the name of a kind (`ray start --resources '{"v100": 2}'`), they hold so many of
    it: that is how virtual devices belong to a node, and are lost with it.
    """

    def __init__(
        self, most: Mapping[str, int], needs: Callable[[str], Needs], nodes: Callable[[], list[Needs]] | None = None
    ) -> None:
        self._most, self._needs, self._nodes = dict(most), needs, nodes or alive_nodes
        self._declared: set[str] = set()

    def __call__(self) -> dict[str, int]:
        nodes = self._nodes()
        self._declared |= {kind for kind in self._most for node in nodes if kind in node}
        needs = {kind: self._needs_of(kind) for kind in self._most}
        return held(self._most, needs, nodes)

    def _needs_of(self, kind: str) -> Needs:
        return {**self._needs(kind), kind: 1.0} if kind in self._declared else self._needs(kind)


def held(most: Mapping[str, int], needs: Mapping[str, Needs], nodes: Iterable[Needs]) -> dict[str, int]:
    """How many of each kind the nodes can hold beside a front, if nothing else runs there.

    >>> gpu = {"GPU": 1.0, "accelerator_type:V100": 0.001}
    >>> held({"v100": 4}, {"v100": gpu}, [{"CPU": 8, "GPU": 2, "accelerator_type:V100": 1}, {"CPU": 8, "GPU": 4}])
    {'v100': 2}
    """
    free = [dict(node) for node in nodes]
    _takes(FRONT, free)
    return {kind: sum(_takes(needs[kind], free) for _ in range(count)) for kind, count in most.items()}


def _takes(need: Needs, free: list[dict[str, float]]) -> bool:
    """Whether some node has room; if so, it is taken."""
    asked = {name: amount for name, amount in need.items() if amount}
    for node in free:
        if all(node.get(name, 0.0) >= amount - 1e-6 for name, amount in asked.items()):
            for name, amount in asked.items():
                node[name] -= amount
            return True
    return False


def alive_nodes() -> list[Needs]:
    """All that the nodes of the running Ray have, taken or not."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
