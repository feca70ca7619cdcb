"""Check that Ray has what the plans of a Serve file need, before anything waits for resources that never come."""

from cluster.serving.serve_file import ServeFile, ours
from deployments.config import AppConfig, parse
from deployments.graph import Graph, read_graph
from deployments.resources import Resources, accelerators, replica_needs
from profiles.errors import UserError

_REMEDIES = {
    "CPU": "plan for fewer devices, or let replicas share processors (cpus_per_replica: 0 in the Serve file)",
    "GPU": "plan for fewer devices",
}
_COUNTED = tuple(_REMEDIES)


def check_capacity(content: ServeFile, has: Resources) -> None:
    """Raise UserError about the first resource that is short; `has` are Ray's resources by name."""
    for application in ours(content):
        config = parse(application["args"])
        if config.planned:
            _check(config, read_graph(config), has)


def _check(config: AppConfig, graph: Graph, has: Resources) -> None:
    plan = config.plan or "the plan"
    needs = {"CPU": float(config.front_replicas), "GPU": 0.0}
    for kind, count in graph.plan.devices().items():
        asked = replica_needs(config, kind)
        if not set(accelerators(asked)) <= set(accelerators(has)):
            raise UserError(f"{plan} runs on {kind}; this Ray has {_told(has)}: plan for what is there")
        for name in _COUNTED:
            needs[name] += asked[name] * count
    for name, amount in needs.items():
        if amount > has.get(name, 0) + 1e-6:
            raise UserError(
                f"{plan} needs {amount:g} {name}s with the front; this Ray has {_told(has)}: {_REMEDIES[name]}"
            )


def _told(has: Resources) -> str:
    """
    >>> _told({"CPU": 2.0, "memory": 1e9, "GPU": 1.0, "accelerator_type:A100": 1.0})
    '2 CPUs, 1 GPUs (A100)'
    """
    kinds = accelerators(has)
    amounts = [f"{has.get(name, 0):g} {name}s" for name in _COUNTED]
    return ", ".join(amounts) + (f" ({', '.join(kinds)})" if kinds else "")
