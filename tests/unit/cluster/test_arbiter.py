"""The arbiter of a fleet: who gets which devices, in which order, and what it never does."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.fleet.bruteforce import agrees
from isobatch.cluster.controller.arbiter import Grant, in_circle
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.fleet_division import Budget
from isobatch.cluster.controller.record import NextStep
from isobatch.cluster.controller.rehearsal import Member, replan_fleet
from isobatch.cluster.load.workloads import exit_blocks
from isobatch.cluster.simulator.simulation import World
from isobatch.optimizer.fleets.application import FleetGoal
from isobatch.optimizer.plan import Plan
from isobatch.profiles.exits import ExitProfile
from tests.helpers.fluid_application import HARD, MEDIUM, Fluid, control_loop, moves, run, table
from tests.helpers.two_applications import (
    ASKED,
    EACH_PER_S,
    FLEET,
    IDS,
    OWN,
    WINDOW_S,
    arbiter,
    by_ids,
    standing,
    sustained,
)


def test_the_giver_shrinks_before_the_taker_grows() -> None:
    fleet = arbiter()
    both = {"a": standing(0.1, OWN["a"]), "b": standing(1.9, OWN["b"], refuses=True)}
    for at_s in (0.0, 2.5):
        assert fleet.look(both | {"b": standing(1.9, OWN["b"])}, FLEET, at_s) == {}, "no input is refused yet"
    first = fleet.look(both, FLEET, 5.0)
    assert list(first) == ["a"], "at once, though the window has not ended"
    shrunk = first["a"].budget
    assert sum(shrunk.values()) < sum(OWN["a"].values())
    assert "inputs of b are refused: weighted goodput" in first["a"].why
    waiting = {"a": standing(0.1, shrunk, OWN["a"]), "b": both["b"]}
    assert fleet.look(waiting, FLEET, 10.0) == {}, "the plan of the giver still uses the device"
    second = fleet.look(waiting | {"a": standing(0.1, shrunk)}, FLEET, 15.0)
    assert list(second) == ["b"]
    assert second["b"].why.startswith("b gets 1 ")
    assert {kind: shrunk[kind] + second["b"].budget[kind] for kind in FLEET} == FLEET


@pytest.mark.parametrize("goal", ["goodput", "fairness"])
def test_where_replicas_start_slowly_a_free_device_is_given_all_the_same(goal: FleetGoal) -> None:
    own = {"a": {"v100": 0, "k80": 1}, "b": {"v100": 2, "k80": 0}}
    fleet, a = arbiter(own, goal), standing(0.0, own["a"])
    b = replace(standing(9.0, own["b"]), start_s=3 * WINDOW_S)
    assert fleet.look({"a": a, "b": b}, FLEET, 0.0) == {}
    grants = fleet.look({"a": a, "b": replace(b, refuses=True)}, FLEET, 5.0)
    assert {name: each.budget for name, each in grants.items()} == {"b": {"v100": 2, "k80": 1}}


def test_a_giver_that_cannot_shrink_is_asked_less_and_less_often() -> None:
    fleet, b = arbiter(), standing(1.9, OWN["b"])
    fleet.look({"a": standing(0.1, OWN["a"]), "b": b}, FLEET, 0.0)
    shrunk = fleet.look({"a": standing(0.1, OWN["a"]), "b": replace(b, refuses=True)}, FLEET, 5.0)["a"].budget
    waits_s = [fleet.look_again_s]
    while sum(waits_s) < 115:
        fleet.look({"a": standing(0.1, shrunk, OWN["a"]), "b": b}, FLEET, 5.0 + sum(waits_s))
        assert fleet.is_moving
        waits_s.append(fleet.look_again_s)
    assert waits_s[:8] == [0.5] * 8
    assert waits_s[-1] == fleet.config.look_every_s


def test_a_device_that_its_owner_does_not_use_is_granted_once_the_owner_has_heard_of_it() -> None:
    """The owner may be about to roll out a plan for it, and the grant may not arrive."""
    fleet, b = arbiter(), standing(1.9, OWN["b"], refuses=True)
    fleet.look({"a": standing(0.1, OWN["a"]), "b": replace(b, refuses=False)}, FLEET, 0.0)
    kept = fleet.look({"a": standing(0.1, OWN["a"]), "b": b}, FLEET, 5.0)["a"].budget
    fleet, a = arbiter(), standing(0.1, OWN["a"], kept)
    fleet.look({"a": a, "b": replace(b, refuses=False)}, FLEET, 0.0)
    assert list(fleet.look({"a": a, "b": b}, FLEET, 5.0)) == ["a"]
    fleet.send_again(["a"])
    assert fleet.look({"b": b}, FLEET, 10.0) == {}
    assert list(fleet.look({"a": a, "b": b}, FLEET, 15.0)) == ["a"]
    assert list(fleet.look({"a": standing(0.1, kept), "b": b}, FLEET, 20.0)) == ["b"]


def test_what_nobody_asks_for_moves_no_device() -> None:
    fleet = arbiter()
    for at_s in (0.0, WINDOW_S, 2 * WINDOW_S):
        assert fleet.look({name: standing(0.3, OWN[name]) for name in OWN}, FLEET, at_s) == {}
    assert [decision.budgets for decision in fleet.decisions] == [None]
    assert "no other division is worth its changes" in fleet.decisions[0].why


def test_lent_devices_return_when_their_owner_expects_inputs() -> None:
    fleet, lent = arbiter(), {"a": {"v100": 1, "k80": 0}, "b": {"v100": 1, "k80": 2}}
    fleet.look({"a": standing(0.1, lent["a"]), "b": standing(1.5, lent["b"])}, FLEET, 0.0)
    grants = fleet.look({"a": standing(1.0, lent["a"]), "b": standing(9.0, lent["b"], refuses=True)}, FLEET, WINDOW_S)
    assert {name: grant.budget for name, grant in grants.items()} == {"b": OWN["b"]}
    assert "not all have what they need" in grants["b"].why


def test_lost_devices_are_those_of_the_lowest_priority() -> None:
    standings = {name: standing(1.0, OWN[name]) for name in OWN}
    for first, last in (("a", "b"), ("b", "a")):
        fleet = arbiter(**{first: {"priority": 1}})
        fleet.look(standings, FLEET, 0.0)
        grants = fleet.look(standings, {"v100": 1, "k80": 2}, 5.0)
        assert grants[last].budget["v100"] == 0
        assert f"1 v100 are gone: not all have what they need; devices are missing: {last} may" in grants[last].why
        assert fleet.budgets[first]["v100"] == 1


@pytest.mark.parametrize("weight", [1.0, 10.0])
def test_where_the_least_goodput_is_out_of_reach_each_keeps_what_it_needs_of_its_own_devices(weight: float) -> None:
    """As after a burst, from which its controller learned that plans keep less than was estimated."""
    fleet = arbiter(a={"least_per_s": 0.95 * EACH_PER_S, "weight": weight})
    flooded = {name: standing(9.0, OWN[name], refuses=True) for name in OWN} | {
        "a": replace(standing(9.0, OWN["a"], refuses=True), kept=0.5)
    }
    for at_s in (0.0, 30.0, WINDOW_S):
        assert fleet.look(flooded, FLEET, at_s) == {}
    assert not any("missing" in each.why for each in fleet.decisions)


def test_an_application_that_does_not_answer_keeps_its_devices() -> None:
    fleet = arbiter()
    assert fleet.look({"b": standing(9.0, OWN["b"], refuses=True)}, FLEET, 0.0) == {}
    assert not fleet.decisions, "nobody knows yet what the other one has"
    fleet.look({name: standing(0.1, OWN[name]) for name in OWN}, FLEET, 5.0)
    assert fleet.look({"b": standing(9.0, OWN["b"], refuses=True)}, FLEET, 10.0) == {}
    assert fleet.budgets["a"] == OWN["a"]


def test_an_application_whose_controller_is_paused_keeps_its_devices() -> None:
    fleet = arbiter()
    paused = replace(standing(0.1, OWN["a"]), paused=True)
    standings = {"a": paused, "b": standing(1.9, OWN["b"], refuses=True)}
    for at_s in (0.0, 5.0, WINDOW_S):
        assert fleet.look(standings, FLEET, at_s) == {}
    assert fleet.budgets["a"] == OWN["a"]
    assert list(fleet.look(standings | {"a": replace(paused, paused=False)}, FLEET, 2 * WINDOW_S)) == ["a"]


def test_the_devices_of_an_application_without_any_plan_are_promised_to_nobody() -> None:
    """Its controller keeps the plan that runs, so that another one would wait for its devices for ever."""
    fleet = arbiter()
    slow = standing(1.0, OWN["a"])
    slow = replace(slow, objective=replace(slow.objective, slo_s=1e-4))
    standings = {"a": slow, "b": standing(1.9, OWN["b"], refuses=True)}
    assert fleet.look(standings, FLEET, 0.0) == {}
    assert fleet.look(standings, FLEET, 5.0) == {}
    assert fleet.look_again_s == fleet.config.look_every_s, "nothing is being moved"


def test_each_keeps_a_device_while_there_is_one_for_each() -> None:
    """Even if the least goodput of another one is not reached: no controller can do without any device."""
    fleet = arbiter(a={"priority": 1, "least_per_s": EACH_PER_S})
    standings = {name: standing(1.0, OWN[name]) for name in OWN}
    fleet.look(standings, FLEET, 0.0)
    fleet.look(standings, {"v100": 1, "k80": 1}, 5.0)
    aims = fleet.decisions[-1].budgets
    assert aims["a"]["v100"] == 1
    assert sum(aims["b"].values()) == 1
    assert "a may get less than agreed" in fleet.decisions[-1].why


def after_looks(
    own: dict[str, Budget], held: dict[str, Budget], present: Budget
) -> tuple[list[dict[str, Budget]], str]:
    """The budgets after each look, and the last decision: b wants its own devices back.

    As real controllers, these keep the plan that runs while they have no devices.
    """
    fleet, budgets, uses = arbiter(own), dict(held), dict(held)
    history = list[dict[str, Budget]]()
    for step in range(8):
        rates = {"a": 0.1, "b": 9.0}
        standings = {name: standing(rates[name], budgets[name], uses[name], name == "b" and step > 0) for name in own}
        budgets |= {name: grant.budget for name, grant in fleet.look(standings, present, 5.0 * step).items()}
        uses |= {name: budget for name, budget in budgets.items() if any(budget.values())}
        history.append(dict(budgets))
    return history, fleet.decisions[-1].why


def test_two_applications_never_wait_for_the_only_devices_of_each_other() -> None:
    one, other = {"v100": 1, "k80": 0}, {"v100": 0, "k80": 1}
    history, why = after_looks({"a": other, "b": one}, held := {"a": one, "b": other}, {"v100": 1, "k80": 1})
    assert all(budgets == held for budgets in history)
    assert why.endswith("refused: a and b would wait for each other's devices, so all keep theirs")


def test_an_application_that_moves_to_other_devices_has_some_at_any_time() -> None:
    own = {"a": {"v100": 0, "k80": 1}, "b": {"v100": 1, "k80": 1}}
    held = {"a": {"v100": 1, "k80": 0}, "b": {"v100": 0, "k80": 2}}
    history, _ = after_looks(own, held, {"v100": 1, "k80": 2})
    assert all(any(budget.values()) for budgets in history for budget in budgets.values())
    assert history[-1] == own


@pytest.mark.parametrize(
    ("present", "moves", "waiting"),
    [
        ("xyz", {"a": "xy", "b": "yz", "c": "zx"}, "abc"),
        ("xyz", {"a": "xy", "b": "yz"}, ""),  # z is free
        ("yz", {"a": "xy", "b": "yz"}, ""),  # the device of a is lost
        ("xyyw", {"a": "xy", "b": "yx", "c": "wy"}, "abc"),  # if c gets the free y, a waits for the other one
        ("xyy", {"a": "xy", "b": "yx"}, ""),
    ],
)
def test_only_those_that_may_wait_for_each_other_for_ever_are_in_a_circle(
    present: str, moves: dict[str, str], waiting: str
) -> None:
    def counts(devices: str) -> Budget:
        return {kind: devices.count(kind) for kind in "wxyz"}

    before, after = ({name: counts(move[at]) for name, move in moves.items()} for at in (0, 1))
    assert in_circle(before, after, counts(present)) == set(waiting)


def test_the_last_device_is_that_of_the_highest_priority() -> None:
    """The other application is parked: with no devices alone, its controller would keep the plan that runs."""
    fleet = arbiter(a={"priority": 1})
    standings = {name: replace(standing(1.0, OWN[name]), standby=None) for name in OWN}
    fleet.look(standings, FLEET, 0.0)
    left, nothing = {"v100": 1, "k80": 0}, {"v100": 0, "k80": 0}
    grants = fleet.look(standings, left, 5.0)
    assert grants["b"] == Grant(nothing, "b is parked", parked=True)
    assert fleet.decisions[-1].budgets == {"a": left, "b": nothing}
    ended = replace(standings["b"], budget=nothing, uses=nothing, parked=True, refuses=True)
    standings = {"a": replace(standings["a"], budget=left, uses=left), "b": ended}
    for at_s in (10.0, WINDOW_S, 2 * WINDOW_S):
        assert fleet.look(standings, left, at_s) == {}
    assert (list(fleet.parked), list(fleet.asleep)) == (["b"], []), "it has inputs, and waits for a device"
    woken = fleet.look(standings, left | {"k80": 1}, 2 * WINDOW_S + 5.0)["b"]
    assert (woken.budget, woken.parked) == ({"v100": 0, "k80": 1}, False)


@pytest.mark.parametrize("seed", [0, 3, 8])
def test_no_division_of_a_small_fleet_is_better(seed: int) -> None:
    assert agrees(seed)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from(["goodput", "fairness", "cost"]))
def test_no_two_plans_use_one_device_and_nobody_falls_below_its_own_share(seed: int, goal: FleetGoal) -> None:
    """Controllers that follow late, or not at all for a while."""
    random, fleet = np.random.default_rng(seed), arbiter(goal=goal)
    budgets: dict[str, Budget] = dict(OWN)
    uses: dict[str, Budget] = dict(OWN)
    for step in range(8):
        expected = {name: float(random.choice([0.0, 0.2, 0.9, 3.0])) for name in OWN}
        standings = {
            name: standing(expected[name], budgets[name], uses[name], bool(random.random() < 0.3))
            for name in OWN
            if step == 0 or random.random() < 0.8
        }
        for name, grant in fleet.look(standings, FLEET, 60.0 * step).items():
            budgets[name] = grant.budget
        for kind, count in FLEET.items():
            assert sum(max(budgets[name][kind], uses[name][kind]) for name in OWN) <= count
        if fleet.decisions and fleet.decisions[-1].at_s == 60.0 * step and (aims := fleet.decisions[-1].budgets):
            for name in standings:
                needed = min(max(expected[name] * EACH_PER_S, 0.0), EACH_PER_S)
                assert sustained(aims[name]) >= needed * (1 - 2 * ASKED.gap) or len(standings) < len(OWN)
        uses |= {name: budgets[name] for name in OWN if random.random() < 0.7}


def test_where_replicas_stand_by_no_two_applications_use_one_device() -> None:
    """Fronts follow late, replicas start late, and some are gone for a while."""
    random, fleet = np.random.default_rng(1), arbiter()
    budgets: dict[str, Budget] = dict(OWN)
    uses: dict[str, Budget] = dict(OWN)
    granted: dict[str, frozenset[str]] = {}
    used: dict[str, frozenset[str]] = {}
    for step in range(60):
        ready = {
            name: frozenset(
                id_ for id_ in IDS if step > 40 or (step > 3 and random.random() < 0.9) or id_.endswith("0")
            )
            for name in OWN
        }
        rates = {name: float(random.choice([0.1, 0.9, 3.0])) for name in OWN}
        standings = {
            name: by_ids(
                standing(rates[name], budgets[name], uses[name], rates[name] > 1),
                used.get(name, ready[name]),
                ready[name],
            )
            for name in OWN
        }
        for name, grant in fleet.look(standings, FLEET, 30.0 * step).items():
            budgets[name] = grant.budget
            if grant.device_ids is not None:
                granted[name] = grant.device_ids
        for name in OWN:
            if name in granted and (step > 50 or random.random() < 0.7):
                used[name] = granted[name]
                uses[name] = budgets[name]
        if len(used) == len(OWN):
            assert not used["a"] & used["b"]
            assert all(
                len(used[name]) <= sum(max(budgets[name][kind], uses[name][kind]) for kind in FLEET) for name in OWN
            )
    assert sum(map(len, used.values())) == len(IDS), "in the end each device is used"


def test_an_application_uses_every_device_until_the_arbiter_can_choose_its_first() -> None:
    """Here the first replicas of both run on the same devices, and the others have not started yet."""
    fleet, first = arbiter(), frozenset(("v100-0", "k80-0"))
    standings = {name: by_ids(standing(0.5, OWN[name]), first, first) for name in OWN}
    grants = fleet.look(standings, FLEET, 0.0)
    assert {name: grant.device_ids for name, grant in grants.items()} == {"a": first}
    standings = {"a": by_ids(standing(0.5, OWN["a"]), first), "b": by_ids(standing(0.5, OWN["b"]), frozenset(IDS))}
    grants = fleet.look(standings, FLEET, 5.0)
    assert {name: grant.device_ids for name, grant in grants.items()} == {"b": frozenset(IDS) - first}


def test_a_controller_plans_on_its_budget_from_the_next_look_on() -> None:
    app = Fluid(ASKED)
    loop = control_loop(app)
    run(app, loop, 240)
    assert app.running.devices() == FLEET
    loop.controller.grant({"v100": 1, "k80": 2}, "a gives 1 v100: inputs of b are refused", app.now_s)
    events = run(app, loop, 30)
    assert [event.what for event in events] == ["rolled out"]
    assert app.running.devices() == {"v100": 1, "k80": 2}
    asyncio.run(loop.grant(Grant(FLEET, "a gets 1 v100")))
    app.rate = lambda at_s: 10_000.0
    run(app, loop, 240)
    assert app.running.devices() == FLEET
    granted = [event.why for event in loop.controller.record.events.all if event.what == "granted"]
    assert granted == ["a gives 1 v100: inputs of b are refused", "a gets 1 v100"]
    assert loop.decided["granted"] == 1, "which is what Grafana counts"


def test_no_plan_begins_to_use_a_device_that_left_the_budget_meanwhile() -> None:
    """The grant arrives between the decision and its roll-out."""
    app = Fluid(ASKED, ASKED.best(MEDIUM, Corrections(), OWN["a"]))
    app.rate = lambda at_s: 10_000.0
    taken = list[Plan]()

    async def decided(function: Callable[..., Any], /, *arguments: Any) -> Any:
        step = function(*arguments)
        if not taken and isinstance(step, NextStep) and step.plan and step.plan.devices() == FLEET:
            taken.append(step.plan)
            loop.controller.grant(OWN["a"], "a gives 1 v100, 1 k80", app.now_s)
        return step

    loop = control_loop(app, offload=decided)
    events = run(app, loop, 240)
    assert taken, "a plan for all devices was chosen"
    assert FLEET not in [plan.devices() for _, plan in app.rolled]
    assert any("the budget has shrunk meanwhile: " in event.why for event in events)


def test_one_application_alone_changes_as_without_a_fleet() -> None:
    """A budget of all devices is no budget."""
    decided = []
    for budget in (None, FLEET):
        app = Fluid(ASKED)
        app.rate, app.truth = lambda at_s: 700.0, lambda at_s: MEDIUM if at_s < 400 else HARD
        loop = control_loop(app)
        if budget:
            loop.controller.present.limit(budget)
        decided.append([replace(event, took_s=None) for event in run(app, loop, 800)])
    assert decided[0] == decided[1]
    assert moves(decided[0])


SLOW = replace(ASKED, profile=replace(ASKED.profile, tables=(table("v100", 2.0), table("k80", 4.0))))


def member(rates: list[float], seconds: float, seed: int, **patience: float) -> Member:
    """Its devices are slow, so that few inputs are many for them."""
    plan = SLOW.best(MEDIUM, Corrections(), OWN["a"])
    each_per_s = plan.promise.goodput_per_s
    random, facts = np.random.default_rng(seed), SLOW.facts(MEDIUM, Corrections())
    each_s = seconds / len(rates)
    times = [
        np.sort(random.uniform(part * each_s, (part + 1) * each_s, random.poisson(rate * each_per_s * each_s)))
        for part, rate in enumerate(rates)
    ]
    times_s = np.concatenate(times)
    inputs = times_s, exit_blocks(ExitProfile(MEDIUM), len(times_s), random)
    return Member(World(plan, facts, SLOW.objective.slo_s), SLOW, [inputs], Patience(**patience))


def test_in_the_simulator_bursts_use_what_another_application_leaves_idle() -> None:
    seconds, rates = 64.0, {"a": [0.1, 0.1, 1.4, 1.4], "b": [1.4, 1.4, 0.1, 0.1]}
    members = {name: member(rates[name], seconds, seed, start_s=2.0) for seed, name in enumerate(rates, 1)}
    divided, shared = (
        {name: each.report.good for name, each in replan_fleet(members, seconds, fleet).applications.items()}
        for fleet in (None, arbiter())
    )
    assert sum(shared.values()) > 1.1 * sum(divided.values())
    assert all(shared[name] > 0.98 * divided[name] for name in OWN)


def test_in_the_simulator_an_application_without_inputs_lends_its_last_device() -> None:
    """With replicas that stand by on each device, and with replicas that must start first."""
    seconds, rates = 40.0, {"a": [0.5, 0.0, 0.0, 0.5], "b": [1.9, 1.9, 1.9, 1.9]}

    def good_shares(stands_by: bool, **terms: float) -> dict[str, float]:
        members = {
            name: replace(member(rates[name], seconds, seed, start_s=1.0), stands_by=stands_by)
            for seed, name in enumerate(rates, 1)
        }
        runs = replan_fleet(members, seconds, arbiter(a=terms))
        return {name: each.report.good / each.report.arrived for name, each in runs.applications.items()}

    alone = good_shares(stands_by=True)
    for stands_by, gained, kept in ((True, 0.04, 0.92), (False, 0.03, 0.7)):
        lent = good_shares(stands_by, park_after_s=5.0)
        assert lent["b"] > alone["b"] + gained
        assert lent["a"] > kept
