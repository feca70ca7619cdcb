"""A fleet's application without inputs lends all its devices, and answers its next inputs."""

from dataclasses import replace

import pytest

from isobatch.cluster.controller.arbiter import Arbiter, Grant
from isobatch.cluster.controller.fleet_division import Budget, Standing
from isobatch.cluster.controller.knowledge import CurrentWindow
from isobatch.deployments.front.observed import Observed, merged, since
from isobatch.optimizer import Objective, Problem
from tests.helpers.two_applications import EACH_PER_S, FLEET, IDS, OWN, WINDOW_S, arbiter, by_ids, standing

PARKS = {"a": {"park_after_s": 60.0}}


def quiet(each: Standing, seconds: float) -> Standing:
    return replace(each, quiet_s=seconds, start_s=1.0)


def test_an_application_without_inputs_gives_all_its_devices_and_gets_some_back_with_its_next_input() -> None:
    fleet, b = arbiter(**PARKS), standing(9.0, OWN["b"])
    both = {"a": quiet(standing(0.0, OWN["a"]), 59.0), "b": quiet(b, 0.0)}
    assert fleet.look(both, FLEET, 0.0) == {}
    parked = {"a": quiet(both["a"], 60.0), "b": both["b"]}
    grants = fleet.look(parked, FLEET, 1.0)
    assert {name: sum(grant.budget.values()) for name, grant in grants.items()} == {"a": 1}
    assert grants["a"].why == "a is parked: no inputs for 60 s"
    one = grants["a"].budget
    for late in (quiet(standing(0.0, OWN["a"], one), 60.5), quiet(standing(0.0, one, OWN["a"]), 60.5)):
        again = fleet.look({"a": late, "b": both["b"]}, FLEET, 1.5)
        assert "b" not in again, "the plan of a still uses its devices, or may again"
    given_up = {"a": quiet(standing(0.0, one), 61.0), "b": both["b"]}
    lent = fleet.look(given_up, FLEET, 1.9)
    assert list(lent) == ["b"]
    assert lent["b"].why.startswith("b gets 1 v100, 1 k80: no inputs arrive for a: weighted goodput ")
    assert fleet.budgets == {"a": {"v100": 0, "k80": 0}, "b": FLEET}
    followed = given_up | {"b": quiet(standing(9.0, FLEET), 0.0)}
    assert fleet.look(followed, FLEET, 2.0) == {}
    assert not fleet.is_moving
    woken = followed | {"a": quiet(standing(0.1, grants["a"].budget), 0.0)}
    back = fleet.look(woken, FLEET, 3.0)
    assert list(back) == ["b"], "the giver shrinks first, and the parked application computes beside it until then"
    assert "inputs arrive again for a: not all have what they need" in back["b"].why
    shrunk = quiet(standing(9.0, back["b"].budget), 0.0)
    assert list(fleet.look(woken | {"b": replace(shrunk, uses=FLEET)}, FLEET, 3.5)) == []
    given = fleet.look(woken | {"b": shrunk}, FLEET, 4.0)["a"].budget
    assert {kind: given[kind] + back["b"].budget[kind] for kind in FLEET} == FLEET
    assert sum(given.values()) >= 1
    assert not fleet.parked


@pytest.mark.parametrize(("seconds", "paused"), [(59.0, False), (1e6, True)])
def test_an_application_with_inputs_or_paused_by_a_person_is_not_parked(seconds: float, paused: bool) -> None:
    fleet = arbiter(**PARKS)
    a = replace(quiet(standing(0.0, OWN["a"]), seconds), paused=paused)
    for at_s in (0.0, 1.0):
        assert fleet.look({"a": a, "b": quiet(standing(0.5, OWN["b"]), 1e6)}, FLEET, at_s) == {}
    assert not fleet.parked


def test_the_replica_of_a_parked_application_is_on_a_device_that_another_one_uses() -> None:
    """When it has inputs again, it gets a device that no other application uses; if its device is lost, another one."""
    fleet, (first, second) = arbiter(**PARKS), (frozenset(("v100-0", "k80-0")), frozenset(("v100-1", "k80-1")))
    a, b = by_ids(quiet(standing(0.0, OWN["a"]), 0.0), first), by_ids(quiet(standing(9.0, OWN["b"]), 0.0), second)
    assert {name: grant.device_ids for name, grant in fleet.look({"a": a, "b": b}, FLEET, 0.0).items()} == {
        "a": frozenset(("k80-0", "v100-0")), "b": frozenset(("k80-1", "v100-1")),
    }  # fmt: skip
    grants = fleet.look({"a": quiet(a, 60.0), "b": b}, FLEET, 1.0)
    assert grants["a"].device_ids == frozenset(("v100-0",))
    a = quiet(standing(0.0, grants["a"].budget), 61.0)
    followed = by_ids(a, frozenset(("v100-0",)))
    lent = fleet.look({"a": followed, "b": b}, FLEET, 1.5)["b"]
    assert (lent.budget, lent.device_ids) == (FLEET, frozenset(IDS))
    b = by_ids(quiet(standing(9.0, FLEET), 0.0), frozenset(IDS))
    assert fleet.look({"a": followed, "b": b}, FLEET, 2.0) == {}
    ready = frozenset(("v100-1", "k80-0", "k80-1"))
    lost = fleet.look({"a": by_ids(a, frozenset(), ready), "b": b}, FLEET, 3.0)
    assert {name: grant.device_ids for name, grant in lost.items()} == {"a": frozenset(("v100-1",))}
    woken = by_ids(quiet(standing(0.1, a.budget), 0.0), frozenset(("v100-1",)))
    left = fleet.look({"a": woken, "b": b}, FLEET, 4.0)["b"]
    b = by_ids(quiet(standing(9.0, left.budget), 0.0), left.device_ids)
    given = fleet.look({"a": woken, "b": b}, FLEET, 5.0)["a"].device_ids
    assert given - left.device_ids == {"k80-1"}
    assert given & left.device_ids == {"v100-1"}, "until its plan does without"


def parked_on(kind: str, fleet: Arbiter, b: Standing) -> Standing:
    """Park `a`, whose devices `b` gets. Returns the standing of `a` with inputs that arrive again."""
    used, rest = frozenset((f"{kind}-0",)), frozenset(IDS) - {f"{kind}-0"}
    first = frozenset(f"{each}-0" for each, count in fleet.config.applications[0].devices.items() if count)
    a = by_ids(quiet(standing(0.0, fleet.config.applications[0].devices), 60.0), first)
    for each in (replace(a, quiet_s=59.0), a):
        fleet.look({"a": each, "b": by_ids(b, frozenset(IDS) - first)}, FLEET, 0.0)
    one = {each: int(each == kind) for each in FLEET}
    assert fleet.look({"a": by_ids(quiet(standing(0.0, one), 61.0), used), "b": by_ids(b, rest)}, FLEET, 1.0)
    assert fleet.budgets["b"] == FLEET
    return by_ids(quiet(standing(0.1, one), 0.0), used)


def test_an_application_that_wakes_onto_another_kind_keeps_its_replica_until_its_plan_has_changed() -> None:
    own = {"a": {"v100": 0, "k80": 1}, "b": {"v100": 2, "k80": 1}}
    fleet, b = arbiter(own, **PARKS), quiet(standing(9.0, own["b"]), 0.0)
    woken = parked_on("v100", fleet, b)
    left = fleet.look({"a": woken, "b": by_ids(quiet(standing(9.0, FLEET), 0.0), frozenset(IDS))}, FLEET, 2.0)["b"]
    assert (left.budget, left.device_ids) == (own["b"], frozenset(IDS) - {"k80-1"})
    shrunk = by_ids(b, left.device_ids or frozenset())
    given = fleet.look({"a": woken, "b": shrunk}, FLEET, 3.0)["a"]
    assert (given.budget, given.device_ids) == (own["a"], frozenset(("k80-1", "v100-0")))
    planning = by_ids(quiet(standing(0.1, own["a"], {"v100": 1}), 0.0), frozenset(("k80-1", "v100-0")))
    assert fleet.look({"a": planning, "b": shrunk}, FLEET, 4.0) == {}
    running = replace(planning, uses=own["a"])
    assert fleet.look({"a": running, "b": shrunk}, FLEET, 5.0) == {"a": Grant(own["a"], "", frozenset(("k80-1",)))}
    assert fleet.look({"a": running, "b": shrunk}, FLEET, 6.0) == {}


def test_an_application_that_wakes_gets_all_its_devices_at_once() -> None:
    """A part of them may not be enough for its network."""
    fleet, b = arbiter(**PARKS), quiet(standing(9.0, OWN["b"]), 0.0)
    woken = replace(parked_on("v100", fleet, b), expected_per_s=9 * EACH_PER_S)
    everything = frozenset(IDS)
    second = fleet.look({"a": woken, "b": by_ids(quiet(standing(9.0, FLEET), 0.0), everything)}, FLEET, 2.0)[
        "b"
    ].device_ids
    part = {"v100": 2, "k80": 1}
    assert fleet.look({"a": woken, "b": by_ids(replace(b, uses=part), second)}, FLEET, 3.0) == {}
    stale = by_ids(b, everything)
    assert fleet.look({"a": woken, "b": stale}, FLEET, 3.5) == {}, "launches of b may still be on its way there"
    assert fleet.look({"b": stale}, FLEET, 4.0) == {}, "a controller that does not answer"
    assert fleet.look({"b": by_ids(b, second)}, FLEET, WINDOW_S + 5.0) == {}
    given = fleet.look({"a": woken, "b": by_ids(b, second)}, FLEET, WINDOW_S + 6.0)["a"]
    assert (given.budget, given.device_ids) == (OWN["a"], everything - second)


def test_an_application_whose_controller_starts_again_without_inputs_stays_parked() -> None:
    fleet, b = arbiter(**PARKS), quiet(standing(9.0, OWN["b"]), 0.0)
    woken = parked_on("v100", fleet, b)
    b = by_ids(quiet(standing(9.0, FLEET), 0.0), frozenset(IDS))
    assert fleet.look({"a": replace(woken, had_inputs=False), "b": b}, FLEET, 2.0) == {}
    assert list(fleet.asleep) == ["a"]
    assert list(fleet.look({"a": woken, "b": b}, FLEET, 3.0)) == ["b"]
    assert (list(fleet.asleep), list(fleet.parked)) == ([], ["a"])


NOTHING = dict.fromkeys(FLEET, 0)


def parked_without_standby(fleet: Arbiter, b: Standing) -> Standing:
    """Park `a`, whose replicas end. Returns its standing then."""
    a = replace(quiet(standing(0.0, OWN["a"]), 60.0), standby=None)
    fleet.look({"a": replace(a, quiet_s=59.0), "b": b}, FLEET, 0.0)
    grants = fleet.look({"a": a, "b": b}, FLEET, 1.0)
    assert grants == {"a": Grant(NOTHING, "a is parked: no inputs for 60 s", parked=True)}
    ending = replace(a, budget=NOTHING)
    assert fleet.look({"a": ending, "b": b}, FLEET, 2.0) == {"a": Grant(NOTHING, "", parked=True)}, "they still run"
    return replace(ending, uses=NOTHING, parked=True)


def test_the_devices_of_an_application_whose_replicas_may_not_have_ended_are_not_free() -> None:
    fleet, b = arbiter(**PARKS), quiet(standing(9.0, OWN["b"]), 0.0)
    a = replace(quiet(standing(0.0, OWN["a"]), 60.0), standby=None)
    fleet.look({"a": replace(a, quiet_s=59.0), "b": b}, FLEET, 0.0)
    fleet.look({"a": a, "b": b}, FLEET, 1.0)
    fleet.send_again(["a"])
    begun = replace(a, budget=NOTHING, uses=NOTHING, parked=True)
    assert fleet.look({"a": begun, "b": b}, FLEET, 2.0) == {"a": Grant(NOTHING, "", parked=True)}
    assert list(fleet.look({"a": begun, "b": b}, FLEET, 3.0)) == ["b"]


def test_without_standby_an_application_without_inputs_has_no_device_until_its_next_input() -> None:
    fleet, b = arbiter(**PARKS), quiet(standing(9.0, OWN["b"]), 0.0)
    a = parked_without_standby(fleet, b)
    assert fleet.look({"a": a, "b": b}, FLEET, 3.0)["b"].budget == FLEET
    b = quiet(standing(9.0, FLEET), 0.0)
    assert fleet.look({"a": a, "b": b}, FLEET, 4.0) == {}
    woken = replace(a, quiet_s=0.0, expected_per_s=0.1 * EACH_PER_S)
    back = fleet.look({"a": woken, "b": b}, FLEET, 5.0)
    assert list(back) == ["b"]
    b = quiet(standing(9.0, back["b"].budget), 0.0)
    given = fleet.look({"a": woken, "b": b}, FLEET, 6.0)["a"]
    assert {kind: given.budget[kind] + back["b"].budget[kind] for kind in FLEET} == FLEET
    assert not given.parked
    starting = replace(woken, budget=given.budget)
    again = fleet.look({"a": starting, "b": b}, FLEET, 7.0)
    assert again == {"a": Grant(given.budget, "")}, "its controller may have been restarted before it did so"
    for parked in (True, False):
        assert fleet.look({"a": replace(starting, uses=given.budget, parked=parked), "b": b}, FLEET, 8.0) == {}


@pytest.mark.parametrize("budget", [NOTHING, OWN["a"]], ids=["same controller", "controller restarted, too"])
def test_an_arbiter_that_starts_again_knows_which_applications_have_no_replicas(budget: Budget) -> None:
    a = replace(quiet(standing(0.0, budget, NOTHING), 60.0), standby=None, parked=True, had_inputs=budget == NOTHING)
    fleet, b = arbiter(**PARKS), quiet(standing(9.0, FLEET), 0.0)
    grants = fleet.look({"a": a, "b": b}, FLEET, 0.0)
    granted = {name: (grant.budget, grant.parked) for name, grant in grants.items()}
    assert granted == ({} if budget == NOTHING else {"a": (NOTHING, True)})
    assert (list(fleet.parked), list(fleet.asleep), fleet.budgets["b"]) == (["a"], ["a"], FLEET)
    woken = replace(a, budget=NOTHING, quiet_s=0.0, had_inputs=True)
    assert list(fleet.look({"a": woken, "b": b}, FLEET, 1.0)) == ["b"]


def test_which_single_device_would_be_enough_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[Budget]()

    def none(facts: Problem, objective: Objective, present: Budget) -> str:
        searched.append(present)
        return ""

    monkeypatch.setattr("isobatch.cluster.controller.arbiter.kind_for_one", none)
    parked_without_standby(arbiter(**PARKS), quiet(standing(9.0, OWN["b"]), 0.0))
    assert not searched
    fleet = arbiter(**PARKS)
    standings = {"a": quiet(standing(0.0, OWN["a"]), 1e3), "b": standing(0.5, OWN["b"])}
    for at_s in (0.0, 1.0, 2.0):
        assert fleet.look(standings, FLEET, at_s) == {}
    assert searched == [FLEET]
    assert not fleet.parked


def test_an_application_that_holds_inputs_is_not_without_inputs() -> None:
    """They may take longer to be answered than the time after which it is parked."""
    window = CurrentWindow(0.0)
    window.add(Observed(0.0, 1.0, 0, 0, ()))
    assert (window.quiet_s, window.had_inputs) == (1.0, False)
    window.add(Observed(1.0, 5.0, 0, 0, (), holds_inputs=True))
    assert (window.quiet_s, window.had_inputs) == (0.0, True)
    window.add(Observed(6.0, 2.0, 0, 2, (0, 2)))
    assert window.quiet_s == 2.0


def test_an_input_in_any_front_and_at_any_of_several_looks_is_held() -> None:
    looks = [Observed(0.0, 1.0, 0, 0, (), holds_inputs=at == 1) for at in range(3)]
    assert merged(looks).holds_inputs
    assert not since(looks[2], looks[1]).holds_inputs


def test_the_status_of_a_parked_application_says_whether_it_waits_for_inputs_or_for_a_device() -> None:
    from isobatch.cluster.controller.fleet_service import FleetService

    service = FleetService(arbiter(**PARKS).config)
    woken = parked_on("v100", service.arbiter, quiet(standing(9.0, OWN["b"]), 0.0))

    def state(a: Standing) -> str:
        b = by_ids(quiet(standing(9.0, FLEET), 0.0), frozenset(IDS))
        service.arbiter.look({"a": a, "b": b}, FLEET, 2.0)
        service.note({"a": a, "b": b})
        return str(service.status()["applications"]["a"]["state"])

    assert state(replace(woken, quiet_s=62.0)) == "parked: no inputs for 62 s"
    assert state(replace(woken, quiet_s=63.0, paused=True)) == "paused: it keeps its devices"
    assert state(woken) == "gets a device"


def test_the_next_arbiter_knows_which_application_was_parked() -> None:
    """Its controller has a device that belongs to the other one, and has inputs by now."""
    fleet = arbiter(**PARKS)
    one = {"v100": 1, "k80": 0}
    standings = {"a": quiet(standing(0.1, one), 0.0), "b": quiet(standing(9.0, FLEET), 0.0)}
    assert list(fleet.look(standings, FLEET, 0.0)) == ["b"], "which has to share"
    assert list(fleet.parked) == ["a"]


def test_an_application_that_is_parked_later_leaves_past_decisions_as_they_were() -> None:
    """The page and `isobatch status` show them."""
    fleet, a = arbiter(**PARKS), quiet(standing(0.1, OWN["a"]), 0.0)
    fleet.look({"a": a, "b": standing(1.9, OWN["b"])}, FLEET, 0.0)
    fleet.look({"a": a, "b": standing(1.9, OWN["b"], refuses=True)}, FLEET, 5.0)
    (decision,) = fleet.decisions
    shrunk = dict(decision.budgets["a"])
    assert any(shrunk.values())
    assert "a is parked" in fleet.look({"a": quiet(a, 60.0), "b": standing(1.9, OWN["b"])}, FLEET, 6.0)["a"].why
    assert fleet.decisions[0].budgets["a"] == shrunk


def test_where_one_application_can_have_no_device_a_smallest_share_of_nothing_is_no_gain() -> None:
    fleet, left = arbiter(goal="fairness", a={"priority": 1}), {"v100": 1, "k80": 0}
    standings = {"a": standing(1.0, left), "b": standing(1.0, NOTHING)}
    for at_s in (0.0, WINDOW_S):
        assert fleet.look(standings, left, at_s) == {}
    assert [decision.budgets for decision in fleet.decisions] == [None]
