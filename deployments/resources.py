"""Amounts of Ray's resources: what replicas need, what nodes have, and what fits. Makes no calls to Ray."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import floor
from pathlib import Path
from typing import Any

from isobatch.profiles.devices import kind_of, whole_kind
from isobatch.profiles.errors import UserError

Resources = Mapping[str, float]  # amounts by Ray's names of resources

KIND = "isobatch.io/kind"  # a node's label for the kind of its devices, set by the owner of the cluster
_ACCELERATOR = "accelerator_type:"  # a node's resource for its kind of GPU has this prefix
_ACCELERATOR_AMOUNT = 0.001  # the amount of that resource by which Ray requests a node that has it
_RAY_NAMES = {"a6000": "RTX-A6000"}  # Ray's names of kinds that are not the kind in capitals
_ROUNDING = 1e-6
DEFAULT_CPUS = 1.0  # Serve's default for a replica without num_cpus
AMOUNTS = ("num_gpus", "num_cpus")  # of devices, among Ray's options
RAY_UNITS = 10_000  # Ray counts resources in ten-thousandths

# What this machine has


def gpus_here() -> int:
    """The number of this machine's GPUs that torch can use. Without a GPU's driver, torch need not be loaded."""
    if not any(path for name in ("nvidia*", "nvmap", "dxg", "kfd") for path in Path("/dev").glob(name)):
        return 0
    import torch

    return torch.cuda.device_count()


def check_here(device: str, count: Callable[[], int]) -> None:
    """Raise UserError if this machine does not have the device.

    >>> check_here("cuda:0", lambda: 1)
    """
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= (gpus := count()):
        raise no_gpu(device, f"this machine has {gpus or 'no'} GPU{'s' * (gpus > 1)}")


def no_gpu(device: str, owner: str) -> UserError:
    return UserError(f"device = {device!r}: {owner}: with device cpu, processors compute the network")


# What nodes have


def by_label(resources: Resources, node: Mapping[str, Any]) -> Resources:
    """A node's resources, with the kind of its GPUs as plans name it: from the node's label, else from Ray's name.

    Plans name kinds in small letters. A label with capitals fits none of them, so it stays as it is.

    >>> by_label({"GPU": 2.0, "accelerator_type:A100": 1.0}, {"Labels": {"isobatch.io/kind": "a100-40g"}})
    {'GPU': 2.0, 'accelerator_type:A100-40G': 1.0}
    >>> by_label({"GPU": 1.0, "accelerator_type:RTX-A6000": 1.0}, {})
    {'GPU': 1.0, 'accelerator_type:A6000': 1.0}
    """
    names = accelerators(resources)
    kind = node.get("Labels", {}).get(KIND) or (kind_of(names[0]) if names else None)
    if not kind or "GPU" not in resources:
        return resources
    others = {name: amount for name, amount in resources.items() if not name.startswith(_ACCELERATOR)}
    name = kind.upper() if kind == kind.lower() else f"{KIND}={kind}"
    return others | {f"{_ACCELERATOR}{name}": 1.0}


def total(nodes: Iterable[Resources]) -> dict[str, float]:
    every = list(nodes)
    names = dict.fromkeys(name for node in every for name in node)
    return {name: sum(node.get(name, 0.0) for node in every) for name in names}


def accelerators(resources: Iterable[str]) -> list[str]:
    """The kinds of GPU among the names of resources.

    >>> accelerators(["CPU", "accelerator_type:A100"])
    ['A100']
    """
    return [name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR)]


def devices_on(nodes: Iterable[Resources]) -> dict[str, int]:
    """The number of devices by kind.

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
    """The resource that a replica takes of its node's declared devices: one named after the kind, if any node has it.

    Virtual devices belong to a node in this way, and are lost with it.
    """
    amount = of_declared(kind)
    return amount if any(amount.keys() & node.keys() for node in nodes) else {}


def of_declared(kind: str) -> Resources:
    """
    >>> of_declared("v100"), of_declared("v100/2")
    ({'v100': 1.0}, {'v100': 0.5})
    """
    whole, sharers = whole_kind(kind)
    return {whole: 1 / sharers}


def devices_of_a_node(kind: str, nodes: Iterable[Resources]) -> int:
    """The most devices of a kind on one node; 0: no node has any, as of virtual ones.

    >>> devices_of_a_node("v100", [{"CPU": 8.0, "GPU": 4.0, "accelerator_type:V100": 1.0}, {"v100": 2.0}])
    4
    """
    return int(max((node.get(kind) or devices_on([node]).get(kind, 0) for node in nodes if kind != "cpu"), default=0))


# What replicas need


def gpu_options(kind: str, labelled: bool) -> dict[str, Any]:
    """Ray's options for a replica on a GPU of this kind.

    With `labelled` nodes, it is requested by the label: Ray's autoscaler knows the labels of nodes that do not run yet,
    and labels distinguish devices that Ray gives the same name (`a100-40g`, `a100-80g`).

    >>> gpu_options("a6000", labelled=False)
    {'num_gpus': 1, 'accelerator_type': 'RTX-A6000'}
    >>> gpu_options("a100-40g", labelled=True)
    {'num_gpus': 1, 'label_selector': {'isobatch.io/kind': 'a100-40g'}}
    """
    if labelled:
        return {"num_gpus": 1, "label_selector": {KIND: kind}}
    return {"num_gpus": 1, "accelerator_type": _RAY_NAMES.get(kind, kind.upper())}


def shared_by(sharers: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one of several replicas that share a device. Ray counts amounts in ten-thousandths.

    >>> shared_by(3, {"num_gpus": 1})
    {'num_gpus': 0.3333, 'num_cpus': 0.3333}
    """
    if sharers == 1:
        return dict(options)
    amounts = {"num_cpus": DEFAULT_CPUS} | {name: each for name, each in options.items() if name in AMOUNTS}
    return {**options, **{name: floor(RAY_UNITS * each / sharers) / RAY_UNITS for name, each in amounts.items()}}


def needs_of(options: Mapping[str, Any], kind: str) -> dict[str, float]:
    """The resources that a replica with these options needs on a device of this kind.

    >>> needs_of(gpu_options("a100", labelled=False), "a100")
    {'CPU': 1.0, 'GPU': 1, 'accelerator_type:A100': 0.001}
    """
    whole, _ = whole_kind(kind)
    by_name = {f"{_ACCELERATOR}{whole.upper()}": _ACCELERATOR_AMOUNT} if "accelerator_type" in options else {}
    return {**requested_amounts(options), **by_name}


def requested_amounts(options: Mapping[str, Any]) -> Resources:
    """The resources that Serve requests from Ray for a replica with these options.

    >>> requested_amounts({"num_gpus": 1, "num_cpus": 0.5, "accelerator_type": "T4", "resources": {"k80": 1.0}})
    {'CPU': 0.5, 'GPU': 1, 'k80': 1.0}
    """
    amounts = {"CPU": options.get("num_cpus", DEFAULT_CPUS), "GPU": options.get("num_gpus", 0.0)}
    return amounts | (options.get("resources") or {})


def needed(counts: Mapping[str, int], needs: Callable[[str], Resources], nodes: Sequence[Resources]) -> list[Resources]:
    """The resources that each of these replicas needs, on nodes that may declare their devices.

    >>> needed({"cpu": 1, "v100": 2}, lambda kind: {"CPU": 1.0}, [{"v100": 4.0}])
    [{'CPU': 1.0}, {'CPU': 1.0, 'v100': 1.0}, {'CPU': 1.0, 'v100': 1.0}]
    """
    by_kind = {kind: {**needs(kind), **declared(kind, nodes)} for kind in counts}
    return [by_kind[kind] for kind, count in counts.items() for _ in range(count)]


# What fits where


def first_fit(needs: Iterable[Resources], nodes: Iterable[Resources]) -> list[bool]:
    """Whether each need fits, if each in turn is placed on the first node with room for it.

    If all needs are equal, as those of one kind are, no other placement fits more of them. A node without room for a
    need has none for the next equal one, so it is not checked again: there may be thousands of both.

    >>> first_fit([{"GPU": 1.0}, {"GPU": 1.0}, {"CPU": 4.0}], [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}])
    [True, False, True]
    """
    free = [dict(node) for node in nodes]
    full = dict[Any, int]()  # by need: the number of nodes, from the first, without room for it

    def place(need: tuple[tuple[str, float], ...]) -> bool:
        """Take the need's amounts from the first node that has them; returns whether there is one."""
        for number in range(full.get(need, 0), len(free)):
            node = free[number]
            if all(node.get(name, 0.0) >= amount - _ROUNDING for name, amount in need):
                for name, amount in need:
                    node[name] -= amount
                full[need] = number
                return True
        full[need] = len(free)
        return False

    return [place(tuple((name, amount) for name, amount in need.items() if amount)) for need in needs]
