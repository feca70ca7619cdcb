"""The gap of a plan to the upper bound: the costs of all restrictions and the plan's share add up."""

from dataclasses import replace

import pytest

from experiments.bound.problems import playable
from experiments.shared.shortfalls import APART, FEW, LATENCY, LAUNCHES, RAMPS, WAITING, shortfalls
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.problem import Problem
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.latency import LatencyTable

BATCH = Objective(max_batch=8)


def network(launch_s: float = 0.0, ramp_s: float = 0.0, eight_s: float = 1.0, devices: int = 1) -> Problem:
    """Two blocks that take a second for one input and `eight_s` for eight; half of the inputs leave between them."""
    rows, ramps = ((1.0, 1.0), (eight_s, eight_s)), ((ramp_s, 0.0),) * 2
    table = LatencyTable("a", (1, 8), rows, ramps, launch_s, (8, 8), (1, 1), "measured")
    return Problem((1.0, 0.5), (table,), (Device("a", devices, 10**9, 1.0),), {("a", "a"): Link("a", "a", 1e18, 0.0)})


def costs_of(facts: Problem, objective: Objective = BATCH, sustained_per_s: float | None = None) -> dict[str, float]:
    plan = side_by_side(facts, objective)
    return {each.why: each.share for each in shortfalls(plan, facts, objective, sustained_per_s)}


def test_a_network_that_no_restriction_touches_loses_nothing() -> None:
    for devices in (1, 20_000):
        assert list(costs_of(network(devices=devices)).values()) == pytest.approx([0.0] * 6)


def test_each_restriction_is_charged_what_it_costs() -> None:
    bound = 8 / 1.5  # a second for each input, and another one for every second input, in batches of eight
    assert costs_of(network(launch_s=0.5))[LAUNCHES] == pytest.approx(1 - 8 / 2.25 / bound)
    assert costs_of(network(ramp_s=0.1))[RAMPS] == pytest.approx(1 - 8 / 1.6 / bound)
    assert costs_of(network(), sustained_per_s=4.0)[WAITING] == pytest.approx(1 - 4 / bound)
    hurried = costs_of(network(), replace(BATCH, slo_s=5.0, slack=0.0))
    assert hurried[FEW] > 0.1, "few arrive at one device, so that batches take long to fill"
    both = costs_of(network(eight_s=2.0, devices=100), replace(BATCH, slo_s=3.2, slack=0.0))
    assert both[LATENCY] > 0.1, "either block has the time for eight, but not both"


@pytest.mark.parametrize("seed", [3, 5])
def test_the_parts_and_what_is_kept_add_up(seed: int) -> None:
    facts, objective = playable(seed)
    plan = side_by_side(facts, objective, 0.01)
    shares = {each.why: each.share for each in shortfalls(plan, facts, objective)}
    assert all(share >= 0 for share in shares.values())
    assert 0 < sum(shares.values()) < 1
    assert shares[WAITING] == 0
    if len(facts.devices) == 1:
        assert shares[APART] < 0.02, "one kind shares all blocks with itself"
