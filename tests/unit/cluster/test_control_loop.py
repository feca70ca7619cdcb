"""What persons and arbiters send while the loop looks, thinks or rolls out."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from threading import Event as Signal
from typing import Any

import pytest

from isobatch.cluster.controller.arbiter import Grant
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.fleet_division import Standing
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.cluster.controller.knowledge import CurrentWindow, Knowledge
from isobatch.cluster.controller.record import Event, Events
from isobatch.deployments.front.observed import Observed
from isobatch.optimizer.plan import Plan
from isobatch.profiles.windows import History
from tests.helpers.asking import until
from tests.helpers.fluid_application import (
    MEDIUM,
    Fluid,
    batches,
    control_loop,
    first_plan,
    granted,
    question,
    run,
    until_it_moves,
)
from tests.helpers.two_applications import ASKED, FLEET, OWN

PATIENCE_S = 10.0
CLIENT = ContextVar("CLIENT", default="none")


class SlowQuestion(ClassifierPlanningProblem):
    """Plans are sought for as long as a test likes."""

    begun, go_on = Signal(), Signal()

    def best(self, *arguments: Any) -> Plan:
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        return super().best(*arguments)


def test_a_pause_while_plans_are_sought_is_kept_and_what_was_found_is_not_rolled_out(tmp_path: Path) -> None:
    problem = question(MEDIUM)
    app = Fluid(SlowQuestion(**vars(problem)), few := batches(first_plan(problem), 4))
    app.rate = lambda at_s: 200.0
    loop = control_loop(app, tmp_path, offload=asyncio.to_thread)
    run(app, loop, 90)

    async def paused_meanwhile() -> None:
        app.now_s += 30
        looking = asyncio.create_task(loop.step())
        assert await asyncio.to_thread(SlowQuestion.begun.wait, PATIENCE_S)
        pausing = asyncio.create_task(loop.pause(True))
        await asyncio.sleep(0.01)
        SlowQuestion.go_on.set()
        await pausing
        await looking

    asyncio.run(paused_meanwhile())
    result, paused = loop.controller.record.events.all
    assert (result.what, paused.what) == ("stayed", "paused")
    assert result.why.endswith("but the controller was paused meanwhile")
    assert loop.controller.record.barred.until_s(result.after or few, app.now_s) is None
    assert (app.rolled, app.running) == ([], few)
    assert [event.what for event in Events(tmp_path / "events.jsonl").all] == ["stayed", "paused"]


def test_a_plan_that_a_client_forced_is_rolled_out_and_told_though_the_client_goes_away() -> None:
    app = SlowlyRolled(ASKED, batches(first_plan(ASKED), 4))
    loop = control_loop(app)

    async def gone_meanwhile() -> None:
        app.begun = asyncio.Event()
        CLIENT.set("a person")
        client = asyncio.create_task(loop.force())
        await app.begun.wait()
        client.cancel()
        with suppress(asyncio.CancelledError):
            await client
        await loop.preview()  # which waits for its turn

    asyncio.run(gone_meanwhile())
    (event,) = loop.controller.record.events.all
    assert (event.what, event.after, app.client) == ("rolled out", app.running, "none")
    assert loop.controller.running == app.running


class SlowlyRolled(Fluid):
    """It notes of which request a roll-out is a part: Serve cancels the calls of one whose client goes away."""

    begun: asyncio.Event
    goes_on: asyncio.Event | None = None
    client = ""

    async def roll_out(self, plan: Plan) -> None:
        self.client = CLIENT.get()
        self.begun.set()
        await (self.goes_on.wait() if self.goes_on else asyncio.sleep(0.01))
        await super().roll_out(plan)


def test_during_a_roll_out_that_takes_long_inputs_are_counted_and_the_arbiter_hears_of_refusals() -> None:
    """What was counted belongs to the next look."""
    app = SlowlyRolled(ASKED, batches(first_plan(ASKED), 4))
    app.rate = lambda at_s: 10.0
    loop = control_loop(app, look_every_s=0.001, react_every_s=0.001)

    async def flooded_meanwhile() -> tuple[Standing, Observed | None]:
        app.begun, app.goes_on = asyncio.Event(), asyncio.Event()
        forcing = asyncio.create_task(loop.force())
        await app.begun.wait()
        app.now_s += 7
        app.rate = lambda at_s: 1e5
        looks = len(app.answered)
        await until(lambda: len(app.answered) > looks)
        standing = await loop.standing()
        app.goes_on.set()
        await forcing
        app.rate = lambda at_s: 0.0
        await loop.act()
        return standing, loop.controller.window.latest

    standing, latest = asyncio.run(flooded_meanwhile())
    assert standing.refuses
    assert standing.expected_per_s > 9e4
    assert latest is not None
    assert latest.refused > 5e5


def test_what_follows_from_a_grant_is_decided_with_a_fresh_look() -> None:
    """A device is gone, and another plan runs, since the last look."""
    app = Fluid(ASKED)
    loop = control_loop(app)
    run(app, loop, 240)
    app.now_s += 3
    app.devices = lambda at_s: {"v100": 1, "k80": 1}
    app.running = other = ASKED.best(MEDIUM, Corrections(), {"v100": 2, "k80": 1})
    granted(loop, Grant({"v100": 1, "k80": 2}, "a gives 1 v100"))
    assert app.running.devices() == {"v100": 1, "k80": 1}
    assert loop.controller.record.events.all[-1].before == other
    assert loop.is_due, "so that the arbiter soon knows which devices are free"


def test_an_exploration_is_ended_before_a_grant_is_followed() -> None:
    app = Fluid(ASKED)
    loop = control_loop(app)
    run(app, loop, 240)
    before = loop.controller.running
    app.running = loop.controller.running = loop.controller.known.cost_model().with_all_ramps(before)
    loop.controller.exploring = Event(loop.controller.record.number, app.now_s, "looking", "", before)
    app.now_s += 2
    granted(loop, Grant({"v100": 1, "k80": 2}, "a gives 1 v100"))
    assert not loop.controller.exploring
    assert app.running.devices() == {"v100": 1, "k80": 2}


def test_a_look_so_soon_after_another_shows_no_rate_of_its_own_nor_the_largest_of_the_day() -> None:
    window = CurrentWindow(0.0)
    window.add(Observed(0.0, 1.0, 100, 50, (50,), refused=50))
    window.add(Observed(1.0, 0.01, 5, 5, (5,)))
    assert (window.latest.refused, window.recent_per_s) == (50, pytest.approx(105 / 1.01))
    window.add(Observed(1.01, 0.0, 0, 0, (0,)))
    assert window.latest.refused == 50
    plan, window = first_plan(ASKED), CurrentWindow(0.0)
    known = Knowledge(ASKED, Patience(), History(None), Events(None), plan)
    window.add(Observed(0.0, 120.0, 1200, 1200, (0, 0, 0, 1200)))
    window.add(Observed(120.0, 0.01, 5, 5, (0, 0, 0, 5)))
    assert known.learn(window, plan, plan.ramps)
    assert known.estimate.peak_per_s(121.0) == pytest.approx(10.0, rel=0.01)


def test_looks_that_are_all_short_do_not_become_one() -> None:
    window = CurrentWindow(0.0)
    for number in range(100):
        window.add(Observed(0.4 * number, 0.4, 100 if number < 50 else 1, 0, (0,)))
        assert window.latest.seconds < 1.0
    assert window.recent_per_s == pytest.approx(2.5)


def test_a_controller_without_a_look_is_silent() -> None:
    """It does not know whether the application is parked, or which replicas stand by."""
    app = Fluid(ASKED)
    with pytest.raises(ConnectionError, match="has not looked"):
        asyncio.run(control_loop(app).standing())


def test_granted_devices_are_used_at_once_though_no_input_came_since_the_last_decision() -> None:
    """As where the budget has shrunk by one kind a moment before it grows by another."""
    app = Fluid(ASKED, ASKED.best(MEDIUM, Corrections(), OWN["a"]))
    app.rate, loop = lambda at_s: 0.0, control_loop(app, budget=OWN["a"])
    run(app, loop, 30)
    app.now_s += 0.5
    granted(loop, Grant(FLEET, "a gets 1 v100, 1 k80"))
    assert app.running.devices() == FLEET


def test_granted_devices_are_used_as_soon_as_another_application_no_longer_holds_them() -> None:
    app = Fluid(ASKED, ASKED.best(MEDIUM, Corrections(), OWN["a"]))
    app.devices = lambda at_s: FLEET if at_s >= 242 else OWN["a"]
    app.rate, loop = lambda at_s: 20.0, control_loop(app, budget=OWN["a"])
    run(app, loop, 240)
    app.now_s += 0.5
    granted(loop, Grant(FLEET, "a gets 1 v100, 1 k80"))
    run(app, loop, 15, look_s=5.0)
    assert app.running.devices() == FLEET


def test_granted_devices_do_not_start_a_plan_that_has_just_failed() -> None:
    own, both = {"v100": 1}, {"v100": 2}
    problem = question(MEDIUM, **both)
    app = Fluid(problem, problem.best(MEDIUM, Corrections(), own))
    loop = control_loop(app, budget=own)
    app.rate, app.fails = lambda at_s: 50.0, lambda plan: plan.devices() == both
    for budget in (both, own, both):
        run(app, loop, 30)
        app.now_s += 0.5
        granted(loop, Grant(budget, "an arbiter decided so"))
    events = [event for event in loop.controller.record.events.all if event.what != "granted"]
    assert [event.what for event in events].count("failed") == 1
    assert "the better plan failed before" in events[-1].why


def test_previews_that_are_wanted_together_are_one() -> None:
    loop, called = control_loop(Fluid(ASKED, batches(first_plan(ASKED), 4))), list[object]()

    async def noted(function: Callable[..., Any], /, *arguments: Any) -> Any:
        called.append(function)
        await asyncio.sleep(0)
        return function(*arguments)

    async def several() -> None:
        gone = asyncio.create_task(loop.preview())
        await asyncio.sleep(0)
        gone.cancel()
        first, second = await asyncio.gather(loop.preview(), loop.preview())
        assert first is second
        assert called == [loop.controller.preview]
        await loop.preview()
        assert called == [loop.controller.preview] * 2

    loop.offload = noted
    asyncio.run(several())


def test_a_preview_does_not_end_the_wait_after_a_plan_that_did_not_start() -> None:
    app = Fluid(ASKED, batches(first_plan(ASKED), 4))
    app.rate, app.fails, loop = lambda at_s: 200.0, lambda plan: True, control_loop(app)
    while not any(event.what == "failed" for event in run(app, loop, 30)):
        assert app.now_s < 3600
    refused, waits = Observed(app.now_s, 1.0, 100, 50, (0, 0, 0, 50), refused=50), list[bool]()
    for _ in range(2):
        waits.append(not loop.controller.must_look(refused, app.now_s + 60))
        asyncio.run(loop.preview())
    assert waits == [True, True]


def test_nothing_waits_for_what_is_learned_after_a_roll_out_that_failed() -> None:
    app, called = Fluid(ASKED, batches(first_plan(ASKED), 4)), list[object]()

    async def noted(function: Callable[..., Any], /, *arguments: Any) -> Any:
        called.append(function)
        return function(*arguments)

    app.fails, loop = lambda plan: True, control_loop(app, offload=noted)
    assert any("a replica did not start" in event.why for event in run(app, loop, 240))
    assert loop.controller.failed in called


class Unreachable(Fluid):
    async def use(self, device_ids: frozenset[str]) -> None:
        raise ConnectionError


def test_a_controller_follows_a_grant_whose_devices_did_not_reach_its_fronts() -> None:
    app = Unreachable(ASKED)
    loop = control_loop(app, react_every_s=3600.0)
    run(app, loop, 240)

    async def grant() -> None:
        with pytest.raises(ConnectionError):
            await loop.grant(Grant({"v100": 1, "k80": 2}, "a gives 1 v100", frozenset(("v100-0",))))

    asyncio.run(until_it_moves(app, loop, grant))
    assert app.running.devices() == {"v100": 1, "k80": 2}


def test_a_call_each_second_of_the_longest_roll_out_leaves_room_for_the_status() -> None:
    from isobatch.cluster.controller.app import MOST_CALLS
    from isobatch.deployments.deployer.deployer import PATIENCE_S as LONGEST_S

    assert MOST_CALLS > LONGEST_S


def test_an_application_without_inputs_expects_none_though_its_forecast_is_that_of_its_last_inputs() -> None:
    """Windows without inputs are no part of the forecast."""
    app = Fluid(ASKED)
    loop = control_loop(app, budget=FLEET)
    run(app, loop, 240)
    app.rate = lambda at_s: 0.0
    for seconds, expects in ((60, True), (270, False)):
        run(app, loop, seconds)
        assert (asyncio.run(loop.standing()).expected_per_s > 1.0) == expects


def test_a_plan_that_somebody_else_rolled_out_is_not_noted_while_an_arbiter_is_answered() -> None:
    app, go_on = Fluid(ASKED), asyncio.Event()

    async def slowly(function: Callable[..., Any], /, *arguments: Any) -> Any:
        if function == Standing.of:
            await go_on.wait()
        return function(*arguments)

    loop = control_loop(app, budget=FLEET, offload=slowly)
    run(app, loop, 30)
    before = loop.controller.running

    async def meanwhile() -> None:
        answering = asyncio.create_task(loop.standing())
        await asyncio.sleep(0)
        app.running, app.now_s = batches(before, 4), app.now_s + 30
        looking = asyncio.create_task(loop.step())
        await asyncio.sleep(0.01)
        assert loop.controller.running == before
        go_on.set()
        await asyncio.gather(answering, looking)

    asyncio.run(meanwhile())
    assert loop.controller.record.events.all[0].what == "began"
