"""Virtual fleets: a network of eight blocks, on devices that take 10 ms for half of it, at any batch size."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.problem import Problem, problem
from isobatch.profiles.devices import Device, links_between
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable

BLOCKS = 8
BATCH = 16
PASS_S = 0.010  # half of the network, on the plain kind of device
SURVIVAL = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5)
KINDS = {"v100": 1.0, "k80": 2.0}  # times over those of the plain kind


@dataclass(frozen=True)
class Part:
    """A split up to block `stop`, on replicas of one kind."""

    stop: int
    replicas: int
    kind: str = "v100"


def plan(*parts: Part, batch: int = BATCH) -> Plan:
    """A plan of these parts; inputs may leave at the end of every split except the last."""
    starts = (0, *(part.stop for part in parts))
    splits = [Split(a, b, batch, (b - 1,) if b < BLOCKS else ()) for a, b in pairwise(starts)]
    return Plan(tuple(Placement(part.kind, part.replicas, (split,)) for part, split in zip(parts, splits, strict=True)))


def profile(pass_s: float = PASS_S, hidden_bytes: Sequence[int] = (4096,) * BLOCKS) -> Profile:
    """The profile of the network; `hidden_bytes`: the size of one input after each block."""
    tables = tuple(_table(kind, slower * pass_s, tuple(hidden_bytes)) for kind, slower in KINDS.items())
    return Profile("virtual", tables, ExitProfile(SURVIVAL))


def _table(kind: str, pass_s: float, sizes: tuple[int, ...]) -> LatencyTable:
    row, none = (2 * pass_s / BLOCKS,) * BLOCKS, (0.0,) * BLOCKS
    return LatencyTable(kind, (1, BATCH), (row, row), (none, none), 0.0, sizes, sizes, "made up: 10 ms a pass")


def serve_file(
    folder: Path, chosen: Plan, facts: Profile | None = None, slo_ms: float = 1000.0, **fields: object
) -> Path:
    """Write a Serve file for `isobatch serve`, with the plan and the profile beside it."""
    (folder / "plan.json").write_text(chosen.to_json())
    save(facts or profile(), folder / "profile.json")
    (folder / "model").mkdir(exist_ok=True)
    arguments: dict[str, Any] = {
        "model": str(folder / "model"),  # an empty folder, as virtual devices compute nothing
        "backend": "virtual",
        "plan": str(folder / "plan.json"),
        "profile": str(folder / "profile.json"),
        "slo_ms": slo_ms,
        **fields,
    }
    return serve_file_of(folder, arguments)


def serve_file_of(folder: Path, arguments: Mapping[str, object]) -> Path:
    """Write a Serve file for one application with these arguments."""
    application = {"name": "bench", "import_path": "isobatch.deployments.app:build", "args": dict(arguments)}
    file = folder / "serve.yaml"
    file.write_text(json.dumps({"applications": [application]}))  # JSON is YAML
    return file


def facts_for(facts: Profile, counts: Mapping[str, int]) -> Problem:
    """The planner's view of these devices."""
    devices = [Device(kind, count, memory_bytes=10**12, price_per_hour=1.0) for kind, count in counts.items()]
    return problem(facts, devices, links_between(devices))


def promise_per_s(chosen: Plan, facts: Profile) -> float:
    """The goodput of the plan by the planner's cost model."""
    return evaluate(chosen, facts_for(facts, chosen.devices())).goodput_per_s
