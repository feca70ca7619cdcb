"""One kind of device under several names is one kind: to the search, to the beliefs, and where it is served."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.planner.random_problems import random_objective, random_problem
from isobatch.optimizer.effort import Effort
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.pipelines.spread import split_by_name, value
from isobatch.optimizer.problem import Problem
from tests.helpers.simulated_fleet import facts

few = settings(max_examples=6, deadline=None, derandomize=True)


def renamed(facts: Problem, kind: str, other: str, count: int) -> Problem:
    """So many devices of a kind under another name."""
    device, table = facts.device(kind), facts.table(kind)
    devices = [replace(each, count=each.count - count * (each is device)) for each in facts.devices]
    links = dict(facts.links)
    for (source, target), link in facts.links.items():
        for here in {source, other} if source == kind else {source}:
            for there in {target, other} if target == kind else {target}:
                links[here, there] = replace(link, source=here, target=there)
    return replace(
        facts,
        devices=(*devices, replace(device, kind=other, count=count)),
        tables=(*facts.tables, replace(table, kind=other)),
        links=links,
    )


@few
@given(st.integers(0, 10**6))
def test_a_second_name_costs_nothing(seed: int) -> None:
    alone = random_problem(seed)
    kind = max(alone.devices, key=lambda each: each.count)
    alone = alone.with_devices([replace(each, memory_bytes=10**6) for each in alone.devices])
    if kind.count == 1:
        return
    objective = random_objective(seed, alone)
    one = side_by_side(alone, objective)
    named = renamed(alone, kind.kind, "again", kind.count // 2)
    several = side_by_side(named, objective)
    assert (one is None) == (several is None)
    if one and several:
        assert all(several.devices().get(each.kind, 0) <= each.count for each in named.devices)
        if split_by_name(one, named):
            assert value(several, named, objective) == pytest.approx(value(one, alone, objective))
        assert several.promise is not None
        assert evaluate(several, named).latency_s == pytest.approx(several.promise.latency_s)


def test_names_lose_nothing_by_pipelines_that_would_share_their_kind() -> None:
    """The shared plan has a placement of one device, which no two names have together."""
    alone = random_problem(45)
    objective = Objective(slo_s=random_objective(45, alone).slo_s, max_batch=2)
    named, apart = renamed(alone, "kind0", "again", 1), Effort(kinds_shared=0)
    shared = side_by_side(alone, objective)
    assert shared is not None
    assert split_by_name(shared, named) is None
    found = [side_by_side(named, objective), side_by_side(named, objective, effort=apart)]
    best, before = (evaluate(plan, named).goodput_per_s for plan in found if plan)
    assert best >= before * (1 - 1e-9)


def test_devices_that_differ_are_two_kinds() -> None:
    two = renamed(facts(fast=4), "fast", "again", 2)
    assert two.first_names == {"fast": "fast", "again": "fast"}
    slower = replace(two, tables=(two.tables[0], replace(two.tables[1], launch_s=1.0)))
    nearer = replace(two, links={**two.links, ("fast", "fast"): replace(two.links["fast", "fast"], latency_s=0.0)})
    assert [each.first_names["again"] for each in (slower, nearer)] == ["again", "again"]
    dearer = two.with_devices([two.devices[0], replace(two.devices[1], price_per_hour=9.0)])
    plan = side_by_side(dearer, replace(random_objective(0, dearer), goal="goodput-per-dollar", goodput_per_s=0.0))
    assert plan is not None
    assert set(plan.devices()) == {"fast"}
