"""What Ray's autoscaler is asked for, with an application that does as the cost model says and a cloud that may not."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from isobatch.cluster.controller.available_devices import DeviceRequests
from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.decide import lost_devices
from isobatch.cluster.controller.input_planning import allowed
from isobatch.cluster.controller.status import status_of
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.front.observed import Observed
from isobatch.profiles.errors import UserError
from tests.helpers.fluid_application import MEDIUM, Cloud, Fluid, control_loop, moves, question, run

OWN, GROW_TO = {"k80": 1}, {"k80": 5}
QUIET_PER_S, MANY_PER_S = 20.0, 125.0  # of which one device sustains 52, three 158


def application(stock: int, after_s: float) -> tuple[Fluid, Cloud]:
    """It begins on what is there."""
    growing = replace(question(MEDIUM, **GROW_TO), goal="cost")
    app = Fluid(growing, growing.best(MEDIUM, Corrections(), OWN))
    app.rate = lambda at_s: QUIET_PER_S
    return app, Cloud(app, OWN, {"k80": stock}, after_s)


def test_a_rate_that_grows_brings_nodes_and_one_that_falls_gives_them_back() -> None:
    app, cloud = application(stock=4, after_s=90.0)
    loop = control_loop(app, cloud=cloud, grow_to=GROW_TO)
    run(app, loop, 300)
    assert (loop.controller.device_requests.counts, cloud.asked) == (OWN, {})
    app.rate = lambda at_s: MANY_PER_S
    run(app, loop, 90)
    assert cloud.asked["k80"] > 1
    assert "requested from the autoscaler: " in loop.controller.record.events.all[-1].why
    assert status_of(loop, app.now_s)["asked"].startswith("requested ")
    run(app, loop, 300)
    assert app.sustained_per_s(app.running) > MANY_PER_S
    assert status_of(loop, app.now_s)["asked"] is None
    assert cloud.asked == {}, "or Ray would keep idle nodes beside those that are used"
    app.rate = lambda at_s: QUIET_PER_S
    run(app, loop, 600, look_s=60)
    app.rate = lambda at_s: 0.0
    run(app, loop, 600, look_s=60)
    assert app.devices(app.now_s) == OWN


class Slow(Fluid):
    """One of its replicas is benched."""

    async def observe(self, devices: bool = True) -> Observed:
        seen = await super().observe(devices)
        rest = {kind: count - 1 for kind, count in seen.devices.items()}
        return replace(seen, devices=rest, benched=(("a#1", "k80"),))


@pytest.mark.parametrize(("most", "requests"), [(6, 5), (3, 3)])
def test_a_device_whose_replica_is_benched_is_requested_beside_those_of_the_plan(most: int, requests: int) -> None:
    """The autoscaler counts it, and would bring one too few. The user's limit counts it, too."""
    problem = replace(question(MEDIUM, k80=most), goal="cost")
    app = Slow(problem, problem.best(MEDIUM, Corrections(), OWN))
    app.rate = lambda at_s: MANY_PER_S
    cloud = Cloud(app, {"k80": 2}, {"k80": 3}, after_s=30.0)
    run(app, control_loop(app, cloud=cloud, grow_to={"k80": most}), 150)
    assert max(each.get("k80", 0) for each in cloud.all_asked) == requests


def test_what_never_comes_is_not_waited_for_and_asked_for_again_later() -> None:
    app, cloud = application(stock=0, after_s=0.0)
    app.rate = lambda at_s: MANY_PER_S
    loop = control_loop(app, cloud=cloud, grow_to=GROW_TO, come_within_s=300, hold_windows=2)
    run(app, loop, 300, look_s=60)
    assert app.running.devices() == OWN, "the best on what is there"
    assert cloud.asked["k80"] > 1
    events = run(app, loop, 120, look_s=60)
    assert any("have not arrived within 300 s" in event.why for event in events)
    assert cloud.asked == {}
    cloud.stock = {"k80": 4}
    run(app, loop, 120, look_s=60)
    assert app.running.devices() == OWN, "not before two windows are over"
    run(app, loop, 420, look_s=60)
    assert app.sustained_per_s(app.running) > MANY_PER_S


def test_a_device_that_is_reclaimed_is_planned_around_and_asked_for_again() -> None:
    app, cloud = application(stock=4, after_s=30.0)
    app.rate = lambda at_s: MANY_PER_S
    loop = control_loop(app, cloud=cloud, grow_to=GROW_TO)
    run(app, loop, 450)
    had = app.running.devices()["k80"]
    cloud.reclaim("k80")
    (lost,) = moves(run(app, loop, 30))
    assert "1 of 3 k80 are gone: the best plan for the remaining devices; " in lost.why
    assert "requested from the autoscaler: " in lost.why
    assert app.running.devices()["k80"] == had - 1
    assert cloud.asked["k80"] >= had
    cloud.stock = {"k80": 4}
    cloud.ask(cloud.asked)
    run(app, loop, 300)
    assert app.running.devices()["k80"] >= had


def test_where_the_cheapest_kind_does_not_come_another_is_asked_for() -> None:
    growing = replace(question(MEDIUM, k80=4, v100=4), goal="cost")
    app = Fluid(growing, growing.best(MEDIUM, Corrections(), {"k80": 1, "v100": 0}))
    app.rate = lambda at_s: MANY_PER_S
    cloud = Cloud(app, {"k80": 1}, {"k80": 3, "v100": 0}, after_s=30.0)
    loop = control_loop(app, cloud=cloud, grow_to={"k80": 4, "v100": 4}, come_within_s=200)
    run(app, loop, 200)
    assert cloud.asked["v100"], "as fast as two k80, for the price of one"
    run(app, loop, 300)
    assert "v100" not in cloud.asked
    assert app.running.devices()["k80"] > 1
    assert app.sustained_per_s(app.running) > MANY_PER_S


def test_an_autoscaler_that_refuses_the_whole_request_still_gives_what_it_can() -> None:
    """More is needed than all kinds together sustain, so that all of them are requested at once."""
    offered = {"k80": 2, "v100": 1}
    problem = replace(question(MEDIUM, k80=3, v100=2), goal="cost")
    app = Fluid(problem, problem.best(MEDIUM, Corrections(), {"k80": 1, "v100": 0}))
    app.rate = lambda at_s: 20 * MANY_PER_S
    cloud = Cloud(app, {"k80": 1}, {"k80": 1, "v100": 1}, after_s=30.0, offered=offered)
    run(app, control_loop(app, cloud=cloud, grow_to={"k80": 3, "v100": 2}), 360)
    assert app.running.devices() == offered


def test_a_restart_goes_on_asking(tmp_path: Path) -> None:
    app, cloud = application(stock=0, after_s=0.0)
    app.rate = lambda at_s: MANY_PER_S
    run(app, control_loop(app, tmp_path, cloud=cloud, grow_to=GROW_TO), 300)
    before = cloud.asked
    again = control_loop(app, tmp_path, cloud=cloud, grow_to=GROW_TO)
    run(app, again, 10, look_s=10)
    assert cloud.asked == before
    missing = before["k80"] - 1
    assert status_of(again, app.now_s)["asked"] == f"requested {missing} k80 (0 of {missing} arrived in 0 s)"


@settings(deadline=None, max_examples=1, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(st.floats(1, 400), min_size=3, max_size=3), st.integers(0, 6), st.floats(0, 500))
def test_whatever_comes_plans_run_on_what_is_there(rates: list[float], stock: int, after_s: float) -> None:
    app, cloud = application(stock, after_s)
    app.rate = lambda at_s: rates[int(at_s / 480) % len(rates)]
    loop = control_loop(app, cloud=cloud, grow_to=GROW_TO, come_within_s=300)
    rolled = app.roll_out

    async def roll_out(plan: object) -> None:
        assert not lost_devices(plan, app._present())
        await rolled(plan)

    app.roll_out = roll_out
    run(app, loop, 1440, look_s=60)
    assert all(devices.get("k80", 0) <= GROW_TO["k80"] for devices in cloud.all_asked)


KINDS = ("v100", "k80")
counts = st.fixed_dictionaries({kind: st.integers(0, 8) for kind in KINDS})


@given(st.lists(st.tuples(counts, counts, st.booleans()), max_size=30))
def test_nothing_is_asked_for_beyond_what_may_come_and_nothing_for_longer_than_it_may_take(steps: list) -> None:
    most = {"k80": 6}
    growth, missing_since_s = DeviceRequests(most, come_within_s=30.0, again_after_s=100.0), None
    came = 0  # of those that were late, when they were given up: as many may come again
    for number, (here, wanted, asks) in enumerate(steps):
        now_s = 10.0 * number
        late = growth.update(here, now_s)
        hoped = growth.possible(here, now_s)
        assert hoped["v100"] == here["v100"]
        came = here["k80"] if late else came
        assert hoped["k80"] in (max(6, here["k80"]), here["k80"], max(came, here["k80"]))
        assert not (late and hoped["k80"] > here["k80"]), "what is late is not counted on"
        if asks:
            growth.request({kind: min(wanted[kind], hoped[kind]) for kind in KINDS}, here, now_s)
        before = growth.counts.get("k80", 0)
        assert before <= 6
        assert set(growth.counts) <= set(most)
        waits = before > here["k80"]
        assert waits == (growth.waiting_text(now_s) is not None)
        missing_since_s = (now_s if missing_since_s is None else missing_since_s) if waits else None
        if waits and now_s - missing_since_s > 30:
            assert any(earlier[0]["k80"] != here["k80"] for earlier in steps[max(0, number - 4) : number]), "some came"


def test_a_clock_that_is_set_back_by_an_hour_makes_no_request_wait_for_an_hour_more() -> None:
    here, hoped = {"k80": 1}, {"k80": 4}
    requests = DeviceRequests(hoped, come_within_s=600.0, again_after_s=1800.0)
    requests.request(hoped, here, now_s=10_000.0)
    assert not requests.update(here, now_s=6400.0)
    assert requests.update(here, now_s=7000.0) == "3 k80 have not arrived within 600 s"
    assert [requests.possible(here, now_s) for now_s in (7000.0, 8799.0, 3400.0)] == [here, here, hoped]


def test_who_wants_the_most_goodput_cannot_grow() -> None:
    with pytest.raises(UserError, match="grow_to needs goal: cost"):
        checked(ControllerConfig, {"grow_to": {"k80": 2}})
    assert checked(ControllerConfig, {"grow_to": {"k80": 2}, "goal": "cost"}).grow_to == {"k80": 2}


def test_devices_that_the_first_plan_shares_grow_under_their_name_only() -> None:
    known = question(MEDIUM).profile
    app = checked(AppConfig, {"backend": "virtual", "profile": "none.json", "slo_ms": 200})
    profile = replace(known, tables=(*known.tables, replace(known.table("k80"), kind="k80/2")))

    def most(grow_to: dict[str, int]) -> dict[str, int]:
        config = {"goal": "cost", "devices": {"k80/2": 2}, "grow_to": grow_to}
        return allowed(checked(ControllerConfig, config), app, profile)

    assert most({"k80/2": 8}) == {"k80/2": 8}
    with pytest.raises(UserError, match="grow_to: k80 are the same devices as k80/2, which plans use: name k80/2"):
        most({"k80": 4})


def test_where_no_plan_sustains_what_is_expected_the_decision_says_so() -> None:
    app, _ = application(stock=0, after_s=0.0)
    loop = control_loop(app)
    app.rate = lambda at_s: MANY_PER_S
    run(app, loop, 300)
    why = next(event.why for event in reversed(loop.controller.record.events.all) if event.what == "stayed")
    assert "are needed: no plan on these devices sustains more" in why
    assert "cheaper" not in why


def test_while_no_input_arrives_a_node_that_goes_brings_back_no_plan_for_the_last_inputs() -> None:
    app = Fluid(replace(question(MEDIUM, v100=4), goal="cost"))
    loop = control_loop(app)
    run(app, loop, 600)
    app.rate = lambda at_s: 0.0
    run(app, loop, 300)
    few = app.running.devices()["v100"]
    app.devices = lambda at_s: {"v100": 3}
    assert not moves(run(app, loop, 240))
    assert app.running.devices()["v100"] == few < 3
