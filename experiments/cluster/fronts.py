"""Measures whether two fronts fill batches as one front does, at the same load on the same virtual devices.

They share this machine's cores with replicas, HAProxy and the generator.
"""

import asyncio
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from experiments.chaos.faults import PROFILE, SLO_MS, START, load, offered_per_s
from experiments.shared.live import Live, answer_at, application, bare
from isobatch.cluster.load.workloads import arrivals

TURNS, SECONDS, WARM_S = 3, 10.0, 4.0  # the median of several turns, as this machine may stall in one
SHARE = 0.5  # of the load under which faults are caused


def measure() -> dict[str, float]:
    (one_fill, one_ms), (two_fill, two_ms) = _by_fronts(1), _by_fronts(2)
    ratios = {"fill_2_fronts_over_one": two_fill / one_fill, "p99_2_fronts_over_one": two_ms / one_ms}
    return {"fill_one_front": one_fill, "p99_one_front_ms": one_ms} | ratios


def _by_fronts(fronts: int) -> tuple[float, float]:
    """The fill of batches at the first split, which newcomers fill, and the p99 in milliseconds."""
    with TemporaryDirectory() as folder, bare() as here:
        declared = application(START, PROFILE, Path(folder), slo_ms=SLO_MS, front_replicas=fronts, cpus_per_replica=0)
        small = {"name": "front", "ray_actor_options": {"num_cpus": 0.1}}  # for machines with few cores
        here.deploy(declared | {"deployments": [small]})
        return asyncio.run(_medians(here))


async def _medians(here: Live) -> tuple[float, float]:
    await load(here.url).at(arrivals("poisson", SHARE * offered_per_s(), WARM_S, TURNS))
    fills, p99s_ms = zip(*[await _turn(here, seed) for seed in range(TURNS)], strict=True)
    return median(fills), median(p99s_ms)


async def _turn(here: Live, seed: int) -> tuple[float, float]:
    before = answer_at(f"{here.base}/stats")
    record = await load(here.url).at(arrivals("poisson", SHARE * offered_per_s(), SECONDS, seed))
    after = answer_at(f"{here.base}/stats")
    first = [stats["splits"][0] for stats in (before, after)]
    launches = [each["launches"] for each in first]
    full = [each["launches"] * each["fill"] for each in first]  # how many full launches would have had these inputs
    took_ms = 1e3 * (record.ended_s - record.due_s)[record.status == 200]
    return (full[1] - full[0]) / (launches[1] - launches[0]), float(np.percentile(took_ms, 99))
