"""Does this Ray have what the plans of a Serve file need? Asked before anything waits for it in vain."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cluster.serve_file import ServeFile, ours
from deployments.config import AppConfig, parse
from deployments.graph import Graph, read_graph
from deployments.replicas.placed import resources
from profiles.errors import UserError


def check_capacity(content: ServeFile, has: Mapping[str, float]) -> None:
    """`has` are Ray's resources by name. One sentence about the first that is short."""
    for application in ours(content):
        config = parse(application["args"])
        if config.planned:
            _check(config, read_graph(config), has)


def _check(config: AppConfig, graph: Graph, has: Mapping[str, float]) -> None:
    plan = config.plan or "the plan"
    needs: Counter[str] = Counter({"CPU": config.front_replicas})
    for kind, count in graph.plan.devices().items():
        asked: dict[str, Any] = resources(config, kind)
        needs["CPU"] += asked.get("num_cpus", 0) * count
        needs["GPU"] += asked.get("num_gpus", 0) * count
        if (accelerator := asked.get("accelerator_type")) and f"accelerator_type:{accelerator}" not in has:
            raise UserError(f"{plan} runs on {kind}; this Ray has {_told(has)}: plan for what is there")
    for name, amount in needs.items():
        if amount > has.get(name, 0) + 1e-6:
            raise UserError(f"{plan} needs {amount:g} {name}s with the front; this Ray has {_told(has)}")


def _told(has: Mapping[str, float]) -> str:
    """
    >>> _told({"CPU": 2.0, "memory": 1e9, "GPU": 1.0, "accelerator_type:A100": 1.0})
    '2 CPUs, 1 GPUs (A100)'
    """
    kinds = [name.partition(":")[2] for name in has if name.startswith("accelerator_type:")]
    amounts = [f"{has.get(name, 0):g} {name}s" for name in ("CPU", "GPU")]
    return ", ".join(amounts) + (f" ({', '.join(kinds)})" if kinds else "")
