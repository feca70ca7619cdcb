"""A flood leaves a live server what it can do: it answers in time whom it admits, and tells the others at once."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from isobatch.cluster.load.generator import LoadGenerator, LoadRecord
from isobatch.cluster.load.workloads import arrivals
from isobatch.optimizer.plan import Placement, Plan
from tests.helpers.asking import ask
from tests.helpers.toy_graph import cut_at

pytestmark = pytest.mark.beside("graph", last=1)

SLO_S = 1.0
INPUTS = 16  # a request, so that the front is the limit
CALM_S = 2.0


@pytest.fixture
def large(graph: str, lead: Callable[[Plan], None]) -> str:
    """The small graph with batches so large that its front is the limit."""
    splits = [replace(split, batch_size=64) for split in cut_at(2).splits]
    lead(Plan(tuple(Placement("cpu", 1, (split,)) for split in splits)))
    return graph


def generator(large: str) -> LoadGenerator:
    pairs = [[row % 4, row % 10] for row in range(INPUTS)]  # which leave at any depth
    bodies = [json.dumps({"inputs": pairs}).encode()]
    return LoadGenerator(f"{large}/predict", bodies, 1024, f"X-Deadline-Ms: {1e3 * SLO_S:g}\r\n")


def under(large: str, rate_per_s: float, seconds: float) -> LoadRecord:
    return asyncio.run(generator(large).at(arrivals("poisson", rate_per_s, seconds, seed=1)))


def front_cpu_s(large: str) -> float:
    return float(sum(front["cpu_s"] for front in ask(large, "GET", "/stats")[1]["fronts"]))


def test_goodput_stays_where_it_was_and_comes_back(large: str) -> None:
    """The processor time of the front per request is compared: how much time it gets depends on other processes."""
    asyncio.run(generator(large).by_clients(8, 0.5))  # warms up
    began_s = front_cpu_s(large)
    record = asyncio.run(generator(large).by_clients(8, CALM_S))
    calm_s = front_cpu_s(large)
    answered = int((record.status == 200).sum())
    per_answer_s = (calm_s - began_s) / answered

    flood = under(large, 5 * answered / CALM_S, 3.0)
    flooded_s = front_cpu_s(large)
    assert set(np.unique(flood.status)) <= {200, 503, 504}, "all are told"
    in_time = int(((flood.status == 200) & (flood.ended_s - flood.reached_s <= SLO_S)).sum())
    refused = flood.status.size - in_time
    assert refused > in_time, "most were refused"
    assert in_time > 0.1 * answered, "answers go on"
    refusals_s = flooded_s - calm_s - in_time * per_answer_s
    assert refusals_s / refused < 0.25 * per_answer_s, "a refusal costs little beside an answer"
    assert ask(large, "GET", "/stats")[1]["latency_ms"]["p99"] <= 1e3 * SLO_S, "nothing is answered late"

    calm = asyncio.run(generator(large).by_clients(8, 3.0))  # as much as the cores can do now
    assert (calm.status[calm.reached_s > 2.0] == 200).mean() > 0.9
