"""Devices of one fleet divided among several applications, against all divisions."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.fleet.divisions import GOALS, best_by_trying, random_fleet, value_on, worth_on
from experiments.planner.settings import BERT_BASE, DISTILBERT
from isobatch.optimizer.fleets.application import FleetApplication, FleetGoal, Worths
from isobatch.optimizer.fleets.division import divide, equal_shares
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.profiles.devices import fleet
from isobatch.profiles.errors import UserError

# Numbers of random fleets. Trying all divisions takes several times as long for the least cost.
SMALL: dict[FleetGoal, tuple[int, ...]] = {"goodput": (54, 11), "cost": (49, 11), "fairness": (54, 11)}
few = settings(max_examples=3, deadline=None, derandomize=True)
goals = st.sampled_from(GOALS)


def is_small(seed: int) -> bool:
    """Whether two applications on four devices or fewer: all their plans are soon made."""
    applications, devices = random_fleet(seed)
    return len(applications) == 2 and sum(device.count for device in devices) <= 4


seeds = st.integers(0, 10**6).filter(is_small)


@pytest.mark.parametrize("goal", GOALS)
def test_no_division_of_a_small_fleet_is_better_and_the_bound_of_a_large_one_holds(goal: FleetGoal) -> None:
    """Without plans of its parts a small fleet is divided as a large one."""
    divided = 0
    for applications, devices in map(random_fleet, SMALL[goal]):
        best = best_by_trying(applications, devices, goal)
        if best is None:
            for most_plans in (400, 0):
                with pytest.raises(UserError):
                    divide(applications, devices, goal, most_plans=most_plans)
            continue
        exact, divided = divide(applications, devices, goal), divided + 1
        assert value_on(applications, devices, exact.parts, goal) == pytest.approx(best, rel=1e-9)
        assert (exact.gap, exact.exact) == (0.0, True)
        large = divide(applications, devices, goal, most_plans=0)
        assert not large.exact
        for each in (exact, large):
            assert (np.sum(each.parts, axis=0) <= [device.count for device in devices]).all()
        value = value_on(applications, devices, large.parts, goal)
        assert value is not None, "nobody has less than it needs"
        if goal == "cost":
            assert -value[0] <= -best[0] * (1 + large.gap) * (1 + 1e-6)
        else:
            assert best[0] <= value[0] * (1 + large.gap) * (1 + 0.01) * (1 + 1e-6)  # plans are near the best by 1 %
        assert value[0] <= best[0] + abs(best[0]) * 1e-9
    assert 0 < divided < len(SMALL[goal]), "some can be divided, and some cannot"


@few
@given(seeds, goals)
def test_with_more_devices_no_value_is_smaller(seed: int, goal: FleetGoal) -> None:
    applications, devices = random_fleet(seed)
    more = [replace(devices[0], count=devices[0].count + 1), *devices[1:]]

    def value(has: list) -> tuple[float, ...]:  # type: ignore[type-arg]
        facts = [replace(each, facts=each.facts.with_devices(has)) for each in applications]
        try:
            return value_on(facts, has, divide(facts, has, goal).parts, goal) or ()
        except UserError:
            return ()

    before, after = value(list(devices)), value(more)
    assert after >= tuple(each - abs(each) * 1e-9 for each in before)


@few
@given(seeds)
def test_no_plan_on_part_of_a_fleet_exceeds_what_its_devices_are_worth(seed: int) -> None:
    applications, devices = random_fleet(seed)
    part = tuple(each.count // 2 for each in devices)
    for each in applications:
        if side_by_side(each.facts, each.objective) is None:
            continue
        rows = Worths.of(each, devices, 0.01, {}).rows
        for counts in (part, tuple(device.count for device in devices)):
            sustained = worth_on(
                replace(each, weight=1.0, rate_per_s=None, least_per_s=0.0), devices, counts, "goodput"
            )
            assert sustained <= float((rows @ counts).min()) * (1 + 1e-9)


FLEET = fleet("v100=2,k80=2")


def bert(**fields: float) -> FleetApplication:
    return FleetApplication("bert", BERT_BASE.facts("v100=2,k80=2"), Objective(slo_s=0.1), **fields)  # type: ignore[arg-type]


def distil(**fields: float) -> FleetApplication:
    facts = DISTILBERT.facts("v100=2,k80=2")
    return FleetApplication("distil", facts, Objective(slo_s=0.1), **fields)  # type: ignore[arg-type]


def test_one_application_alone_gets_all_devices() -> None:
    assert divide([bert()], FLEET, "goodput").parts == ((2, 2),)


def test_weight_and_rate_decide_who_gets_the_fast_devices() -> None:
    assert divide([bert(), distil()], FLEET, "goodput", 0.01).parts[1][0] == 2, "DistilBERT answers twice as many"
    assert divide([bert(weight=9.0), distil()], FLEET, "goodput", 0.01).parts[0][0] == 2
    assert divide([bert(), distil(rate_per_s=100.0)], FLEET, "goodput", 0.01).parts[0][0] == 2


def test_the_application_of_lower_priority_is_named_with_what_is_missing() -> None:
    demanding = bert(least_per_s=6000.0), distil(least_per_s=10000.0)
    for large in (400, 0):
        with pytest.raises(
            UserError, match=r"^distil needs 10000 per second, .* beside what bert must have: .* missing$"
        ):
            divide(demanding, FLEET, "goodput", 0.01, large)
        with pytest.raises(UserError, match=r"^bert needs 6000 per second, .* beside what distil must have: "):
            divide([demanding[0], replace(demanding[1], priority=1)], FLEET, "goodput", 0.01, large)
        with pytest.raises(UserError, match=r"^bert needs 90000 per second, these devices sustain [\d.]+: "):
            divide([bert(least_per_s=9e4), distil()], FLEET, "fairness", 0.01, large)


def test_every_application_gets_a_device_unless_it_may_get_none() -> None:
    one = fleet("v100=1")
    first, second = (replace(each, facts=each.facts.with_devices(one)) for each in (bert(), distil()))
    with pytest.raises(UserError, match=r"^distil: no device that it could use is left beside what bert must have"):
        divide([first, second], one, "goodput")
    assert divide([replace(first, least_per_s=0.0), second], one, "goodput").parts == ((0,), (1,))


def test_devices_that_cost_nothing_and_an_application_that_may_get_none_are_divided_on_a_large_fleet() -> None:
    free = [replace(each, price_per_hour=0.0) for each in FLEET]
    asking = [replace(each, facts=each.facts.with_devices(free)) for each in (bert(), distil())]
    assert divide(asking, free, "cost", 0.01, most_plans=0).gap == 0.0
    one = fleet("v100=1")
    poor, other = (replace(each, facts=each.facts.with_devices(one)) for each in (bert(least_per_s=0.0), distil()))
    assert divide([poor, other], one, "fairness", 0.01, most_plans=0).parts == ((0,), (1,))


@pytest.mark.parametrize("rate_per_s", [1e5, 1e9])
def test_a_large_fleet_is_divided_fairly_between_rates_that_are_far_apart(rate_per_s: float) -> None:
    asking = bert(rate_per_s=rate_per_s), distil(rate_per_s=1.0)
    exact, large = (divide(asking, FLEET, "fairness", 0.01, most_plans) for most_plans in (400, 0))
    assert exact.value[0] <= large.value[0] * (1 + large.gap) * (1 + 0.01)
    assert large.value[0] >= 0.9 * exact.value[0]


def test_an_application_without_any_plan_is_named() -> None:
    with pytest.raises(UserError, match=r"^distil: 0.01 ms SLO: the fastest plan needs"):
        divide([bert(), replace(distil(), objective=Objective(slo_s=1e-5))], FLEET, "goodput")


def test_a_plan_that_sustains_nothing_lowers_what_is_expected() -> None:
    kept = [bert(kept=0.8).learned(sustained_per_s, 100.0).kept for sustained_per_s in (50.0, 0.0)]
    assert kept == pytest.approx([0.4, 0.08])
    assert bert(kept=0.8).learned(0.0, 0.0).kept == 0.8, "without devices nothing was expected"


@few
@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 7))
def test_equal_shares_differ_by_one_device_at_most(counts: list[int], applications: int) -> None:
    shares = np.array(equal_shares(tuple(counts), applications))
    assert shares.sum(axis=0).tolist() == counts
    assert np.ptp(shares.sum(axis=1)) <= 1
    assert (np.ptp(shares, axis=0) <= 1).all()
