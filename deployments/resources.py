"""Amounts of Ray's resources: what a replica asks for, what devices nodes have, what fits where. No Ray is asked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deployments.config import AppConfig
from deployments.named import VIRTUAL

Resources = Mapping[str, float]  # amounts by Ray's name for them

KIND = "isobatch.io/kind"  # the label of a node by which its owner says what kind its devices are
_ACCELERATOR = "accelerator_type:"  # nodes have a resource of this name and their kind of GPU behind it
_TINY = 0.001  # of that resource: Ray's own way to ask for a node that has it
_ROUNDING = 1e-6

# What Serve gives a replica that does not say how many CPUs it wants.
DEFAULT_CPUS = 1.0

# What nodes have


def by_label(resources: Resources, node: Mapping[str, Any]) -> Resources:
    """The same resources, with the kind that the node's label names in place of what Ray makes of its GPUs' name.

    >>> by_label({"GPU": 2.0, "accelerator_type:A100": 1.0}, {"Labels": {"isobatch.io/kind": "a100-80g"}})
    {'GPU': 2.0, 'accelerator_type:A100-80G': 1.0}
    """
    if not (kind := node.get("Labels", {}).get(KIND)) or "GPU" not in resources:
        return resources
    told = {name: amount for name, amount in resources.items() if not name.startswith(_ACCELERATOR)}
    return told | {f"{_ACCELERATOR}{kind.upper()}": 1.0}


def total(nodes: Iterable[Resources]) -> dict[str, float]:
    """Of all nodes together."""
    found: dict[str, float] = {}
    for node in nodes:
        for name, amount in node.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def accelerators(resources: Iterable[str]) -> list[str]:
    """The kinds of GPU among the names of resources.

    >>> accelerators(["CPU", "accelerator_type:A100"])
    ['A100']
    """
    return [name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR)]


def devices_on(nodes: Iterable[Resources]) -> dict[str, int]:
    """Devices by kind.

    >>> devices_on([{"CPU": 8.0, "GPU": 4.0, "accelerator_type:V100": 1.0}, {"CPU": 2.0}])
    {'v100': 4, 'cpu': 10}
    """
    counts: dict[str, int] = {}
    cpus = 0.0
    for node in nodes:
        for kind in map(str.lower, accelerators(node)):
            counts[kind] = counts.get(kind, 0) + int(node.get("GPU", 0))
        cpus += node.get("CPU", 0)
    return counts | {"cpu": int(cpus)}


def declared(kind: str, nodes: Iterable[Resources]) -> Resources:
    """Where nodes declare how many devices of a kind they hold, by a resource of its name, a replica takes one of them.

    That is how virtual devices belong to a node, and are lost with it.
    """
    return {kind: 1.0} if any(kind in node for node in nodes) else {}


# What a replica asks for


def replica_options(config: AppConfig, kind: str, labelled: bool = False) -> dict[str, Any]:
    """How a replica on a device of this kind asks Ray; one of a virtual device asks for next to nothing.

    Where nodes are labelled, a GPU is found by the label: Ray's autoscaler knows labels of nodes that do not run yet,
    and a label can tell apart what has one name (`a100-40g`, `a100-80g`).
    """
    if config.backend == VIRTUAL:
        told = "cpus_per_replica" in config.model_fields_set
        return {"num_cpus": config.cpus_per_replica if told else 0.01}
    if kind == "cpu":
        return {"num_cpus": config.cpus_per_replica}
    return gpu_options(kind, labelled)


def gpu_options(kind: str, labelled: bool) -> dict[str, Any]:
    """How a replica asks Ray for a GPU of this kind."""
    return {"num_gpus": 1} | ({"label_selector": {KIND: kind}} if labelled else {"accelerator_type": kind.upper()})


def replica_needs(config: AppConfig, kind: str) -> dict[str, float]:
    """The same as amounts of Ray's resources.

    >>> replica_needs(AppConfig(), "a100")
    {'CPU': 1.0, 'GPU': 1, 'accelerator_type:A100': 0.001}
    """
    asked = replica_options(config, kind)
    needs = dict(asked_for(asked))
    if accelerator := asked.get("accelerator_type"):
        needs[f"{_ACCELERATOR}{accelerator}"] = _TINY
    return needs


def room_for(config: AppConfig, kind: str) -> tuple[Resources, Mapping[str, str]]:
    """What Ray's autoscaler must bring for one more replica on a device of this kind: resources, and a node's labels.

    A virtual device belongs to a node that declares it, or it would be there without any node.

    >>> room_for(AppConfig(), "a100-80g")
    ({'CPU': 1.0, 'GPU': 1}, {'isobatch.io/kind': 'a100-80g'})
    """
    options = replica_options(config, kind, labelled=True)
    needs = {**asked_for(options), **({kind: 1.0} if config.backend == VIRTUAL else {})}
    return {name: amount for name, amount in needs.items() if amount}, options.get("label_selector", {})


def asked_for(options: Mapping[str, Any]) -> Resources:
    """What Serve asks Ray for, for a replica with these options.

    >>> asked_for({"num_gpus": 1, "num_cpus": 0.5, "accelerator_type": "T4", "resources": {"k80": 1.0}})
    {'CPU': 0.5, 'GPU': 1, 'k80': 1.0}
    """
    amounts = {"CPU": options.get("num_cpus", DEFAULT_CPUS), "GPU": options.get("num_gpus", 0.0)}
    return amounts | (options.get("resources") or {})


def needed(counts: Mapping[str, int], needs: Callable[[str], Resources], nodes: Sequence[Resources]) -> list[Resources]:
    """What so many replicas on each kind of device need, each of them, on nodes that may declare their devices.

    >>> needed({"cpu": 1, "v100": 2}, lambda kind: {"CPU": 1.0}, [{"v100": 4.0}])
    [{'CPU': 1.0}, {'CPU': 1.0, 'v100': 1.0}, {'CPU': 1.0, 'v100': 1.0}]
    """
    each = {kind: {**needs(kind), **declared(kind, nodes)} for kind in counts}
    return [each[kind] for kind, count in counts.items() for _ in range(count)]


# What fits where


def less(has: Resources, held: Resources) -> Resources:
    """What a node has beside what is held there.

    >>> less({"CPU": 4.0, "GPU": 2.0}, {"CPU": 0.5, "GPU": 1.0, "v100": 0.0})
    {'CPU': 3.5, 'GPU': 1.0}
    """
    return {name: amount - held.get(name, 0.0) for name, amount in has.items()}


def first_fit(needs: Iterable[Resources], nodes: Iterable[Resources]) -> list[bool]:
    """Whether each need finds room: in turn, each takes it on the first node that has it.

    No need gets room that is not there. Where all needs are alike, as those of one kind are, none finds less room than
    it could. A node that had no room for a need has none for another like it, so it is not asked again: there may be
    thousands of both.

    >>> first_fit([{"GPU": 1.0}, {"GPU": 1.0}, {"CPU": 4.0}], [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}])
    [True, False, True]
    """
    free = [dict(node) for node in nodes]
    full: dict[tuple[tuple[str, float], ...], int] = {}  # by what is asked for: so many of the first nodes have no room
    return [_take(tuple((name, amount) for name, amount in need.items() if amount), free, full) for need in needs]


def _take(
    asked: tuple[tuple[str, float], ...],
    free: Sequence[dict[str, float]],
    full: dict[tuple[tuple[str, float], ...], int],
) -> bool:
    for number in range(full.get(asked, 0), len(free)):
        node = free[number]
        if all(node.get(name, 0.0) >= amount - _ROUNDING for name, amount in asked):
            for name, amount in asked:
                node[name] -= amount
            full[asked] = number
            return True
    full[asked] = len(free)
    return False
