"""A flood leaves a live server what it can do: it answers in time whom it admits, and tells the others at once."""

import json
from collections.abc import Callable, Coroutine
from dataclasses import astuple, dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import pytest

from isobatch.cluster.load.generator import LoadGenerator, LoadRecord, run_noting_polls
from isobatch.cluster.load.workloads import arrivals
from isobatch.optimizer.plan import Placement, Plan
from tests.helpers.asking import ask, eventually
from tests.helpers.toy_graph import cut_at

pytestmark = pytest.mark.beside("graph", last=1)

SLO_S = 1.0
INPUTS = 16  # a request, so that the front is the limit
CALM_S, FLOOD_S = 0.5, 3.0
ENOUGH = 200  # answers from which the price of one is known


@pytest.fixture
def large(graph: str, lead: Callable[[Plan], None]) -> str:
    """The small graph with batches so large that its front is the limit."""
    splits = [replace(split, batch_size=64) for split in cut_at(2).splits]
    lead(Plan(tuple(Placement("cpu", 1, (split,)) for split in splits)))
    return graph


@dataclass(frozen=True)
class Seen:
    """The requests of a load by what became of them, and the processor time that the front took for them."""

    in_time: int
    late: int
    refused: int
    front_s: float

    def __add__(self, more: "Seen") -> "Seen":
        return Seen(*(one + other for one, other in zip(astuple(self), astuple(more), strict=True)))


def seen(large: str, load: Callable[[LoadGenerator], Coroutine[Any, Any, LoadRecord]]) -> Seen:
    """Late is what the server answers late: this process may be late to read an answer."""
    pairs = [[row % 4, row % 10] for row in range(INPUTS)]  # which leave at any depth
    bodies = [json.dumps({"inputs": pairs}).encode()]
    generator = LoadGenerator(f"{large}/predict", bodies, 1024, f"X-Deadline-Ms: {1e3 * SLO_S:g}\r\n")
    generator.patience_s = 60.0
    before_s = front_cpu_s(large)
    record = run_noting_polls(load(generator))
    status, in_time = record.status, record.absent_s - record.reached_s <= SLO_S
    assert set(np.unique(status)) <= {200, 503, 504}, "all are told"
    good, refused = int(((status == 200) & in_time).sum()), int((status == 503).sum())
    return Seen(good, status.size - good - refused, refused, front_cpu_s(large) - before_s)


def clients(large: str) -> Seen:
    return seen(large, lambda generator: generator.by_clients(8, CALM_S))


def front_cpu_s(large: str) -> float:
    return float(sum(front["cpu_s"] for front in ask(large, "GET", "/stats")[1]["fronts"]))


def test_goodput_stays_where_it_was_and_comes_back(large: str) -> None:
    """The processor time of the front per request is compared: how much time it gets depends on other processes.

    The best of several short loads tells how many requests are a flood, which grows until most of it is refused: the
    cores may do more by then.
    """
    clients(large)  # warms up
    parts = list[Seen]()
    assert eventually(lambda: parts.append(clients(large)) or sum(part.in_time for part in parts) >= ENOUGH)
    calm = reduce(Seen.__add__, parts)
    per_answer_s = calm.front_s / (calm.in_time + calm.late)
    most_per_s = max(part.in_time for part in parts) / CALM_S

    for factor in (5, 10, 20):
        due_s = arrivals("poisson", factor * most_per_s, FLOOD_S, seed=1)
        flood = seen(large, lambda generator, due_s=due_s: generator.at(due_s))
        if flood.refused > flood.in_time:
            break
    assert flood.refused > flood.in_time, "most were refused"
    assert flood.in_time > flood.late, "whom it admits it answers in time"
    assert flood.in_time * per_answer_s > 0.1 * flood.front_s, "answers go on"
    refusals_s = flood.front_s - (flood.in_time + flood.late) * per_answer_s
    assert refusals_s / flood.refused < 0.25 * per_answer_s, "a refusal costs little beside an answer"

    assert eventually(lambda: (now := clients(large)).in_time > 9 * (now.late + now.refused))
