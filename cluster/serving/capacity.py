"""Checks that Ray has the resources that the plans of a Serve file need, so that no application waits for ever."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path

from isobatch.cluster.serving.serve_file import ServeFile, config_of, controllers, name_of, served
from isobatch.deployments.config import AppConfig
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.graph import Graph, read_graph
from isobatch.deployments.resources import (
    Resources,
    accelerators,
    declared,
    devices_on,
    replica_needs,
    requested_amounts,
    total,
)
from isobatch.optimizer.plan import Plan, read_plan
from isobatch.profiles.errors import UserError

_REMEDIES = {
    "CPU": "plan for fewer devices, or let replicas share processors (cpus_per_replica: 0 in the Serve file)",
    "GPU": "plan for fewer devices",
}
_COUNTED = tuple(_REMEDIES)  # the resources that are compared
_NO_GPU = "device = {device!r}: {owner}: with device cpu, processors compute the network"
_ROUNDING = 1e-6


def check_capacity(content: ServeFile, nodes: Sequence[Resources]) -> None:
    """Raise UserError about the first resource of which the nodes have too little."""
    all_configs = {name_of(application): config_of(application) for application in served(content)}
    configs = {name: config for name, config in all_configs.items() if isinstance(config, AppConfig)}
    planned = {name: config for name, config in configs.items() if config.planned}
    budgets = _budgets(planned, content)
    _check_budgets(planned, budgets, nodes)
    _check_growth(_growth(content), budgets)
    has = total(nodes)
    needs = {name: _needs(config, read_graph(config), has) for name, config in planned.items()}
    needs |= {name: _alone(config) for name, config in configs.items() if not config.planned}
    needs |= {name: _decoding(config, has) for name, config in all_configs.items() if isinstance(config, DecoderConfig)}
    for config in configs.values():
        if not config.planned and config.device != "cpu" and not has.get("GPU"):
            raise UserError(_NO_GPU.format(device=config.device, owner=f"this Ray has {_as_text(has)}"))
    if len(needs) > 1:
        _check_together(needs, has)


def check_processors(content: ServeFile, cpus: float) -> None:
    """Raise UserError if the plan of a file needs more CPUs than the machine has, before Ray is started."""
    planned = {each.plan: _planned_amounts(each) for each in map(config_of, served(content)) if each.plan}
    for plan, amounts in planned.items():
        _check_enough(plan, "CPU", amounts["CPU"], cpus, f"machine has {cpus:g}")


def check_gpus(content: ServeFile, count: Callable[[], int]) -> None:
    """Raise UserError if a file needs a GPU and the machine has none, before Ray is started."""
    for config in map(config_of, served(content)):
        needed = _planned_amounts(config)["GPU"] if config.plan else float(config.device != "cpu")
        if needed and not count():
            if config.plan:
                raise UserError(f"{config.plan} needs {needed:g} GPUs; this machine has none: plan for its processors")
            raise UserError(_NO_GPU.format(device=config.device, owner="this machine has no GPU"))


def _planned_amounts(config: AppConfig | DecoderConfig) -> dict[str, float]:
    """The resources of an application with a plan."""
    if isinstance(config, DecoderConfig):
        return _amounts_of_decoder(config)
    return _amounts(config, read_plan(Path(str(config.plan))))


def _budgets(planned: Mapping[str, AppConfig], content: ServeFile) -> dict[str, dict[str, int]]:
    """The most devices of each kind that each application may use, by its own and its controller's `args:`."""
    budgets = {name: _configured_devices(config) for name, config in planned.items()}
    for arguments in (controller.get("args") or {} for controller in controllers(content)):
        budget = budgets.get(arguments.get("application", "isobatch"))
        if budget is not None:
            devices = arguments.get("devices") or {}
            budget |= {kind: max(count, budget.get(kind, 0)) for kind, count in devices.items()}
    return budgets


def _configured_devices(config: AppConfig) -> dict[str, int]:
    if config.plan:
        return read_plan(Path(config.plan)).devices()
    return dict(config.devices) if isinstance(config.devices, dict) else {}


def _check_budgets(
    planned: Mapping[str, AppConfig], budgets: Mapping[str, Mapping[str, int]], nodes: Sequence[Resources]
) -> None:
    """Raise UserError if the applications of a cluster may together use more devices of a kind than it has."""
    for name, config in planned.items():
        if config.devices == "auto" and len(planned) > 1:
            others = ", ".join(sorted(planned.keys() - {name}))
            raise UserError(f"devices: auto of {name} would count what {others} may use: name how many of each kind")
    for kind in {kind: None for budget in budgets.values() for kind in budget}:
        holders = {name: budget[kind] for name, budget in budgets.items() if kind in budget}
        available = min(_available(kind, planned[name], nodes) for name in holders)
        if len(holders) > 1 and sum(holders.values()) > available:
            claims = ", ".join(f"{name} may use {count}" for name, count in holders.items())
            raise UserError(f"{kind}: this Ray has {available:g}, but {claims}: name fewer under devices:")


def _growth(content: ServeFile) -> dict[str, dict[str, int]]:
    """The devices, by kind, that Ray's autoscaler may add for each application."""
    controlled = (controller.get("args") or {} for controller in controllers(content))
    return {arguments.get("application", "isobatch"): dict(arguments.get("grow_to") or {}) for arguments in controlled}


def _check_growth(growth: Mapping[str, Mapping[str, int]], budgets: Mapping[str, Mapping[str, int]]) -> None:
    """Raise UserError if two applications may use a kind that can be added: a new device would belong to neither."""
    for name, kind in [(name, kind) for name, kinds in growth.items() for kind in kinds]:
        for other in sorted((growth.keys() | budgets.keys()) - {name}):
            if kind in growth.get(other, {}) or kind in budgets.get(other, {}):
                raise UserError(f"grow_to: {kind} may come for {name}, so {other} cannot use that kind too")


def _available(kind: str, config: AppConfig, nodes: Sequence[Resources]) -> float:
    """The number of Ray's devices of a kind; unlimited for kinds on CPUs and for virtual ones that no node declares."""
    if declared(kind, nodes):
        return sum(node.get(kind, 0) for node in nodes)
    return devices_on(nodes).get(kind, 0) if replica_needs(config, kind)["GPU"] else inf


def _needs(config: AppConfig, graph: Graph, has: Resources) -> dict[str, float]:
    """The resources that a plan needs; raise UserError if the cluster has less, even if nothing else runs."""
    plan = config.plan or "the plan"
    for kind in graph.plan.devices():
        if not set(accelerators(replica_needs(config, kind))) <= set(accelerators(has)):
            raise UserError(f"{plan} runs on {kind}; this Ray has {_as_text(has)}: plan for these devices")
    needs = _amounts(config, graph.plan)
    for name, amount in needs.items():
        _check_enough(plan, name, amount, has.get(name, 0), f"Ray has {_as_text(has)}")
    return needs


def _amounts(config: AppConfig, plan: Plan) -> dict[str, float]:
    needs = {"CPU": float(config.front_replicas), "GPU": 0.0}
    for kind, count in plan.devices().items():
        replica = replica_needs(config, kind)
        for name in _COUNTED:
            needs[name] += replica[name] * count
    return needs


def _check_enough(plan: str, name: str, amount: float, available: float, owner_has: str) -> None:
    if amount > available + _ROUNDING:
        raise UserError(f"{plan} needs {amount:g} {name}s with the front; this {owner_has}: {_REMEDIES[name]}")


def _alone(config: AppConfig) -> dict[str, float]:
    return {"CPU": 1.0, "GPU": float(config.device.startswith("cuda"))}


def _decoding(config: DecoderConfig, has: Resources) -> dict[str, float]:
    """What a decoder's replicas need; raise UserError if the cluster has less, even if nothing else runs."""
    owner = f"Ray has {_as_text(has)}"
    for kind, planned in config.per_kind().items():
        on_gpu = "accelerator_type" in planned.replica_options(kind)
        if on_gpu and kind.upper() not in accelerators(has) and kind not in has:
            raise UserError(f"{config.plan} runs on {kind}; this {owner}: plan for these devices")
    needs = _amounts_of_decoder(config)
    if needs["GPU"] and not config.plan and not has.get("GPU"):
        raise UserError(_NO_GPU.format(device=config.device, owner=f"this {owner}"))
    for name, amount in needs.items():
        if name in _COUNTED:
            _check_enough(config.plan or "the decoder", name, amount, has.get(name, 0), owner)
    return needs


def _amounts_of_decoder(config: DecoderConfig) -> dict[str, float]:
    """The sum of what a decoder's replicas need, on devices of all kinds; its front needs next to nothing."""
    needs = {"CPU": 0.0, "GPU": 0.0}
    for kind, planned in config.per_kind().items():
        for name, amount in requested_amounts(planned.replica_options(kind)).items():
            needs[name] = needs.get(name, 0.0) + planned.replicas * amount
    return needs


def _check_together(needs: Mapping[str, Mapping[str, float]], has: Resources) -> None:
    for name in _COUNTED:
        amounts = {application: need[name] for application, need in needs.items() if need[name]}
        if sum(amounts.values()) > has.get(name, 0) + _ROUNDING:
            needed = ", ".join(f"{application} needs {amount:g}" for application, amount in amounts.items())
            raise UserError(
                f"{name}s: this Ray has {has.get(name, 0):g}, but with its front {needed}: {_REMEDIES[name]}"
            )


def _as_text(has: Resources) -> str:
    """
    >>> _as_text({"CPU": 2.0, "memory": 1e9, "GPU": 1.0, "accelerator_type:A100": 1.0})
    '2 CPUs, 1 GPUs (A100)'
    """
    kinds = accelerators(has)
    amounts = [f"{has.get(name, 0):g} {name}s" for name in _COUNTED]
    return ", ".join(amounts) + (f" ({', '.join(kinds)})" if kinds else "")
