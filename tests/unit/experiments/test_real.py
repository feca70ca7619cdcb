"""bench-real: what its figures are made of."""

import pytest

from deployments.front.observed import LaunchShape
from experiments.real.run import figures_of
from experiments.real.served import CONSTANT, Nearly, PlannedSystem
from experiments.shared.real_network import KIND
from optimizer.plan import Placement, Plan, Split
from optimizer.problem import problem
from profiles.devices import fleet, links_between
from profiles.exits import ExitProfile
from profiles.files import Profile
from profiles.latency import LatencyTable

TABLE = LatencyTable(
    KIND, (1, 8), ((0.01,) * 4, (0.02,) * 4), ((0.001, 0.0, 0.0, 0.0),) * 2, 0.002, (8,) * 4, (8,) * 4, "measured",
    stop_s=0.0005,
)  # fmt: skip
PROFILE = Profile("toy", (TABLE,), ExitProfile((1.0, 0.5, 0.5, 0.5)))


def system(name: str, promised_per_s: float) -> PlannedSystem:
    devices = fleet(f"{KIND}=1")
    plan = Plan((Placement(KIND, 1, (Split(0, 1, 8, (0,)), Split(1, 4, 8)), local=True),))
    return PlannedSystem(name, plan, promised_per_s, problem(PROFILE, devices, links_between(devices)))


def test_what_launches_should_take_is_told_by_their_split_and_size() -> None:
    constant = system(CONSTANT, 50.0)
    assert constant.expected_s(LaunchShape(KIND, 0, 1, 8)) == pytest.approx(0.002 + 0.02 + 0.001)
    assert constant.expected_s(LaunchShape(KIND, 1, 4, 1)) == pytest.approx(0.002 + 3 * 0.01)
    assert constant.expected_s(LaunchShape(KIND, 0, 4, 8)) == 0.0, "of another plan"


def test_figures_are_medians_of_all_rounds_and_ratios_of_these() -> None:
    found = [system(name, promised) for name, promised in ((CONSTANT, 50.0), ("early_exit", 40.0), ("no_exits", 20.0))]
    rates = {CONSTANT: [45.0, 48.0, 60.0], "early_exit": [40.0] * 3, "no_exits": [24.0] * 3}
    looks = [Nearly(fill, 0.1, 1.0, 1.0, 1.0) for fill in (0.5, 0.9, 0.7)]
    told = figures_of(found, rates, dict.fromkeys(rates, looks))
    assert told["live_over_promise_constant"] == 48.0 / 50.0
    assert told["constant_over_no_exits"] == 2.0
    assert told["chosen_over_best_simple"] == 48.0 / 40.0
    assert told["fill"] == 0.7
