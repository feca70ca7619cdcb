"""Checks that Ray has the resources that the plans of a Serve file need, so that no application waits for ever.

Also reads which GPUs this machine has.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from isobatch.cluster.serving.serve_file import ServeFile, config_of, controllers, name_of, served
from isobatch.deployments.config import AppConfig, ServedConfig
from isobatch.deployments.graph import read_graph
from isobatch.deployments.resources import (
    KIND,
    Resources,
    accelerators,
    check_here,
    declared,
    devices_on,
    first_fit,
    needed,
    no_gpu,
    total,
)
from isobatch.deployments.sources import local
from isobatch.optimizer.plan import Plan, read_plan
from isobatch.profiles.devices import as_text, kind_of, whole_kind
from isobatch.profiles.errors import UserError

_REMEDIES = {
    "CPU": "plan for fewer devices, or let replicas share processors (cpus_per_replica: 0 in the Serve file)",
    "GPU": "plan for fewer devices",
}
_FEWER = "serve fewer applications, or add a node"  # the remedy where no application has a plan
_COUNTED = tuple(_REMEDIES)  # the resources that are compared
_ROUNDING = 1e-6
DRIVER_ANSWERS_WITHIN_S = 20.0


class Gpu(NamedTuple):
    """A GPU as NVIDIA's driver describes it."""

    name: str
    driver: str
    capability: str


def gpus_by_driver() -> list[Gpu]:
    """The GPUs that NVIDIA's driver shows; none without a driver."""
    if not (program := shutil.which("nvidia-smi")):
        return []
    query = [program, "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_ANSWERS_WITHIN_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"nvidia-smi has not answered for {error.timeout:g} s: the driver hangs") from error
    if result.returncode:
        raise UserError(f"nvidia-smi: {(result.stdout + result.stderr).strip().partition(chr(10))[0]}")
    rows = (line.split(",") for line in result.stdout.splitlines())  # and warnings
    return [Gpu(*map(str.strip, row)) for row in rows if len(row) == len(Gpu._fields)]


def gpu_label() -> dict[str, str] | None:
    """A node's label for the kind of this machine's GPUs; None: there are none, or several kinds.

    Without the label, Ray calls both sizes of an A100 by one name.
    """
    kinds = set[str]()
    with suppress(UserError):  # `isobatch doctor` names the driver's fault
        kinds = {kind_of(gpu.name) for gpu in gpus_by_driver()}
    return {KIND: kinds.pop()} if len(kinds) == 1 else None


def check_capacity(content: ServeFile, nodes: Sequence[Resources]) -> None:
    """Raise UserError about the first resource of which the nodes have too little."""
    configs = {name_of(application): config_of(application) for application in served(content)}
    planned = {name: each for name, each in configs.items() if each.plan or _devices(each)}
    settings = [each.get("args") or {} for each in controllers(content)]
    budgets = _budgets(planned, settings)
    _check_budgets(planned, budgets, nodes)
    grows = {each.get("application", "isobatch"): dict(each.get("grow_to") or {}) for each in settings}
    _check_growth(grows, budgets)
    needs = {name: _needs(config, nodes) for name, config in configs.items()}
    if len(needs) > 1:
        _check_together(needs, total(nodes), _REMEDIES if planned else dict.fromkeys(_REMEDIES, _FEWER))


def check_machine(content: ServeFile, cpus: float, count_gpus: Callable[[], int]) -> None:
    """Raise UserError if a file needs more CPUs or GPUs than the machine has, before Ray is started."""
    for config in map(config_of, served(content)):
        if not config.plan:
            check_here(config.device, count_gpus)
            _check_whole(config, {"CPU": cpus, "GPU": count_gpus() if config.device != "cpu" else 0}, "machine")
            continue
        amounts = _amounts(config)
        if (wanted := amounts["GPU"]) and wanted > (has := count_gpus()):
            remedy = "fewer devices" if has else "its processors"
            raise UserError(f"{config.plan} needs {wanted:g} GPUs; this machine has {has or 'none'}: plan for {remedy}")
        _check_enough(config.plan, "CPU", amounts["CPU"], cpus, f"machine has {cpus:g}")


def _amounts(config: ServedConfig, plan: Plan | None = None) -> dict[str, float]:
    """The CPUs and GPUs of an application with its fronts. `plan`: its plan, if it was made already."""
    groups = config.replica_groups(plan)
    if not groups:  # each front computes the network
        fronts = max(1.0, config.front_cpus)
        return {"CPU": fronts, "GPU": fronts * config.device.startswith("cuda")}
    amounts = {name: sum(count * needs.get(name, 0.0) for _, count, needs in groups) for name in _COUNTED}
    return amounts | {"CPU": config.front_cpus + amounts["CPU"]}


def _devices(config: ServedConfig) -> dict[str, int] | str:
    """The devices that an application may use by its `devices:`; a decoder has no such field."""
    return (config.devices if isinstance(config, AppConfig) else None) or {}


def _budgets(
    planned: Mapping[str, ServedConfig], controllers: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    """The most devices of each kind that each application may use, by its own and its controller's `args:`."""
    budgets: dict[str, dict[str, int]] = {}
    for name, config in planned.items():
        granted = dict(devices) if isinstance(devices := _devices(config), dict) else {}
        budgets[name] = read_plan(local(config.plan)).devices() if config.plan else granted
    for arguments in controllers:
        if (budget := budgets.get(arguments.get("application", "isobatch"))) is not None:
            devices = arguments.get("devices") or {}
            budget |= {kind: max(count, budget.get(kind, 0)) for kind, count in devices.items()}
    return budgets


def _check_budgets(
    planned: Mapping[str, ServedConfig], budgets: Mapping[str, Mapping[str, int]], nodes: Sequence[Resources]
) -> None:
    """Raise UserError if the applications of a cluster may together use more devices of a kind than it has."""
    for name, config in planned.items():
        if _devices(config) == "auto" and len(planned) > 1:
            others = ", ".join(sorted(planned.keys() - {name}))
            raise UserError(f"devices: auto of {name} would count what {others} may use: name how many of each kind")
    for whole in {whole_kind(kind)[0]: None for budget in budgets.values() for kind in budget}:
        holders = {name: held for name, budget in budgets.items() if (held := _held(whole, budget))}
        available = min(_available(whole, planned[name], nodes) for name in holders)
        wanted = sum(count / whole_kind(kind)[1] for held in holders.values() for kind, count in held.items())
        if len(holders) > 1 and wanted > available + _ROUNDING:
            claims = ", ".join(f"{name} may use {as_text(held)}" for name, held in holders.items())
            raise UserError(f"{whole}: this Ray has {available:g}, but {claims}: name fewer under devices:")


def _held(whole: str, budget: Mapping[str, int]) -> dict[str, int]:
    """The devices of a kind, whole and shared ones."""
    return {kind: count for kind, count in budget.items() if whole_kind(kind)[0] == whole}


def _check_growth(growth: Mapping[str, dict[str, int]], budgets: Mapping[str, dict[str, int]]) -> None:
    """Raise UserError if two applications may use a kind that can be added: a new device would belong to neither."""
    for name, kind in [(name, kind) for name, kinds in growth.items() for kind in kinds]:
        for other in sorted((growth.keys() | budgets.keys()) - {name}):
            if _held(whole_kind(kind)[0], growth.get(other, {}) | budgets.get(other, {})):
                raise UserError(f"grow_to: {kind} may come for {name}, so {other} cannot use that kind too")


def _available(kind: str, config: ServedConfig, nodes: Sequence[Resources]) -> float:
    """The number of Ray's devices of a kind; unlimited for kinds on CPUs and for virtual ones that no node declares."""
    if declared(kind, nodes):
        return sum(node.get(kind, 0) for node in nodes)
    needs = {group: each for group, _, each in config.replica_groups()}.get(kind, config.replica_needs(kind))
    return devices_on(nodes).get(kind, 0) if needs["GPU"] else inf


def _needs(config: ServedConfig, nodes: Sequence[Resources]) -> dict[str, float]:
    """The resources that an application needs; raise UserError if the cluster has less, even if nothing else runs."""
    has = total(nodes)
    owner = f"Ray has {_as_text(has)}"
    plan = read_graph(config).plan if isinstance(config, AppConfig) and config.planned else None
    groups = config.replica_groups(plan)
    missing = [kind for kind, _, needs in groups if set(accelerators(needs)) - set(accelerators(has))]
    if missing:
        raise UserError(f"{config.plan or 'the plan'} runs on {missing[0]}; this {owner}: plan for these devices")
    if config.device != "cpu" and not config.plan and not has.get("GPU"):
        raise no_gpu(config.device, f"this {owner}")
    needs, title = _amounts(config, plan), config.plan or ("the plan" if plan else "the network")
    _check_whole(config, has, "Ray")
    for name, amount in needs.items() if groups else ():
        _check_enough(title, name, amount, has.get(name, 0), owner)
    for kind, count, each in groups:
        _check_places(title, kind or config.device, count, each, nodes)
    return needs


def _check_places(plan: str, kind: str, count: int, each: Resources, nodes: Sequence[Resources]) -> None:
    """Raise UserError if the replicas of a kind do not fit on the nodes: each is on one node."""
    room = sum(first_fit(needed({kind: count}, lambda _: each, nodes), nodes))
    if room < count:
        raise UserError(
            f"{plan} needs {count} replicas on {kind}, each with {_as_text(each)} of one node; this Ray's nodes have "
            f"room for {room}: plan for these"
        )


def _check_whole(config: ServedConfig, has: Mapping[str, float], owner: str) -> None:
    """Raise UserError if there are too few CPUs or GPUs for replicas of a whole classifier."""
    whole = isinstance(config, AppConfig) and not config.planned
    for name, amount in _amounts(config).items() if whole else ():
        if amount > max(1.0, available := has.get(name, 0)):
            needs = f"replicas: {amount:g} needs {amount:g} {name}s"
            raise UserError(f"{needs}; this {owner} has {available:g}: take fewer")


def _check_enough(plan: str, name: str, amount: float, available: float, owner_has: str) -> None:
    if amount > available + _ROUNDING:
        raise UserError(f"{plan} needs {amount:g} {name}s with the front; this {owner_has}: {_REMEDIES[name]}")


def _check_together(needs: Mapping[str, Mapping[str, float]], has: Resources, remedies: Mapping[str, str]) -> None:
    for name in _COUNTED:
        amounts = {application: need[name] for application, need in needs.items() if need[name]}
        if sum(amounts.values()) > has.get(name, 0) + _ROUNDING:
            needed = ", ".join(f"{application} needs {amount:g}" for application, amount in amounts.items())
            raise UserError(
                f"{name}s: this Ray has {has.get(name, 0):g}, but with its front {needed}: {remedies[name]}"
            )


def _as_text(has: Resources) -> str:
    """
    >>> _as_text({"CPU": 2.0, "memory": 1e9, "GPU": 1.0, "accelerator_type:A100": 1.0})
    '2 CPUs, 1 GPUs (A100)'
    """
    kinds = accelerators(has)
    amounts = [f"{has.get(name, 0):g} {name}s" for name in _COUNTED]
    return ", ".join(amounts) + (f" ({', '.join(kinds)})" if kinds else "")
