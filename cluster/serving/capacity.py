"""Check that Ray has what the plans of a Serve file need, before anything waits for resources that never come."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from cluster.serving.serve_file import ServeFile, controllers, decoders, named, ours
from deployments.config import AppConfig, checked, parse
from deployments.decoding.config import DecoderConfig
from deployments.graph import Graph, read_graph
from deployments.resources import Resources, accelerators, asked_for, declared, devices_on, replica_needs, total
from optimizer.plan import Plan, read_plan
from profiles.errors import UserError

_REMEDIES = {
    "CPU": "plan for fewer devices, or let replicas share processors (cpus_per_replica: 0 in the Serve file)",
    "GPU": "plan for fewer devices",
}
_COUNTED = tuple(_REMEDIES)


def check_capacity(content: ServeFile, nodes: Sequence[Resources]) -> None:
    """Raise UserError about the first thing that is short on nodes with these resources."""
    configs = {named(application): parse(application["args"]) for application in ours(content)}
    planned = {name: config for name, config in configs.items() if config.planned}
    budgets = _budgets(planned, content)
    _check_budgets(planned, budgets, nodes)
    _check_growth(_growth(content), budgets)
    has = total(nodes)
    needs = {name: _needs(config, read_graph(config), has) for name, config in planned.items()}
    needs |= {name: _alone(config) for name, config in configs.items() if not config.planned}
    needs |= {named(one): _decoding(checked(DecoderConfig, one["args"])) for one in decoders(content)}
    if len(needs) > 1:
        _check_together(needs, has)


def check_processors(content: ServeFile, cpus: float) -> None:
    """Raise UserError about a plan's file that needs more CPUs than there can be, before any Ray is started."""
    for config in (parse(application["args"]) for application in ours(content)):
        if config.plan:
            _check_enough(
                config.plan, "CPU", _amounts(config, read_plan(Path(config.plan)))["CPU"], cpus, f"machine has {cpus:g}"
            )


def _budgets(planned: Mapping[str, AppConfig], content: ServeFile) -> dict[str, dict[str, int]]:
    """The most devices of each kind that each application may use, by what it or its controller was told."""
    found = {name: _told_devices(config) for name, config in planned.items()}
    for arguments in (controller.get("args") or {} for controller in controllers(content)):
        told, mine = arguments.get("devices") or {}, found.get(arguments.get("application", "isobatch"))
        if mine is not None:
            mine |= {kind: max(count, mine.get(kind, 0)) for kind, count in told.items()}
    return found


def _told_devices(config: AppConfig) -> dict[str, int]:
    if config.plan:
        return read_plan(Path(config.plan)).devices()
    return dict(config.devices) if isinstance(config.devices, dict) else {}


def _check_budgets(
    planned: Mapping[str, AppConfig], budgets: Mapping[str, Mapping[str, int]], nodes: Sequence[Resources]
) -> None:
    """Applications of one cluster must not count the same devices: what they may use adds up to what there is."""
    for name, config in planned.items():
        if config.devices == "auto" and len(planned) > 1:
            others = ", ".join(sorted(planned.keys() - {name}))
            raise UserError(f"devices: auto of {name} would count what {others} may use: name how many of each kind")
    for kind in {kind: None for budget in budgets.values() for kind in budget}:
        holders = {name: budget[kind] for name, budget in budgets.items() if kind in budget}
        there = min(_there(kind, planned[name], nodes) for name in holders)
        if len(holders) > 1 and sum(holders.values()) > there:
            told = ", ".join(f"{name} may use {count}" for name, count in holders.items())
            raise UserError(f"{kind}: this Ray has {there:g}, but {told}: name fewer under devices:")


def _growth(content: ServeFile) -> dict[str, dict[str, int]]:
    """What may come for each application."""
    told = (controller.get("args") or {} for controller in controllers(content))
    return {each.get("application", "isobatch"): dict(each.get("grow_to") or {}) for each in told}


def _check_growth(growth: Mapping[str, Mapping[str, int]], budgets: Mapping[str, Mapping[str, int]]) -> None:
    """Nobody can say whose a device is that comes, so a kind may come for one application only."""
    for name, kind in [(name, kind) for name, kinds in growth.items() for kind in kinds]:
        for other in sorted((growth.keys() | budgets.keys()) - {name}):
            if kind in growth.get(other, {}) or kind in budgets.get(other, {}):
                raise UserError(f"grow_to: {kind} may come for {name}, so {other} cannot use that kind too")


def _there(kind: str, config: AppConfig, nodes: Sequence[Resources]) -> float:
    """How many devices of a kind Ray has; those that share processors, or are played where no node has them: any."""
    if declared(kind, nodes):
        return sum(node.get(kind, 0) for node in nodes)
    return devices_on(nodes).get(kind, 0) if replica_needs(config, kind)["GPU"] else inf


def _needs(config: AppConfig, graph: Graph, has: Resources) -> dict[str, float]:
    """What an application needs by its plan; raise UserError if it is more than there is, whatever else runs."""
    plan = config.plan or "the plan"
    for kind in graph.plan.devices():
        if not set(accelerators(replica_needs(config, kind))) <= set(accelerators(has)):
            raise UserError(f"{plan} runs on {kind}; this Ray has {_told(has)}: plan for what is there")
    needs = _amounts(config, graph.plan)
    for name, amount in needs.items():
        _check_enough(plan, name, amount, has.get(name, 0), f"Ray has {_told(has)}")
    return needs


def _amounts(config: AppConfig, plan: Plan) -> dict[str, float]:
    """What replicas and fronts ask for together."""
    needs = {"CPU": float(config.front_replicas), "GPU": 0.0}
    for kind, count in plan.devices().items():
        asked = replica_needs(config, kind)
        for name in _COUNTED:
            needs[name] += asked[name] * count
    return needs


def _check_enough(plan: str, name: str, amount: float, there: float, what_has: str) -> None:
    if amount > there + 1e-6:
        raise UserError(f"{plan} needs {amount:g} {name}s with the front; this {what_has}: {_REMEDIES[name]}")


def _alone(config: AppConfig) -> dict[str, float]:
    """What an application needs that runs in one process."""
    return {"CPU": 1.0, "GPU": float(config.device.startswith("cuda"))}


def _decoding(config: DecoderConfig) -> dict[str, float]:
    """What all replicas of a decoder ask for, on devices of all kinds."""
    asked = [(each.replicas, asked_for(each.replica_options(kind))) for kind, each in config.per_kind().items()]
    names = {name for _, each in asked for name in each}
    return {name: sum(replicas * each.get(name, 0.0) for replicas, each in asked) for name in names}


def _check_together(needs: Mapping[str, Mapping[str, float]], has: Resources) -> None:
    for name in _COUNTED:
        amounts = {application: need[name] for application, need in needs.items() if need[name]}
        if sum(amounts.values()) > has.get(name, 0) + 1e-6:
            told = ", ".join(f"{application} needs {amount:g}" for application, amount in amounts.items())
            raise UserError(f"{name}s: this Ray has {has.get(name, 0):g}, but with its front {told}: {_REMEDIES[name]}")


def _told(has: Resources) -> str:
    """
    >>> _told({"CPU": 2.0, "memory": 1e9, "GPU": 1.0, "accelerator_type:A100": 1.0})
    '2 CPUs, 1 GPUs (A100)'
    """
    kinds = accelerators(has)
    amounts = [f"{has.get(name, 0):g} {name}s" for name in _COUNTED]
    return ", ".join(amounts) + (f" ({', '.join(kinds)})" if kinds else "")
