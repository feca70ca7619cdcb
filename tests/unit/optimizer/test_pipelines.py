"""Pipelines side by side: no worse than one pipeline, below their ceiling, and the best of brute force."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.planner.bruteforce import most_side_by_side
from experiments.planner.random_problems import is_small, random_objective, random_problem
from isobatch.optimizer.effort import Effort
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.moves import neighbours
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import SERIAL, baseline, baselines, batch_sizes, no_later, starts
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.pipelines.spread import value
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.exact import search
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.latency import LatencyTable
from tests.helpers.simulated_fleet import BLOCKS, FAST, SLO_S
from tests.helpers.simulated_fleet import facts as fleet_of

few = settings(max_examples=6, deadline=None, derandomize=True)
many = settings(max_examples=12, deadline=None, derandomize=True)


@few
@given(st.integers(0, 10**6))
def test_side_by_side_is_no_worse_than_one_pipeline_and_below_its_ceiling(seed: int) -> None:
    facts = random_problem(seed)
    objective = replace(random_objective(seed, facts), goal="goodput", goodput_per_s=0.0, cost_per_hour=None)
    one, several = search(facts, objective), side_by_side(facts, objective)
    assert (one is None) <= (several is None)
    if several is None or several.promise is None:
        return
    score = evaluate(several, facts, objective)
    assert not score.broken
    assert score.goodput_per_s == pytest.approx(several.promise.goodput_per_s)
    if one and one.promise:
        assert score.goodput_per_s >= one.promise.goodput_per_s * (1 - 1e-8)
        assert score.goodput_per_s * (1 + several.promise.gap) >= one.promise.goodput_per_s * (1 - 1e-8)


@few
@given(st.integers(0, 10**6).filter(is_small))
def test_the_ceiling_is_above_the_best_pipelines_of_every_way_to_part_the_devices(seed: int) -> None:
    facts = random_problem(seed)
    objective = Objective(slo_s=random_objective(seed, facts).slo_s, max_batch=2)
    plan = side_by_side(facts, objective)
    most = most_side_by_side(facts, objective)
    goodput = plan.promise.goodput_per_s if plan and plan.promise else 0.0
    gap = plan.promise.gap if plan and plan.promise else 0.0
    assert goodput <= most * (1 + 1e-8)
    assert goodput * (1 + gap) >= most * (1 - 1e-8)


@pytest.mark.parametrize(("seed", "gain"), [(7, 0.104), (18, 0.091), (45, 0.083)])
def test_a_kind_that_a_chain_needs_little_of_is_shared_with_another_pipeline(seed: int, gain: float) -> None:
    facts = random_problem(seed)
    objective = Objective(slo_s=random_objective(seed, facts).slo_s, max_batch=2)
    shared, apart = side_by_side(facts, objective), side_by_side(facts, objective, effort=Effort(kinds_shared=0))
    most = most_side_by_side(facts, objective)
    assert evaluate(shared, facts).goodput_per_s == pytest.approx(most, rel=1e-6)
    assert 1 - evaluate(apart, facts).goodput_per_s / most == pytest.approx(gain, abs=1e-3)
    kinds = [kind for pipeline in shared.pipelines for kind in pipeline.devices()]
    assert len(kinds) > len(set(kinds))
    assert all(used <= facts.device(kind).count for kind, used in shared.devices().items())


def test_chains_that_repeat_are_one_pipeline_and_what_is_promised_is_granted() -> None:
    """Each of two kinds is good at one of two blocks, and there are more devices of one of them."""
    slow_s, fast_s, kinds = 0.010, 0.001, ("first", "second")
    tables = tuple(
        LatencyTable(kind, (1,), (times,), ((0.0, 0.0),), 0.0, (1000, 1000), (10, 10), "made up")
        for kind, times in zip(kinds, ((fast_s, slow_s), (slow_s, fast_s)), strict=True)
    )
    links = {(one, other): Link(one, other, 1e9, 1e-4) for one in kinds for other in kinds}
    devices = (Device("first", 40, 10**6, 1.0), Device("second", 60, 10**6, 1.0))
    facts = Problem((1.0, 1.0), tables, devices, links)
    plan = side_by_side(facts, Objective(max_batch=1), gap=0.01)
    assert plan.beside
    assert len(set(facts.lanes(plan))) == len(plan.pipelines)
    goodput_per_s = evaluate(plan, facts).goodput_per_s
    assert plan.promise.goodput_per_s == pytest.approx(goodput_per_s)
    assert side_by_side(facts, Objective(max_batch=1, goodput_per_s=0.999 * goodput_per_s), gap=0.01)


@few
@given(st.integers(0, 10**6), st.sampled_from((0.999, 0.9, 0.6)))
def test_what_most_devices_sustain_has_a_cheapest_plan_too(seed: int, share: float) -> None:
    facts = random_problem(seed)
    objective = Objective(slo_s=random_objective(seed, facts).slo_s, max_batch=4)
    most = side_by_side(facts, objective, gap=0.01)
    if most is None:
        return
    score = evaluate(most, facts, objective)
    aim = replace(objective, goal="cost", goodput_per_s=share * score.goodput_per_s)
    cheapest = side_by_side(facts, aim, gap=0.01)
    assert value(cheapest, facts, aim) <= score.cost_per_hour * (1 + 1e-8)


def fast_and_slow() -> Problem:
    """Kinds that sustain 100 inputs per second for a dollar per hour, and 30 for 0.35."""

    def table(kind: str, seconds: float) -> LatencyTable:
        return LatencyTable(kind, (1,), ((seconds,),), ((0.0,),), 0.0, (0,), (1,), "measured")

    devices = Device("fast", 4, 100, 1.0), Device("slow", 4, 100, 0.35)
    links = {(one, other): Link(one, other, 1e9, 0.0) for one in ("fast", "slow") for other in ("fast", "slow")}
    return Problem((1.0,), (table("fast", 1 / 100), table("slow", 1 / 30)), devices, links)


@pytest.mark.parametrize("per_s", [1e-3, 20.0])
def test_a_plan_costs_no_less_than_one_device(per_s: float) -> None:
    facts = fast_and_slow()
    plan = side_by_side(facts, Objective(goal="cost", goodput_per_s=per_s))
    cheapest = min(each.price_per_hour for each in facts.devices)
    assert plan.promise.cost_per_hour == cheapest
    assert plan.promise.gap == 0


def test_the_gap_of_one_pipeline_counts_several_that_would_be_cheaper() -> None:
    facts, whole = fast_and_slow(), (Split(0, 1, 1),)
    both = Plan((Placement("fast", 1, whole),), beside=(Plan((Placement("slow", 1, whole),)),))
    for objective in (Objective(goal="cost", goodput_per_s=130.0), Objective(cost_per_hour=1.4)):
        plan = side_by_side(facts, objective)
        least = value(plan, facts, objective) / (1 + plan.promise.gap)
        assert least <= value(both, facts, objective) * (1 + 1e-8)
    for goal in ("latency", "goodput-per-dollar"):
        assert side_by_side(facts, Objective(goal=goal)).promise.gap == 0


@pytest.mark.parametrize("dollars", [0.5, 0.9])
def test_the_gap_under_a_budget_counts_whole_devices(dollars: float) -> None:
    plan = side_by_side(fast_and_slow(), Objective(cost_per_hour=dollars))
    assert plan.promise.gap < 1e-6


@pytest.mark.parametrize(
    "objective",
    [
        Objective(goal="cost", goodput_per_s=130.0),
        Objective(goal="cost", goodput_per_s=130.0, cost_per_hour=1.35),
        Objective(cost_per_hour=1.4),
        Objective(goal="goodput-per-dollar", goodput_per_s=130.0, cost_per_hour=1.5),
    ],
)
def test_some_devices_of_each_kind_may_be_the_best(objective: Objective) -> None:
    assert side_by_side(fast_and_slow(), objective).devices() == {"fast": 1, "slow": 1}


# One kind is too slow for the SLO less its slack, by itself.
@pytest.mark.parametrize(("seed", "slo_s"), [(8, 0.03255306512471764), (10, 0.017272604399350692), (43, 0.01237285035)])
def test_the_gap_is_a_number_where_a_kind_can_do_nothing_alone(seed: int, slo_s: float) -> None:
    plan = side_by_side(random_problem(seed), Objective(slo_s=slo_s))
    assert plan.promise.gap < 1
    assert "Infinity" not in plan.to_json()


@many
@given(st.integers(0, 10**6))
def test_never_worse_than_a_baseline_whatever_the_goal(seed: int) -> None:
    facts = random_problem(seed)
    objective = random_objective(seed, facts)
    others = [value(each.plan, facts, objective) for each in baselines(facts, objective) if each.plan]
    plan = side_by_side(facts, objective)
    assert (value(plan, facts, objective) if plan else inf) <= min(others, default=inf) * (1 + 1e-8) + 1e-12


def test_blocks_that_nobody_reaches_take_no_part_in_the_latency_of_serial_splits() -> None:
    times = LatencyTable(
        "a", (1, 64), ((1e-3,) * 3, (64e-3,) * 3), ((0.0,) * 3,) * 2, 10e-3, (10,) * 3, (1,) * 3, "test"
    )
    ways = {("a", "a"): Link("a", "a", bytes_per_s=1e9, latency_s=1e-4)}
    facts, limit = Problem((1.0, 0.5, 0.0), (times,), (Device("a", 1, 10**9, 1.0),), ways), Objective(slo_s=0.2)
    plan = baseline(SERIAL, facts, limit).plan
    assert plan
    assert evaluate(plan, facts, limit).broken == ()
    assert plan.splits[0].batch_size == 17, "with 18 the estimated latency exceeds the limit"


@few
@given(st.integers(0, 10**6))
@example(26544)
def test_no_tail_grows_and_the_network_without_exits_is_still_a_plan(seed: int) -> None:
    facts = random_problem(seed)
    objective = replace(random_objective(seed, facts), goal="goodput", goodput_per_s=0.0)
    stock = baselines(facts, objective)[0].score
    if stock is None:
        return
    plan = side_by_side(facts, no_later(facts, objective))
    score = evaluate(plan, facts, objective)
    assert score.latency_s <= stock.latency_s * (1 + 1e-9)
    assert score.goodput_per_s >= stock.goodput_per_s * (1 - 1e-6)


# A search begins at simple plans (baselines, one cut), and goes on to plans that are one change away

BOTH = fleet_of(fast=2, slow=3)
OBJECTIVE = Objective(slo_s=0.05, max_batch=8)


def test_all_baselines_are_among_the_starts_whatever_limits_they_have() -> None:
    result = list(starts(BOTH, OBJECTIVE, (1.0, 2.2)))
    assert len(result) == len(set(result))
    for limited in (OBJECTIVE, OBJECTIVE.within(1.0)):
        for each in baselines(BOTH, limited):
            assert replace(each.plan, promise=None) in result


def test_every_coarse_batch_size_and_one_cut_are_among_the_starts() -> None:
    assert list(batch_sizes(BOTH, OBJECTIVE)) == [1, 2, 4, 8]
    assert list(batch_sizes(BOTH, Objective(slo_s=0.05, max_batch=64))) == [1, 2, 4, 8], "as far as was measured"
    result = [plan.pipelines for plan in starts(BOTH, OBJECTIVE, (2.2,))]
    plain = [
        {split.batch_size for each in several for split in each.splits}
        for several in result
        if not any(each.ramps for each in several)
    ]
    assert all({size} in plain for size in (1, 2, 4, 8)), "without exits, too"
    assert any(len(each.splits) == 2 for several in result for each in several)


@pytest.mark.parametrize("seed", range(11))
def test_every_neighbour_is_another_plan_that_the_devices_bear(seed: int) -> None:
    facts, objective = random_problem(seed), Objective(slo_s=SLO_S, max_batch=4)
    kind = max(facts.devices, key=lambda each: each.memory_bytes).kind
    middle = facts.num_blocks // 2
    splits = (Split(0, middle, 1), Split(middle, facts.num_blocks, 1)) if middle else (Split(0, facts.num_blocks, 1),)
    plan = Plan((Placement(kind, 1, splits, local=True),))
    moves = list(neighbours(plan, facts, objective))
    assert plan not in moves
    for each in moves:
        assert not evaluate(each, facts).broken
        assert all(1 <= split.batch_size <= 4 for split in each.splits)


def test_one_ramp_of_several_is_a_neighbour_and_given_cuts_stay() -> None:
    plan = Plan((Placement("fast", 4, (Split(0, 4, 8, (0, 1, 2)),)),))
    ramps = {each.ramps for each in neighbours(plan, FAST, Objective(slo_s=SLO_S, cuts=()))}
    assert {(0, 1), (0, 2), (1, 2)} <= ramps
    poor = Plan((Placement("fast", 4, (Split(0, BLOCKS, 1),)),))
    cut = {tuple(split.start for split in each.splits) for each in neighbours(poor, FAST, Objective(cuts=()))}
    assert cut == {(0,)}


@pytest.mark.parametrize(("replicas", "ways"), [(4, {True, False}), (1, {True})])
def test_survivors_of_several_devices_may_stay_or_be_handed_over(replicas: int, ways: set[bool]) -> None:
    plan = Plan((Placement("fast", replicas, (Split(0, 2, 8, (1,)), Split(2, BLOCKS, 4)), local=True),))
    moves = neighbours(plan, FAST, Objective(slo_s=SLO_S))
    assert {each.placements[0].local for each in moves if len(each.splits) > 1} == ways


def test_two_splits_may_merge_with_the_ramps_that_they_have() -> None:
    cut = Plan((Placement("fast", 4, (Split(0, 2, 8, (1,)), Split(2, BLOCKS, 4)), local=True),))
    merged = {each.splits for each in neighbours(cut, FAST, Objective(slo_s=SLO_S)) if len(each.splits) == 1}
    assert merged == {(Split(0, BLOCKS, 8, ramps),) for ramps in ((), (1,), (0, 1, 2))}
