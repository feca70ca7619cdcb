"""One, two and four fronts: whether they fill batches as one does, what they let pass, and what a request costs them.

All share this machine's cores with the replicas, HAProxy and the generator, so requests/s show how fronts share what
there is. What a front takes of a core for a request says how many it would answer on a core of its own.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console

from experiments.chaos.faults import PROFILE, SLO_MS, START, load, offered_per_s
from experiments.serve import fleet, measures
from experiments.shared.live import Live, answer_at, application, bare
from isobatch.cluster.load.workloads import arrivals
from isobatch.optimizer.plan import Plan
from isobatch.profiles.files import Profile

FRONTS = (1, 2, 4)
TURNS, SECONDS, WARM_S = 3, 10.0, 4.0  # the median of several turns, as this machine may stall in one
SHARE = 0.5  # of what the faults are offered
QUICK = fleet.plan(fleet.Part(4, 4), fleet.Part(fleet.BLOCKS, 2))  # devices that answer more than this machine asks
CLIENTS, CLOSED_S, PATIENT_MS = 128, 8.0, 5000.0
console = Console(stderr=True, width=140)


@dataclass(frozen=True)
class FrontsSeen:
    """What one number of fronts made of the same load."""

    fill: float  # of batches at the first split, which newcomers fill
    p99_ms: float
    good_share: float


@dataclass(frozen=True)
class FrontsPassed:
    """What passed through the fronts, from clients that ask again as soon as they are answered."""

    per_s: float
    cpu_ms: float  # of all fronts, for each request


def measure(fronts: int) -> dict[str, dict[str, float]]:
    """What this number of fronts makes of both loads."""
    with _served_by(fronts, START, PROFILE, SLO_MS) as here:
        filled = asyncio.run(_filled(here))
    with _served_by(fronts, QUICK, fleet.profile(), PATIENT_MS) as here:
        passed = _passed(here)
    console.print(f"{fronts} fronts: {filled}, {passed}")
    return {"filled": asdict(filled), "passed": asdict(passed)}


def figures(result: Mapping[int, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """By the number of fronts, compared with one."""
    one = result[1]["filled"]
    figures_of_fronts = {"fill_one_front": one["fill"], "p99_one_front_ms": one["p99_ms"]}
    for fronts, each in result.items():
        filled, passed = each["filled"], each["passed"]
        figures_of_fronts[f"good_share_{fronts}_fronts"] = filled["good_share"]
        figures_of_fronts |= {f"fronts_{fronts}_rps": passed["per_s"], f"fronts_{fronts}_cpu_ms": passed["cpu_ms"]}
        if fronts > 1:
            figures_of_fronts[f"fill_{fronts}_fronts_over_one"] = filled["fill"] / one["fill"]
            figures_of_fronts[f"p99_{fronts}_fronts_over_one"] = filled["p99_ms"] / one["p99_ms"]
    return figures_of_fronts


@contextmanager
def _served_by(fronts: int, chosen: Plan, facts: Profile, slo_ms: float) -> Iterator[Live]:
    with TemporaryDirectory() as folder, bare() as here:
        declared = application(chosen, facts, Path(folder), slo_ms=slo_ms, front_replicas=fronts, cpus_per_replica=0)
        small = {"name": "front", "ray_actor_options": {"num_cpus": 0.1}}  # however few cores there are
        here.deploy(declared | {"deployments": [small]})
        yield here


async def _filled(here: Live) -> FrontsSeen:
    await load(here.url).at(arrivals("poisson", SHARE * offered_per_s(), WARM_S, TURNS))
    turns = [await _turn(here, seed) for seed in range(TURNS)]
    return FrontsSeen(**{name: float(np.median([asdict(each)[name] for each in turns])) for name in asdict(turns[0])})


async def _turn(here: Live, seed: int) -> FrontsSeen:
    before = answer_at(f"{here.base}/stats")
    record = await load(here.url).at(arrivals("poisson", SHARE * offered_per_s(), SECONDS, seed))
    after = answer_at(f"{here.base}/stats")
    first = [stats["splits"][0] for stats in (before, after)]
    launches = [each["launches"] for each in first]
    full = [each["launches"] * each["fill"] for each in first]  # how many launches the inputs would have filled
    took_ms = 1e3 * (record.ended_s - record.due_s)[record.status == 200]
    good = float(((record.status == 200) & (record.ended_s - record.due_s <= SLO_MS / 1e3)).mean())
    fill = (full[1] - full[0]) / (launches[1] - launches[0])
    return FrontsSeen(fill, float(np.percentile(took_ms, 99)), good)


def _passed(here: Live) -> FrontsPassed:
    measures.rate(here.url, CLIENTS, 2.0)  # warms up
    before_s = measures.fronts_cpu_s(here.url)
    per_s = measures.rate(here.url, CLIENTS, CLOSED_S)
    took_s = measures.fronts_cpu_s(here.url) - before_s
    return FrontsPassed(per_s, 1e3 * took_s / (per_s * CLOSED_S))
