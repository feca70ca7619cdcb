"""The controller on the simulator: the same loop and the same decisions as live, on the product's own dispatcher."""

import numpy as np

from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.rehearsal import replan
from isobatch.cluster.load.workloads import Mix, arrivals, exit_blocks
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.profiles.exits import ExitProfile
from tests.helpers.fluid_application import EASY, HARD, batches, first_plan, question

SECONDS = 45.0
QUICK = Patience(replan_every_s=15.0, look_every_s=2.5, start_s=1.0)


def test_a_poor_plan_is_left_and_nobody_is_lost():
    problem = question(EASY)
    poor = batches(first_plan(problem), 1)
    world = World(poor, problem.facts(EASY, Corrections()), slo_s=2.0)
    times_s = arrivals("poisson", 300.0, SECONDS, seed=0)
    inputs = [(times_s, exit_blocks(ExitProfile(EASY), len(times_s), np.random.default_rng(0)))]
    stayed = simulate(world, inputs, SECONDS)
    controlled = replan(world, problem, inputs, SECONDS, patience=QUICK)
    assert controlled.changes
    assert controlled.report.goodput_per_s > 1.5 * stayed.goodput_per_s
    report = controlled.report
    assert report.answered + report.refused + report.expired == report.arrived
    # What is told of splits is told of the last plan: the first one's launches, of batches of 1, do not count.
    since_s = report.tally.launched_since_s
    assert since_s == controlled.plans[-1][0] > 0
    busy = [fill.busy_s / (SECONDS - since_s) for fills in report.fills for fill in fills.values()]
    assert 0 < sum(busy) < report.plan.devices()["v100"]
    assert sum(fills[0].inputs for fills in report.fills) <= 1.05 * 300 * (SECONDS - since_s)


def test_a_switch_is_followed_within_two_windows():
    problem = question(EASY)
    world = World(first_plan(problem), problem.facts(EASY, Corrections()), slo_s=2.0)
    times_s = arrivals("poisson", 300.0, SECONDS, seed=1)
    mix = Mix(ExitProfile(EASY), ExitProfile(HARD), ((0.0, 1.0), (15.0, 0.0)))
    inputs = [(times_s, mix.exit_blocks(times_s, np.random.default_rng(1)))]
    changes = replan(world, problem, inputs, SECONDS, patience=QUICK).changes
    assert any(15 < event.at_s <= 15 + 2 * QUICK.replan_every_s + QUICK.look_every_s for event in changes)
    assert len(changes) <= 6
