"""Ramps for early answers: the best there are within the budget, by brute force; and the plan around them."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from experiments.planner.networks import bert_base
from isobatch.optimizer import Objective, Plan, evaluate, optimize, problem
from isobatch.optimizer.early_answers import Times, answered_s, best_ramps, check_whole
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile

KINDS = fleet("v100=2,k80=2")
EXITS = ExitProfile(tuple(np.linspace(1.0, 0.1, 12)))
PROFILE = Profile("bert", tuple(datasheet_table(bert_base(), kind.kind) for kind in KINDS), EXITS)


def drawn(seed: int, blocks: int = 8) -> tuple[Times, tuple[float, ...]]:
    random = np.random.default_rng(seed)
    steps_s, delays_s = random.uniform(0.5, 1.5, blocks), random.uniform(0.0, 0.4, blocks - 1)
    survival = (1.0, *np.sort(random.choice([0.0, 0.2, 0.5, 0.5, 0.9, 1.0], blocks - 1))[::-1].tolist())
    known_s = steps_s.cumsum() + np.append(delays_s * random.uniform(), 0.0)
    return Times(tuple(known_s.tolist()), tuple(delays_s.tolist())), survival


@pytest.mark.parametrize("seed", range(60))
def test_no_set_of_ramps_within_the_budget_answers_sooner(seed: int) -> None:
    times, survival = drawn(seed)
    budget_s = float(np.random.default_rng(seed).choice([0.0, 0.1, 0.3, 1.0, 9.0]))
    every = range(len(times.delay_s))
    allowed = [
        ramps
        for count in range(len(every) + 1)
        for ramps in combinations(every, count)
        if sum(times.delay_s[ramp] for ramp in ramps) <= budget_s
    ]
    best = best_ramps(times, survival, tuple(every), budget_s)
    assert best in allowed
    assert times.mean_s(survival, best) == pytest.approx(min(times.mean_s(survival, each) for each in allowed))


def early(budget: float, rate_per_s: float = 0.0) -> Plan:
    objective = Objective(slo_s=2.0, max_batch=8, ramp_budget=budget, goodput_per_s=rate_per_s)
    return optimize(PROFILE, KINDS, links_between(KINDS), objective)


def test_the_plan_runs_the_whole_network_at_the_batches_of_no_exits_and_delays_nobody_by_more_than_the_budget() -> None:
    facts = problem(PROFILE, KINDS, links_between(KINDS))
    without, plan, generous = early(0.0), early(0.02), early(0.5)
    assert [pipeline.ramps for pipeline in without.pipelines] == [()] * len(KINDS)
    opened = {pipeline.placements[0].kind: len(pipeline.ramps) for pipeline in plan.pipelines}
    assert opened == {"v100": 0, "k80": 1}, "on a fast device a ramp takes a lone input too long"
    for before, after in zip(without.pipelines, plan.pipelines, strict=True):
        assert replace(after.splits[0], ramps=()) == before.splits[0]
    assert answered_s(generous, facts) < answered_s(plan, facts) < answered_s(without, facts)
    assert plan.promise.latency_s <= 1.02 * without.promise.latency_s
    assert plan.promise.goodput_per_s >= without.promise.goodput_per_s / 1.02


@pytest.mark.parametrize("room", [1.0, 1.03])
def test_ramps_delay_nobody_beyond_the_slo_whatever_their_budget(room: float) -> None:
    kinds = KINDS[1:]
    links, facts = links_between(kinds), problem(PROFILE, kinds, links_between(kinds))
    loose = Objective(max_batch=4, fixed_batch=4, ramp_budget=0.5)
    without = optimize(PROFILE, kinds, links, replace(loose, ramp_budget=0.0))
    tight = replace(loose, slo_s=room * without.promise.latency_s / 0.8)
    plan = optimize(PROFILE, kinds, links, tight)
    assert evaluate(plan, facts.without_exits, tight).broken == ()
    assert len(plan.ramps) < len(optimize(PROFILE, kinds, links, loose).ramps)
    assert bool(plan.ramps) == (room > 1)


def test_a_plan_that_does_not_sustain_the_rate_is_refused() -> None:
    most_per_s = early(0.02).promise.goodput_per_s
    assert early(0.02, 0.9 * most_per_s) == early(0.02)
    with pytest.raises(
        UserError, match=f"which sustains {most_per_s:.4g}/s on these devices: {1.1 * most_per_s:.4g}/s"
    ):
        early(0.02, 1.1 * most_per_s)


def test_a_plan_with_cuts_is_refused() -> None:
    check_whole(early(0.02))
    with pytest.raises(UserError, match="needs a plan without cuts"):
        check_whole(optimize(PROFILE, KINDS[:1], links_between(KINDS), Objective(slo_s=0.5, max_batch=8)))


def test_a_ramp_delays_the_pass_by_itself_and_a_stop() -> None:
    table = replace(PROFILE.tables[0], launch_s=0.01, stop_s=0.002)
    facts = problem(replace(PROFILE, tables=(table, *PROFILE.tables[1:])), KINDS, links_between(KINDS))
    times = Times.of(facts, "v100", 1)
    assert times.delay_s == pytest.approx(table.ramp_times_s(1)[:-1] + 0.002)
    assert times.done_s[-1] == pytest.approx(0.01 + table.block_times_s(1).sum())
