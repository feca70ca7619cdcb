"""The toy network as a real graph on the local Ray: its profile, its plans, its Serve application."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable
from tests.helpers.toy_model import BLOCKS, RAMPS


def toy_profile(blocks: int = BLOCKS) -> Profile:
    rows = ((0.001,) * blocks, (0.002,) * blocks)
    sizes = (100,) * blocks
    table = LatencyTable("cpu", (1, 8), rows, ((0.0,) * blocks,) * 2, 0.0005, sizes, sizes, "made up")
    return Profile("toy", (table,), ExitProfile((1.0, 0.8, 0.8, *(0.4,) * 4)[:blocks]))


def cut_at(*cuts: int, blocks: int = BLOCKS) -> Plan:
    """One replica for each split; a ramp wherever the toy has one."""
    edges = (0, *cuts, blocks)
    splits = [Split(a, b, 4, tuple(r for r in RAMPS if a <= r < b)) for a, b in pairwise(edges)]
    return Plan(tuple(Placement("cpu", 1, (split,)) for split in splits))


def application(
    folder: Path, plan: Plan, loader: str = "load", profile: Profile | None = None, **told: object
) -> dict[str, Any]:
    (folder / "plan.json").write_text(plan.to_json())
    save(profile or toy_profile(plan.num_blocks), folder / "profile.json")
    arguments: dict[str, object] = {
        "model": "/models/toy",
        "loader": loader if ":" in loader else f"tests.helpers.toy_model:{loader}",
        "plan": str(folder / "plan.json"),
        "replan": True,
        "profile": str(folder / "profile.json"),
        "cpus_per_replica": 0.1,
        "slo_ms": 60_000,
        **told,
    }
    return {"name": "toy", "import_path": "isobatch.deployments.app:build", "args": arguments}


def fleets() -> list[str]:
    """The applications of replicas that Serve knows. Ray is imported once its environment is ready, not before."""
    from ray import serve

    return [name for name in serve.status().applications if name.startswith("toy.")]
