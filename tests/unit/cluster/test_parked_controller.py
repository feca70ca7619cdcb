"""The controller of an application of a fleet that is parked, and wakes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobatch.cluster.controller.arbiter import Grant
from isobatch.cluster.controller.control_loop import ControlLoop
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.record import Event, NextStep
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer.plan import Plan
from tests.helpers.fluid_application import MEDIUM, START_S, Fluid, batches, control_loop, first_plan, granted, run
from tests.helpers.two_applications import ASKED, FLEET

NOTHING = dict.fromkeys(FLEET, 0)


class Parks(Fluid):
    """Replicas end with the use of their devices."""

    wakes_in_s: float | None = None
    holds_inputs = False

    async def observe(self, devices: bool = True) -> Observed:
        observed, parked = await super().observe(devices), self.wakes_in_s is not None
        lost = {"in_time": 0, "exits": (), "launches": {}, "refused": observed.arrivals} if parked else {}
        return replace(observed, standby=None, parked=parked, holds_inputs=self.holds_inputs, **lost)

    async def park(self, wakes_in_s: float) -> None:
        self.wakes_in_s = wakes_in_s

    async def roll_out(self, plan: Plan) -> None:
        self.now_s += START_S if self.wakes_in_s is not None else 0.0
        await super().roll_out(plan)
        self.wakes_in_s = None


PARKED = Grant(NOTHING, "a is parked", parked=True)


def in_fleet(plan: Plan | None = None, folder: Path | None = None) -> tuple[Parks, ControlLoop]:
    app = Parks(ASKED, plan)
    return app, control_loop(app, folder, budget=FLEET, look_every_s=1.0)


def alone() -> tuple[Parks, ControlLoop]:
    """It is parked and has no arbiter, which would grant it devices."""
    app = Parks(ASKED)
    app.wakes_in_s, app.rate = 7.0, lambda at_s: 0.0
    return app, control_loop(app, look_every_s=1.0)


def test_a_parked_application_starts_replicas_on_what_is_granted_and_knows_how_long_that_takes(tmp_path: Path) -> None:
    app, loop = in_fleet(folder=tmp_path)
    run(app, loop, 240)
    before, app.rate = app.running, lambda at_s: 0.0
    granted(loop, PARKED)
    assert app.wakes_in_s == loop.controller.record.start_s + 1.0, "as long as no start from there was measured"
    rolled = list(app.rolled)
    assert run(app, loop, 600, look_s=1.0) == []
    standing = asyncio.run(loop.standing())
    assert (standing.parked, standing.standby, standing.uses, standing.budget) == (True, None, NOTHING, NOTHING)
    assert standing.quiet_s >= 600
    app.rate = lambda at_s: 50.0
    assert run(app, loop, 3, look_s=1.0) == []
    app.rate = lambda at_s: 0.0
    assert run(app, loop, 300, look_s=1.0) == []
    assert asyncio.run(loop.standing()).quiet_s == 0.0, "inputs may wait"
    assert app.rolled == rolled, "nothing is granted yet"
    granted(loop, Grant(FLEET, "a gets all"))
    event = loop.controller.record.events.last
    assert (event.what, event.after, event.starts, app.wakes_in_s) == ("woken", before, 4, None)
    assert event.took_s == START_S + 303
    assert run(app, loop, 120), "decisions go on"
    assert asyncio.run(loop.standing()).quiet_s < 120, "it counts from then on"
    record = control_loop(app, tmp_path).controller.record
    assert record.wakes_in_s == event.took_s
    record.complete(event, "woken", event.took_s + 100.0, app.now_s)
    assert record.wakes_in_s == event.took_s + 50.0


def test_a_plan_that_was_chosen_before_an_application_was_parked_starts_no_replicas() -> None:
    app = Parks(ASKED, ASKED.best(MEDIUM, Corrections(), {"v100": 1, "k80": 1}))
    app.rate = lambda at_s: 10_000.0

    async def decided(function: Callable[..., Any], /, *arguments: Any) -> Any:
        step = function(*arguments)
        if isinstance(step, NextStep) and step.plan:
            loop.controller.grant(NOTHING, "a is parked", app.now_s, parked=True)
        return step

    loop = control_loop(app, offload=decided, budget=FLEET)
    events = run(app, loop, 240)
    assert not app.rolled
    assert any(event.why.endswith("but the application was parked meanwhile") for event in events)


def test_a_waking_that_was_not_attempted_is_repeated_at_once() -> None:
    app = Parks(ASKED)

    async def decided(function: Callable[..., Any], /, *arguments: Any) -> Any:
        step = function(*arguments)
        if takes and isinstance(step, NextStep) and step.plan:
            loop.controller.grant(takes.pop(), "", app.now_s)
        return step

    takes, loop = [NOTHING], control_loop(app, offload=decided, budget=FLEET, look_every_s=1.0)
    granted(loop, PARKED)
    granted(loop, Grant(FLEET, ""))
    assert "the budget has shrunk meanwhile" in loop.controller.record.events.last.why
    granted(loop, Grant(FLEET, ""))
    assert app.wakes_in_s is None


def test_replicas_of_a_parked_application_that_do_not_start_are_tried_again_later() -> None:
    app, loop = in_fleet()
    granted(loop, PARKED)
    app.fails, expected_s = lambda plan: True, loop.controller.record.wakes_in_s
    for _ in range(10):
        granted(loop, Grant(FLEET, ""))
    assert [event.what for event in loop.controller.record.events.all] == ["granted", "failed"]
    app.fails, app.now_s = lambda plan: False, app.now_s + 60
    granted(loop, Grant(FLEET, ""))
    assert app.wakes_in_s is None
    assert loop.controller.record.wakes_in_s == expected_s, "an attempt that fails takes as long as it takes to give up"


def test_a_waking_that_ends_with_the_deployer_is_repeated_with_the_next_grant() -> None:
    """The inputs that wake the application wait meanwhile."""
    app, loop = in_fleet()
    granted(loop, PARKED)
    rolls_out = app.roll_out

    async def ends(plan: Plan) -> None:
        app.roll_out = rolls_out
        raise ConnectionError("the deployer has ended")

    app.roll_out = ends
    with pytest.raises(ConnectionError):
        granted(loop, Grant(FLEET, ""))
    app.now_s += 2.0
    granted(loop, Grant(FLEET, ""))
    assert app.wakes_in_s is None


def test_where_the_best_plan_does_not_start_a_parked_application_wakes_with_the_one_that_ran_before() -> None:
    best = first_plan(ASKED)
    app, loop = in_fleet(proven := batches(best, 5))
    app.rate, app.fails = lambda at_s: 0.0, lambda plan: plan.splits == best.splits
    run(app, loop, 130)
    granted(loop, PARKED)
    granted(loop, Grant(FLEET, ""))
    app.now_s += 60
    granted(loop, Grant(FLEET, ""))
    failed, woken = [event for event in loop.controller.record.events.all if event.after]
    assert (failed.what, woken.what, app.running.splits) == ("failed", "woken", proven.splits)


def test_an_application_that_was_parked_while_ramps_were_open_for_a_look_wakes() -> None:
    app, loop = in_fleet()
    loop.controller.exploring = Event(1, app.now_s, "looking", "", batches(app.running, 4))
    loop.controller.record.add(loop.controller.exploring)
    granted(loop, PARKED)
    granted(loop, Grant(FLEET, "a gets all"))
    assert (loop.controller.record.events.last.what, app.wakes_in_s, loop.controller.exploring) == ("woken", None, None)


def test_a_parked_application_that_left_its_fleet_starts_replicas() -> None:
    """An attempt takes 20 s. The first begins at once, the next half a minute after it has failed."""
    app, loop = alone()
    app.fails = lambda plan: True
    events = run(app, loop, 90, look_s=1.0)
    assert [(event.what, event.at_s) for event in events] == [("failed", 21.0), ("failed", 71.0)]
    app.fails = lambda plan: False
    assert [event.what for event in run(app, loop, 60, look_s=1.0)] == ["woken"]
    assert app.wakes_in_s is None


def test_a_parked_application_without_an_arbiter_stays_parked_while_paused_and_decides_nothing() -> None:
    app, loop = alone()
    asyncio.run(loop.pause(True))
    assert run(app, loop, 90, look_s=1.0) == []
    asyncio.run(loop.pause(False))
    assert [event.what for event in run(app, loop, 60, look_s=1.0)] == ["woken"]


def test_the_arbiter_hears_of_an_input_that_waits_for_replicas_though_the_controller_restarts() -> None:
    app = Parks(ASKED)
    app.wakes_in_s, app.rate = 7.0, lambda at_s: 0.0
    for app.holds_inputs in (False, True):
        loop = control_loop(app, budget=FLEET, look_every_s=1.0)
        assert run(app, loop, 3, look_s=1.0) == []
        standing = asyncio.run(loop.standing())
        assert standing.parked
        assert (standing.quiet_s == 0.0, standing.had_inputs) == (app.holds_inputs,) * 2
