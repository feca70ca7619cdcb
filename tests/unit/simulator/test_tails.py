"""Plans whose answers are no later than without exits, at any load."""

from dataclasses import replace
from functools import cache

import pytest

from isobatch.cluster.simulator.plan_choice import best_simulated
from isobatch.cluster.simulator.simulation import World
from isobatch.cluster.simulator.sustained import run
from isobatch.cluster.simulator.tails import LOADS, MOST, SEED, Tails
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import NO_EXITS, baseline, no_later
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Plan
from tests.helpers.simulated_fleet import FAST, HASTY, TWO

DEAR = replace(FAST, tables=(replace(FAST.tables[0], stop_s=None),))  # to stop at a ramp takes as long as a launch
LIMITED = no_later(DEAR, Objective(max_batch=8))
INPUTS = 500


@cache
def tails() -> Tails:
    stock = baseline(NO_EXITS, DEAR, LIMITED).plan
    assert stock is not None
    assert LIMITED.slo_s is not None
    return Tails(DEAR, stock, LIMITED.slo_s, INPUTS)


@cache
def planned() -> Plan:
    plan = side_by_side(DEAR, LIMITED)
    assert plan is not None
    return plan


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
    assert evaluate(planned(), DEAR).latency_s <= evaluate(tails().stock, DEAR).latency_s * (1 + 1e-9)
    assert not tails().kept_by(planned())


def test_the_chosen_plan_is_no_later_at_any_load_and_sustains_more_than_without_exits() -> None:
    found = best_simulated(planned(), DEAR, LIMITED, lambda *_: None, replace(HASTY, tails=tails()))
    assert max(tails().ratios(found.plan)) <= MOST
    assert found.after_per_s > 1.05 * found.before_per_s
