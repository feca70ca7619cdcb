"""A flood leaves a live server what it can do: it answers in time whom it admits, and tells the others at once."""

import asyncio
import json
from collections.abc import Callable

import numpy as np
import pytest

from isobatch.cluster.load.generator import LoadGenerator, LoadRecord
from isobatch.cluster.load.workloads import arrivals
from isobatch.cluster.serving.local import ROOT
from isobatch.deployments.demo.digits import demo_inputs
from tests.helpers.asking import ask

SLO_S = 1.0
INPUTS = 16  # a request, so that the front is the limit


@pytest.fixture(scope="module")
def demo(deployed: Callable[..., str]) -> str:
    plan = {name: str(ROOT / "cluster" / "demo" / f"{name}.json") for name in ("plan", "profile")}
    arguments = {"name": "demo", "cpus_per_replica": 0, **plan}
    return deployed({"name": "isobatch", "import_path": "isobatch.deployments.app:build", "args": arguments})


def generator(demo: str) -> LoadGenerator:
    digits = demo_inputs(8 * INPUTS).reshape(8, INPUTS, 8, 8).round(1)
    bodies = [json.dumps({"inputs": each.tolist()}).encode() for each in digits]
    return LoadGenerator(f"{demo}/predict", bodies, 1024, f"X-Deadline-Ms: {1e3 * SLO_S:g}\r\n")


def under(demo: str, rate_per_s: float, seconds: float) -> LoadRecord:
    return asyncio.run(generator(demo).at(arrivals("poisson", rate_per_s, seconds, seed=1)))


def front_cpu_s(demo: str) -> float:
    return float(sum(front["cpu_s"] for front in ask(demo, "GET", "/stats")[1]["fronts"]))


def test_goodput_stays_where_it_was_and_comes_back(demo: str) -> None:
    """What the front's processor time brings is compared: how much of it there is depends on who else needs it."""
    asyncio.run(generator(demo).by_clients(8, 1.0))  # warms up
    began_s = front_cpu_s(demo)
    record = asyncio.run(generator(demo).by_clients(8, 3.0))
    calm_s = front_cpu_s(demo)
    answered = int((record.status == 200).sum())
    best_per_s = answered / 3.0

    flood = under(demo, 5 * best_per_s, 4.0)
    flooded_s = front_cpu_s(demo)
    assert set(np.unique(flood.status)) <= {200, 503, 504}, "all are told"
    assert (flood.status == 503).sum() > best_per_s, "most were refused"
    in_time = int(((flood.status == 200) & (flood.ended_s - flood.reached_s <= SLO_S)).sum())
    assert in_time / (flooded_s - calm_s) > 0.5 * answered / (calm_s - began_s)
    assert ask(demo, "GET", "/stats")[1]["latency_ms"]["p99"] <= 1e3 * SLO_S, "nothing is answered late"

    calm = under(demo, 0.2 * best_per_s, 4.0)
    assert (calm.status[calm.due_s > 2.0] == 200).mean() > 0.9
