"""Claim: nodes may vanish, silently too, and come back, and no request is lost; several fronts fill batches as one;
nodes that Ray can rent come when more is asked, and go again.

The nodes are on this machine, at addresses of their own in a network of their own (`unshare`, Linux), so that the
way to one of them can be cut: what is sent there vanishes, and nobody is told.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console

from cluster.load.workloads import arrivals
from experiments.chaos.suite import PROFILE, SLO_MS, START, load, offered_per_s
from experiments.cluster import growing
from experiments.shared.live import Live, application, asked, bare

FRONTS = (1, 2, 4)
SECONDS, WARM_S = 20.0, 4.0
SHARE = 0.5  # of what the faults are offered
console = Console(stderr=True, width=140)


@dataclass(frozen=True)
class FrontsSeen:
    """What one number of fronts made of the same load."""

    fill: float  # of batches at the first split, which newcomers fill
    p99_ms: float
    good_share: float
    busiest_share: float  # of the inputs, at the front that had most


def measure(rounds: int = 12, parts: str = "fronts nodes growth") -> dict[str, float]:
    figures: dict[str, float] = {}
    if "fronts" in parts:
        figures |= _fronts()
    if "nodes" in parts:
        figures |= _nodes(rounds)
    if "growth" in parts:
        figures |= growing.measure()
    return figures


def _fronts() -> dict[str, float]:
    found = {}
    for fronts in FRONTS:
        with _served_by(fronts) as here:
            found[fronts] = asyncio.run(_measured(here))
        console.print(f"{fronts} fronts: {found[fronts]}")
    one = found[1]
    figures = {"fill_one_front": one.fill, "p99_one_front_ms": one.p99_ms}
    for fronts, each in found.items():
        if fronts > 1:
            figures[f"fill_{fronts}_fronts_over_one"] = each.fill / one.fill
            figures[f"p99_{fronts}_fronts_over_one"] = each.p99_ms / one.p99_ms
            figures[f"busiest_share_{fronts}_fronts"] = each.busiest_share
    return figures | {f"good_share_{fronts}_fronts": each.good_share for fronts, each in found.items()}


@contextmanager
def _served_by(fronts: int) -> Iterator[Live]:
    with TemporaryDirectory() as folder, bare() as here:
        declared = application(START, PROFILE, Path(folder), slo_ms=SLO_MS, front_replicas=fronts, cpus_per_replica=0)
        small = {"name": "front", "ray_actor_options": {"num_cpus": 0.1}}  # however few cores there are
        here.deploy(declared | {"deployments": [small]})
        yield here


async def _measured(here: Live) -> FrontsSeen:
    await load(here.url).at(arrivals("poisson", SHARE * offered_per_s(), WARM_S, 1))
    before = asked(here.base)
    record = await load(here.url).at(arrivals("poisson", SHARE * offered_per_s(), SECONDS, 0))
    after = asked(here.base)
    first = [stats["splits"][0] for stats in (before, after)]
    launches = [each["launches"] for each in first]
    full = [each["launches"] * each["fill"] for each in first]  # how many launches the inputs would have filled
    took_ms = 1e3 * (record.ended_s - record.due_s)[record.status == 200]
    cpu_s = np.array([b["cpu_s"] - a["cpu_s"] for a, b in zip(_by_cpu(before), _by_cpu(after), strict=True)])
    good = float(((record.status == 200) & (record.ended_s - record.due_s <= SLO_MS / 1e3)).mean())
    fill = (full[1] - full[0]) / (launches[1] - launches[0])
    return FrontsSeen(fill, float(np.percentile(took_ms, 99)), good, float(cpu_s.max() / max(1e-9, cpu_s.sum())))


def _by_cpu(stats: dict[str, list[dict[str, float]]]) -> list[dict[str, float]]:
    return sorted(stats["fronts"], key=lambda each: each["cpu_s"])


def _nodes(rounds: int) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        words = ["unshare", "--user", "--map-root-user", "--net"]
        subprocess.run([*words, sys.executable, "-m", "experiments.cluster.nodes", str(out), str(rounds)], check=True)
        figures: dict[str, float] = json.loads(out.read_text())
    return figures
