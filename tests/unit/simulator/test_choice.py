"""Plans that are chosen, and promised, by what the simulator sustains of them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any, TypeVar

import pytest

from isobatch.cluster.simulator.cores import Cores
from isobatch.cluster.simulator.plan_choice import DEFAULT_EFFORT, BestSoFar, best_simulated, why_not_simulated
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import World
from isobatch.cluster.simulator.sustained import (
    confirmed_rate_per_s,
    rate_beyond,
    run,
    run_if_sustained,
    sustained_per_s,
)
from isobatch.cluster.simulator.tails import LOADS, MOST, SEED, Tails
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import NO_EXITS, baseline, no_later
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.optimizer.problem import Problem
from isobatch.profiles.lengths import Lengths
from tests.helpers.simulated_fleet import BLOCKS, FAST, TWO, facts

Item = TypeVar("Item")
Result = TypeVar("Result")
FIND = partial(side_by_side, gap=0.03)
BRIEF = replace(DEFAULT_EFFORT, inputs=300, slos=4, last_inputs=400, last_slos=4, most=3_000)
TIGHT = Objective(slo_s=0.02, max_batch=8)
POOR = Plan((Placement("fast", 4, (Split(0, BLOCKS, 1),)),))


def planned(problem: Problem, objective: Objective) -> Any:
    return side_by_side(problem, objective)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95, 1.3])
def test_a_run_that_is_broken_off_would_not_have_been_kept(share: float) -> None:
    world, rate = World(TWO, FAST, 0.05), share * evaluate(TWO, FAST).goodput_per_s
    kept, whole = run_if_sustained(world, rate, 2000, 3), run(world, rate, 2000, 3)
    assert (kept is not None) == (whole.good_share >= 0.99)
    assert kept is None or kept.good == whole.good


def test_the_promise_is_what_other_inputs_show() -> None:
    plan, effort = planned(FAST, TIGHT), replace(BRIEF, last_inputs=1000, most=2_000)
    result = best_simulated(plan, FAST, TIGHT, FIND, effort)
    assert result.plan.promise.goodput_per_s == result.after_per_s
    kept = confirmed_rate_per_s(World(result.plan, FAST, 0.02), result.after_per_s, 2000, 5, 20)
    assert kept == pytest.approx(result.after_per_s, rel=0.08)
    assert result.after_per_s > 1.05 * result.before_per_s


def test_a_promise_covers_texts_longer_than_the_mean() -> None:
    alike = replace(facts(fast=1), length=10)
    mixed = replace(alike, lengths=Lengths((2, 2, 2, 2, 42)))
    searches = [BestSoFar(each, 0.02, planned(each, TIGHT), BRIEF) for each in (alike, mixed)]
    of_alike, of_mixed = (search.choose(search.best) for search in searches)
    assert of_mixed.after_per_s < 0.9 * of_alike.after_per_s
    assert run_if_sustained(World(of_mixed.plan, mixed, 0.02), 0.9 * of_mixed.after_per_s, 2000, 5)


def test_a_plan_that_is_promised_in_a_hurry_is_simulated_by_few_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[int]()

    def counted(world: World, rate_per_s: float, inputs: int, seed: int) -> Report:
        counts.append(inputs)
        return run(world, rate_per_s, inputs, seed)

    monkeypatch.setattr("isobatch.cluster.simulator.sustained.run", counted)
    hurried = replace(BRIEF, last_inputs=100_000, fits=lambda inputs: False)
    result = best_simulated(planned(FAST, TIGHT), FAST, TIGHT, FIND, hurried)
    assert result.tried == 0
    assert sum(counts) < 0.2 * hurried.last_inputs
    lasts = confirmed_rate_per_s(World(result.plan, FAST, 0.02), result.after_per_s, 2000, 5, 20)
    assert result.after_per_s == pytest.approx(lasts, rel=0.08)


def test_plans_are_compared_while_there_is_time_for_the_promise() -> None:
    left = [15_000.0]

    def fits(inputs: float) -> bool:
        left[0] -= 1_000
        return inputs <= left[0]

    result = best_simulated(planned(FAST, TIGHT), FAST, TIGHT, FIND, replace(BRIEF, most=1e9, fits=fits))
    assert 0 < result.tried < 30


def test_a_path_that_hardly_anybody_takes_need_not_fit() -> None:
    """One in 500 goes to the end, where the planner believes that there is no time for larger batches."""
    rare, objective = replace(FAST, survival=(1.0, 0.002, 0.002, 0.002)), replace(TIGHT, slo_s=0.008)
    result = best_simulated(planned(rare, objective), rare, objective, FIND, replace(BRIEF, most=1_000))
    assert result.gain > 0.1


def test_a_kind_that_the_slack_leaves_idle_works() -> None:
    """A lone input takes the slow kind 16.5 ms, which is less than the SLO and more than the SLO less its slack."""
    both = facts(fast=1, slow=6)
    plan = planned(both, TIGHT)
    assert "slow" not in plan.devices()
    result = best_simulated(plan, both, TIGHT, FIND, replace(BRIEF, most=1_000))
    assert "slow" in result.plan.devices()
    assert result.gain > 0.1


def test_cuts_that_were_asked_for_are_kept() -> None:
    objective = Objective(slo_s=0.03, max_batch=8, cuts=(2,))
    cut = best_simulated(planned(FAST, objective), FAST, objective, FIND, replace(BRIEF, most=800)).plan
    assert {split.start for split in cut.splits} == {0, 2}


def test_what_playing_does_not_tell_is_not_played() -> None:
    assert not why_not_simulated(TIGHT)
    for limit in ({"goal": "latency"}, {"goodput_per_s": 10.0}, {"cost_per_hour": 100.0}, {"slo_s": None}):
        assert why_not_simulated(replace(TIGHT, **limit)).endswith("without another limit")  # type: ignore[arg-type]


def test_without_time_the_plan_stays_and_is_told_what_it_sustains() -> None:
    late = replace(BRIEF, last_slos=3, out_of_time=lambda: True)
    result = best_simulated(POOR, FAST, TIGHT, FIND, late)
    assert replace(result.plan, promise=None) == POOR
    assert (result.tried, result.gain) == (0, 0.0)
    assert result.before_per_s == pytest.approx(sustained_per_s(POOR, FAST, 0.02, 400, 1, slos=3), rel=0.2)
    with pytest.raises(ValueError, match="within an SLO"):
        best_simulated(POOR, FAST, Objective(), FIND, late)


def test_a_poor_plan_gets_better_and_each_better_plan_is_told_at_once_the_first_one_too() -> None:
    calls: list[tuple[Plan, float, int]] = []
    effort = replace(BRIEF, most=1_000, better=lambda plan, rate_per_s, tried: calls.append((plan, rate_per_s, tried)))
    result = best_simulated(POOR, FAST, TIGHT, FIND, effort)
    assert calls[0][0] == POOR
    rates = [rate_per_s for _, rate_per_s, _ in calls]
    assert rates == sorted(rates)
    assert result.gain > 0.1
    assert result.plan.promise.gap >= 0
    assert not evaluate(result.plan, FAST).broken


def test_a_plan_on_a_plateau_gives_way_to_plain_batches() -> None:
    """No neighbour is better and no other plan is found: the simple plans are all there is."""
    stuck = Plan((Placement("fast", 4, (Split(0, 1, 1, (0,)), Split(1, BLOCKS, 1))),))
    result = best_simulated(stuck, FAST, TIGHT, lambda *_: None, replace(BRIEF, most=1_000))
    assert result.gain > 0.1


ONE_SPLIT = Plan((Placement("fast", 1, (Split(0, BLOCKS, 8, (0, 1, 2)),)),))
TWO_SPLITS = Plan((Placement("fast", 1, (Split(0, 2, 8, (0, 1)), Split(2, BLOCKS, 8, (2,))), local=True),))


@pytest.mark.parametrize(
    ("survival", "rivals", "splits"),
    [
        ((1.0, 0.9, 0.8, 0.7), [ONE_SPLIT], 1),  # two splits sustain 2 % more
        ((1.0, 0.5, 0.25, 0.2), [ONE_SPLIT], 2),  # 24 %
        ((1.0, 0.85, 0.75, 0.65), [ONE_SPLIT], 1),  # 4 %
        ((1.0, 0.85, 0.75, 0.65), [ONE_SPLIT, TWO_SPLITS], 2),  # a rival that sustains more is not given up
    ],
)
def test_two_splits_are_chosen_only_where_they_sustain_clearly_more(
    survival: tuple[float, ...], rivals: list[Plan], splits: int
) -> None:
    steady = replace(BRIEF, slos=10, last_slos=10)  # shorter runs tell a difference of 5 % less often
    search = BestSoFar(replace(facts(fast=1), survival=survival), 0.1, TWO_SPLITS, steady)
    chosen = search.choose(TWO_SPLITS, rivals)
    assert len(chosen.plan.splits) == splits
    assert (chosen.comparison == "the simplest within 5% of the best") == (splits == 1)
    assert chosen.before_per_s > 0.97 * chosen.after_per_s


def three_ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    items = iter(items)
    while some := [*islice(items, 3)]:
        yield from [*map(function, some)]


def test_the_same_question_has_the_same_answer_whatever_is_simulated_ahead() -> None:
    plan, effort = planned(FAST, TIGHT), replace(BRIEF, inputs=100, slos=2, last_inputs=100, last_slos=2, most=2_500)
    one_by_one = best_simulated(plan, FAST, TIGHT, FIND, effort)
    assert one_by_one.tried > 3
    assert best_simulated(plan, FAST, TIGHT, FIND, replace(effort, each=three_ahead)) == one_by_one
    with Cores(2) as cores:
        assert best_simulated(plan, FAST, TIGHT, FIND, replace(effort, each=cores.each)) == one_by_one


def test_results_of_other_cores_come_in_order_and_what_is_not_needed_is_not_waited_for() -> None:
    with Cores(2) as cores:
        assert [*cores.each(abs, range(-5, 0))] == [5, 4, 3, 2, 1]
        assert next(cores.each(abs, iter([-1, *range(100)]))) == 1


def test_a_share_in_time_that_is_level_does_not_end_the_search_at_a_low_rate() -> None:
    """Those 0.94 % that go to the end are late at any rate, and up to half of the estimate hardly anybody else is."""
    rare = replace(FAST, survival=(1.0, 0.0094, 0.0094, 0.0094))
    world = World(Plan((Placement("fast", 4, (Split(0, BLOCKS, 1, (0,)),)),)), rare, 0.0046)
    most_per_s = evaluate(world.plan, rare).goodput_per_s
    low_per_s = confirmed_rate_per_s(world, 0.1 * most_per_s, 2000, 1, 20)
    assert low_per_s < 0.2 * most_per_s
    beyond_per_s = rate_beyond(world, low_per_s, most_per_s, 2000, 1, 20, 0.99)
    assert beyond_per_s > 0.4 * most_per_s
    assert run_if_sustained(world, beyond_per_s, 2000, 1)
    assert rate_beyond(world, 0.0, most_per_s, 2000, 1, 20, 0.99) == 0.0


# Plans whose answers are no later than without exits, at any load

DEAR = replace(FAST, tables=(replace(FAST.tables[0], stop_s=None),))  # to stop at a ramp takes as long as a launch
LIMITED = no_later(DEAR, Objective(max_batch=8))
INPUTS = 500


@cache
def tails() -> Tails:
    stock = baseline(NO_EXITS, DEAR, LIMITED).plan
    return Tails(DEAR, stock, LIMITED.slo_s, INPUTS)


def test_ratios_are_those_of_runs_with_the_same_inputs() -> None:
    stock = tails().stock
    most_per_s = evaluate(stock, DEAR).goodput_per_s
    assert list(tails().ratios(stock)) == [1.0] * len(LOADS)
    for load, ratio in zip(LOADS, tails().ratios(TWO), strict=True):
        with_s, without_s = (
            run(World(plan, DEAR, 9.0), load * most_per_s, INPUTS, SEED).tally.quantile_s(0.99) for plan in (TWO, stock)
        )
        assert ratio == pytest.approx(with_s / without_s)


def test_a_plan_that_is_in_time_at_full_load_may_be_later_at_others() -> None:
    assert evaluate(planned(DEAR, LIMITED), DEAR).latency_s <= evaluate(tails().stock, DEAR).latency_s * (1 + 1e-9)
    assert not tails().kept_by(planned(DEAR, LIMITED))


def test_the_chosen_plan_is_no_later_at_any_load_and_sustains_more_than_without_exits() -> None:
    result = best_simulated(planned(DEAR, LIMITED), DEAR, LIMITED, lambda *_: None, replace(BRIEF, tails=tails()))
    assert max(tails().ratios(result.plan)) <= MOST
    assert result.after_per_s > 1.05 * result.before_per_s


def test_a_sustained_rate_is_raised_only_as_long_as_there_is_time() -> None:
    world, most_per_s = World(POOR, FAST, 0.02), evaluate(POOR, FAST).goodput_per_s
    calls = list[float]()

    def fits(inputs: float) -> bool:
        calls.append(inputs)
        return False

    low_per_s = confirmed_rate_per_s(world, 0.1 * most_per_s, 2000, 1, 20, fits=fits)
    assert low_per_s == pytest.approx(0.106 * most_per_s)
    assert len(calls) == 1
