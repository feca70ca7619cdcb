"""What batches are worth on a device, and the most that constant ones are worth over early exit in one split."""

from dataclasses import replace

import pytest

from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import EARLY_EXIT, baseline
from isobatch.optimizer.pipelines.batch_gain import BatchGain, batch_gains
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.problem import Problem
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.latency import LatencyTable
from tests.helpers.simulated_fleet import facts as fleet_of


def network(eight_s: float, devices: int = 1) -> Problem:
    """Two blocks that take a second for one input and `eight_s` for eight; half of the inputs leave between them."""
    nothing = ((0.0, 0.0),) * 2
    table = LatencyTable("a", (1, 8), ((1.0, 1.0), (eight_s, eight_s)), nothing, 0.0, (8, 8), (1, 1), "measured")
    return Problem((1.0, 0.5), (table,), (Device("a", devices, 10**9, 1.0),), {("a", "a"): Link("a", "a", 1e9, 0.01)})


EIGHT = Objective(max_batch=8)


def gain(facts: Problem, objective: Objective = EIGHT) -> BatchGain:
    (result,) = batch_gains(facts, objective)
    return result


def test_where_a_batch_takes_as_long_as_an_input_constant_ones_are_worth_the_places_that_shrinking_leaves_empty() -> (
    None
):
    result = gain(network(eight_s=1.0))
    assert (result.batch, result.gain) == (8, 8.0)
    early_per_s = 8 / (1 + (1 - 0.5**8))
    assert result.at_most == pytest.approx(8 / 1.5 / early_per_s)
    assert "gains 8 times from batches of 8; constant batches are worth at most 1.33 times" in str(result)
    assert "does as well" not in str(result)


def test_where_a_batch_saves_nothing_early_exit_in_one_split_does_as_well() -> None:
    result = gain(network(eight_s=8.0))
    assert (result.gain, result.at_most) == (pytest.approx(1.0), pytest.approx(1.0))
    assert str(result).endswith("at most 1.00 times early exit here, so early exit in one split does as well")


def test_an_slo_that_early_exit_in_one_split_cannot_keep_is_said() -> None:
    result = gain(network(eight_s=1.0), Objective(slo_s=0.5))
    assert result.at_most is None
    assert str(result).endswith(
        "gains 8 times from batches of 8; early exit in one split does not keep this SLO or fit"
    )


@pytest.mark.parametrize("slo_s", [0.015, 0.02, 0.1, None])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("survival", [(1.0, 0.7, 0.5, 0.2), (1.0, 1.0, 1.0, 1.0), (1.0, 0.1, 0.1, 0.1)])
def test_no_plan_gains_more(slo_s: float | None, count: int, survival: tuple[float, ...]) -> None:
    facts = fleet_of(fast=count).surviving(survival)
    limits = Objective(slo_s=slo_s, slack=0.0, max_batch=8)
    plan, early_exit = side_by_side(facts, limits), baseline(EARLY_EXIT, facts, limits).score
    most = gain(facts, replace(limits, slack=0.2)).at_most
    assert 1.0 <= plan.promise.goodput_per_s / early_exit.goodput_per_s <= most * (1 + 1e-9)


def test_each_kind_is_told_by_itself_and_no_batch_is_larger_than_asked() -> None:
    both = fleet_of(fast=1, slow=3)
    result = list(batch_gains(both, Objective(max_batch=4)))
    assert [(each.kind, each.batch) for each in result] == [("fast", 4), ("slow", 4)]
    assert result[1] == gain(fleet_of(slow=3), Objective(max_batch=4))


def test_devices_beyond_the_limit_of_a_plan_are_not_multiplied_by_a_hundred() -> None:
    many, few = gain(network(eight_s=1.0, devices=20_000)), gain(network(eight_s=1.0))
    assert many.at_most == pytest.approx(few.at_most)
