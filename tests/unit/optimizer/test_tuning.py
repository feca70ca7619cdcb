"""Thresholds for a plan: better within the promise, or left as they are."""

from dataclasses import replace
from functools import partial
from itertools import chain, combinations, pairwise
from math import prod

import numpy as np
import pytest

from isobatch.optimizer import Objective, Problem, evaluate, problem
from isobatch.optimizer.model.evaluate import Score
from isobatch.optimizer.moves import neighbours
from isobatch.optimizer.plan import Placement, Plan, Split, opened
from isobatch.optimizer.search.exact import search
from isobatch.optimizer.tuning import REHEARSED, costs_of, plan_for_its_ramps, tuned
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import outcome
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable
from tests.helpers.exit_tables import exit_table

SIZES = (1, 2, 4, 8)
OBJECTIVE = Objective(max_batch=8)
FIND = partial(search, objective=OBJECTIVE)
SETS = list(chain.from_iterable(combinations(range(3), count) for count in range(4)))  # of ramps


def _table(kind: str, slower: float, ramp: float) -> LatencyTable:
    times = tuple(((8 + size) * slower,) * 4 for size in SIZES)
    ramps = tuple((ramp * block[0],) * 3 + (0.0,) for block in times)
    return LatencyTable(kind, SIZES, times, ramps, 1e-3, (8,) * 4, (8,) * 4, "told")


def facts(kinds: str = "v100=2", ramp: float = 1e-3) -> Problem:
    """Four blocks; a launch costs as much as eight inputs at one block, so that full batches pay. `ramp`: what a ramp
    takes, in times of a block."""
    tables = tuple(_table(kind, slower, ramp) for kind, slower in (("v100", 1e-3), ("k80", 4e-3)))
    devices = fleet(kinds)
    return problem(Profile("toy", tables), devices, links_between(devices))


def promising(plan: Plan, share: float) -> Plan:
    """It promises this share of what it promised."""
    return replace(plan, promise=replace(plan.promise, goodput_per_s=share * plan.promise.goodput_per_s))


def evidence(seed: int) -> Evidence:
    return Evidence(exit_table(seed, count=2000), exit_table(seed + 1, count=2000), "accuracy", 0.03, 0.95)


@pytest.mark.parametrize("seed", range(4))
def test_a_tuned_plan_is_better_and_keeps_the_promise(seed: int) -> None:
    case, kept = facts(), evidence(seed)
    result = tuned(case, OBJECTIVE, kept, FIND)
    if result is None:
        return
    assert result.plan.promise.goodput_per_s > result.before.promise.goodput_per_s
    score = evaluate(result.plan, case.surviving(result.exits.survival_with(opened(result.plan))), OBJECTIVE)
    assert score.goodput_per_s == pytest.approx(result.plan.promise.goodput_per_s)
    reached = outcome(kept.test, result.chosen, "accuracy")
    assert kept.shows(reached.lost)
    assert set(reached.places.tolist()) <= {*opened(result.plan), 3}
    everybody = exit_table(50, count=50_000)
    assert outcome(everybody, result.chosen, "accuracy").lost.mean < 0.03


def test_where_nobody_may_leave_or_nothing_is_sustained_thresholds_stay_as_they_are() -> None:
    few = Evidence(exit_table(0, count=2000), exit_table(1, count=50), "accuracy", 0.01, 0.95)
    assert tuned(facts(), OBJECTIVE, few, FIND) is None
    nothing = tuned(facts(), OBJECTIVE, evidence(1), FIND, lambda plan, known: promising(plan, 0.0))
    assert nothing is None, "nothing is sustained, as simulated"


@pytest.mark.parametrize("ramp", [1e-3, 0.3, 0.6])
@pytest.mark.parametrize("seed", [1, 3, 8, 10])
def test_no_set_of_ramps_is_better_than_the_tuned_one(seed: int, ramp: float) -> None:
    case, recorded = facts(ramp=ramp), exit_table(seed, count=1000)
    kept = Evidence(recorded, recorded, "accuracy", 0.03, 0.95)
    known = kept.exits(kept.prepared)
    result = tuned(case, OBJECTIVE, kept, FIND)
    as_prepared = plan_for_its_ramps(replace(case, survival=known.survival, exits=known), OBJECTIVE, FIND)
    plan = result.plan if result else as_prepared[0]
    for ramps in SETS:
        chosen = kept.likely_candidates(ramps, costs_of(plan, case, ramps))
        leaving = case.surviving(kept.exits(chosen).survival_with(ramps))
        other = FIND(replace(leaving, keeps_open=True))
        assert set(opened(other)) <= set(ramps)
        assert plan.promise.goodput_per_s >= 0.999 * evaluate(other, leaving).goodput_per_s, ramps


def test_what_plans_sustain_decides_and_not_their_estimates() -> None:
    """In the simulations of this test, a plan sustains half if it opens the ramp that is best by estimate."""
    case, recorded = facts(ramp=0.3), exit_table(1, count=2000)
    kept = Evidence(recorded, recorded, "accuracy", 0.03, 0.95)
    estimated, simulated = tuned(case, OBJECTIVE, kept, FIND), list[list[int]]()
    assert estimated is not None

    def rehearse(plan: Plan, known: Problem) -> Plan:
        simulated.append(opened(plan))
        return promising(plan, 0.5 if set(opened(estimated.plan)) <= set(opened(plan)) else 0.9)

    result = tuned(case, OBJECTIVE, kept, FIND, rehearse)
    _, *others, after = simulated
    assert len(others) == REHEARSED
    assert opened(estimated.plan) in others
    assert opened(result.plan) == after != opened(estimated.plan)
    assert set(outcome(recorded, result.chosen, "accuracy").places.tolist()) <= {*after, 3}


def test_of_two_plans_that_open_the_same_ramps_the_better_is_kept() -> None:
    """In this test, a ramp alone is worth half if it is rated again, in a later turn."""
    offered, rated = dict[int, list[float]](), dict[int, float]()

    def find(given: Problem) -> Plan | None:
        plan = FIND(given)
        if plan is None or not given.keeps_open or len(ramps := opened(plan)) != 1:
            return plan
        rates = offered.setdefault(ramps[0], [])
        plan = promising(plan, 0.5 if rates else 1.0)
        rates.append(plan.promise.goodput_per_s)
        return plan

    def rehearse(plan: Plan, known: Problem) -> Plan:
        if known.keeps_open and len(ramps := opened(plan)) == 1:
            rated.setdefault(ramps[0], plan.promise.goodput_per_s)
        return plan

    tuned(facts(ramp=0.3), OBJECTIVE, evidence(1), find, rehearse)
    assert rated
    for ramp, rate_per_s in rated.items():
        assert len(offered[ramp]) > 1
        assert rate_per_s == max(offered[ramp])


def test_once_the_time_is_over_one_set_of_ramps_is_rated_and_simulated() -> None:
    given, simulated = list[Problem](), list[Plan]()

    def find(problem: Problem) -> Plan | None:
        given.append(problem)
        return FIND(problem)

    def rehearse(plan: Plan, known: Problem) -> Plan:
        simulated.append(plan)
        return plan

    tuned(facts(), OBJECTIVE, evidence(1), find, rehearse, out_of_time=lambda: True)
    assert len([each for each in given if each.keeps_open]) == 2, "the chosen set, and again with proven thresholds"
    assert len(simulated) == 3, "the plan before, too"


def test_a_plan_that_opens_all_ramps_is_changed_into_others_that_do_so() -> None:
    case = replace(facts(ramp=0.3).surviving((1.0, 0.6, 0.6, 0.2)), keeps_open=True)
    changed = list(neighbours(plan := FIND(case), case, OBJECTIVE))
    assert {tuple(opened(each)) for each in changed} == {(0, 2)}
    assert len({len(each.splits) for each in changed}) > 1
    free = replace(case, keeps_open=False)
    assert len({tuple(opened(each)) for each in neighbours(plan, free, OBJECTIVE)}) > 1


def test_an_input_pays_for_each_ramp_that_it_passes() -> None:
    plan = Plan((Placement("v100", 1, (Split(0, 2, 8, (0,)), Split(2, 4, 8))),))
    case = facts(ramp=0.5)
    assert costs_of(plan, case) == pytest.approx(np.array([1.5, 2.5, 3.5, 4.5]) / 4.5)
    assert costs_of(plan, case, [1, 2]) == pytest.approx(np.array([1.0, 2.5, 4.0, 5.0]) / 5.0)


def exits(seed: int) -> ExitProfile:
    """Inputs that would leave at any ramps; nobody knows why."""
    random = np.random.default_rng(seed)
    sets = [tuple(ramp for ramp in range(3) if each >> ramp & 1) for each in range(8)]
    shares = random.dirichlet([0.5] * 8)
    known = ExitProfile((1.0,) * 4, tuple(zip(sets, (shares / shares.sum()).tolist(), strict=True)))
    return replace(known, survival=known.survival_with(range(3)))


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_counts_those_who_leave_with_its_own_ramps(seed: int) -> None:
    case, objective, known = facts("v100=4,k80=2"), Objective(max_batch=8, slo_s=0.5), exits(seed)
    find = partial(search, objective=objective)

    def truth(plan: Plan) -> Score:
        return evaluate(plan, case.surviving(known.survival_with(opened(plan))), objective)

    plan, for_its_ramps = plan_for_its_ramps(replace(case, survival=known.survival, exits=known), objective, find)
    assert for_its_ramps.survival == known.planning_survival(opened(plan))
    assert plan.promise.goodput_per_s == pytest.approx(truth(plan).goodput_per_s)
    assert not truth(plan).broken
    others = [truth(other) for ramps in SETS if (other := find(case.surviving(known.survival_with(ramps))))]
    best = max((each.goodput_per_s for each in others if not each.broken), default=0.0)
    assert truth(plan).goodput_per_s >= 0.9 * best


def by_chance(survival: tuple[float, ...]) -> ExitProfile:
    """Whether an input would leave at a ramp says nothing of the other ramps."""
    leave = [1 - after / here for here, after in pairwise(survival)]
    shares = [prod(p if ramp in ramps else 1 - p for ramp, p in enumerate(leave)) for ramps in SETS]
    return ExitProfile(survival, tuple(zip(SETS, shares, strict=True)))


@pytest.mark.parametrize("after", [0.9, 0.7, 0.5])
def test_where_closed_ramps_lose_exits_no_plan_that_opens_all_is_better(after: float) -> None:
    known = by_chance((1.0, after, after**2, after**3))
    case = replace(facts(), survival=known.survival, exits=known)
    plan, for_its_ramps = plan_for_its_ramps(case, OBJECTIVE, FIND)
    everywhere = FIND(replace(case, keeps_open=True))
    assert opened(everywhere) == [0, 1, 2]
    truth = evaluate(plan, case.surviving(known.survival_with(opened(plan)))).goodput_per_s
    assert truth >= evaluate(everywhere, case.surviving(known.survival)).goodput_per_s * (1 - 1e-9)
    assert evaluate(plan, case).goodput_per_s == evaluate(plan, for_its_ramps).goodput_per_s == pytest.approx(truth)
