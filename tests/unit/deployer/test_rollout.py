"""The order in which replicas start and end, on a simulated fleet."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch.deployments.deployer import steps
from isobatch.deployments.deployer.steps import (
    CannotStartError,
    Moved,
    NoDevicesError,
    ReplacedError,
    ReplicaStates,
    move,
)
from isobatch.optimizer.plan import Placement, Plan, Split


@dataclass
class CountedFleet:
    """Starts and ends replicas at once, as long as there is room; kinds in `broken` never start."""

    counts: dict[str, int]
    room: int = 100
    broken: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()  # never start, and nobody says why
    stale: int = 0  # so many looks tell that what was wanted before has failed, though it starts
    gone: frozenset[str] = frozenset()  # whose node vanishes while they start
    led: bool = True
    log: list[str] = field(default_factory=list)

    def states(self) -> dict[str, ReplicaStates]:
        if self.stale:
            self.stale -= 1
            return {kind: ReplicaStates(failed="no weights here") for kind in self.counts}
        return {kind: self._states_of(kind, count) for kind, count in self.counts.items()}

    def _states_of(self, kind: str, count: int) -> ReplicaStates:
        if kind in self.broken:
            return ReplicaStates(starting=count, failed="no weights here")
        return ReplicaStates(starting=count) if kind in self.silent | self.gone else ReplicaStates(running=count)

    def scale_to(self, counts: Mapping[str, int]) -> None:
        self.counts |= counts
        if counts:
            self.log.append(" ".join(f"{kind}={count}" for kind, count in counts.items()))

    def leads(self) -> bool:
        return self.led

    def has_room(self, more: Mapping[str, int]) -> bool:
        return sum(self.counts.values()) + sum(more.values()) <= self.room

    def missing_devices(self, counts: Mapping[str, int]) -> dict[str, int]:
        return {kind: count for kind, count in counts.items() if kind in self.gone}


def devices(**counts: int) -> Plan:
    """A plan for these numbers of devices."""
    kinds = enumerate(counts.items())
    return Plan(tuple(Placement(kind, count, (Split(block, block + 1, 1),)) for block, (kind, count) in kinds))


def moved(
    fleet: CountedFleet, before: Plan | None, after: Plan, patience_s: float = 5.0,
    stay: Mapping[str, int] | None = None, standby: Mapping[str, int] | None = None, unreachable: Plan | None = None,
) -> Moved:  # fmt: skip
    """Move from one plan to another; the fleet's log also records the plans that fronts were led to.

    Fronts cannot be led to the plan `unreachable`.
    """

    async def lead(plan: Plan) -> None:
        if plan is unreachable:
            raise ConnectionError("the store is away")
        fleet.log.append("to " + " ".join(f"{kind}={count}" for kind, count in plan.devices().items()))

    async def meanwhile(counts: Mapping[str, int]) -> None:
        if left := {kind: count for kind, count in counts.items() if count}:
            await lead(devices(**left))

    return asyncio.run(move(fleet, before, after, lead, meanwhile, patience_s, stay or {}, standby or {}))


@pytest.mark.parametrize(
    ("before", "after", "room", "log"),
    [
        (None, devices(a=2), 9, ["a=2", "to a=2"]),
        (devices(a=4), devices(a=4), 9, ["to a=4"]),
        (devices(a=4, b=1), devices(a=2, b=1, c=3), 9, ["c=3", "to a=2 b=1 c=3", "a=2"]),
        (devices(a=4, b=1), devices(a=4), 9, ["to a=4", "b=0"]),
        (devices(a=4), devices(b=4), 5, ["a=0", "b=4", "to b=4", "a=0"]),  # none runs meanwhile
    ],
)
def test_new_replicas_start_before_old_ones_end_if_there_is_room(
    before: Plan | None, after: Plan, room: int, log: list[str]
) -> None:
    fleet = CountedFleet(before.devices() if before else {"a": 0}, room)
    change = moved(fleet, before, after)
    assert fleet.log == log
    assert room < 9 or change.missing_s == 0


def test_where_replicas_stand_by_a_plan_for_other_devices_changes_none() -> None:
    fleet = CountedFleet({"a": 4, "b": 2}, room=6)
    moved(fleet, devices(a=1), devices(a=3, b=1), standby={"a": 4, "b": 2})
    moved(fleet, devices(a=3, b=1), devices(b=2), standby={"a": 4, "b": 2})
    assert fleet.log == ["to a=3 b=1", "to b=2"]


def test_where_none_runs_those_that_stand_by_start() -> None:
    """The application was parked before its file said that replicas stand by."""
    fleet = CountedFleet({})
    moved(fleet, None, devices(a=1), standby={"a": 2, "b": 1})
    assert fleet.log == ["a=2 b=1", "to a=1"]


def test_where_none_runs_and_none_starts_none_is_left() -> None:
    broken = CountedFleet({"a": 0}, broken=frozenset("a"))
    with pytest.raises(CannotStartError):
        moved(broken, None, devices(a=2), patience_s=0.2)
    assert (broken.counts, broken.log) == ({"a": 0}, ["a=2", "a=0"])


@pytest.mark.parametrize("room", [9, 2])
def test_replicas_that_another_deployer_leads_are_not_waited_for(room: int) -> None:
    """They follow its plan."""
    taken = CountedFleet({"a": 2}, room, silent=frozenset("b"), led=False)
    with pytest.raises(ReplacedError, match="deployed anew meanwhile"):
        moved(taken, devices(a=2), devices(b=2))


def test_without_room_old_replicas_end_first_and_the_gap_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 1000, 2))
    monkeypatch.setattr(steps, "now_s", lambda: float(next(times)))
    fleet = CountedFleet({"a": 4}, room=5)
    moves = moved(fleet, devices(a=4), devices(a=2, b=2))
    assert fleet.log[:4] == ["to a=2", "a=2", "b=2", "to a=2 b=2"]  # those that stay do what they can meanwhile
    assert 0 < moves.missing_s < moves.seconds


@pytest.mark.parametrize("room", [100, 5], ids=["beside", "freed first"])
@pytest.mark.parametrize(("why", "says"), [("broken", "no weights here"), ("silent", "only 0 of 2 b run")])
def test_a_plan_that_does_not_start_is_undone(room: int, why: str, says: str) -> None:
    fleet = CountedFleet({"a": 4}, room=room, **{why: frozenset("b")})
    with pytest.raises(CannotStartError, match=says):
        moved(fleet, devices(a=4), devices(a=2, b=2), patience_s=0.2)
    assert fleet.counts == {"a": 4, "b": 0}
    assert "to a=2 b=2" not in fleet.log
    assert [each for each in fleet.log if each.startswith("to")][-1:] in ([], ["to a=4"])


@pytest.mark.parametrize(("room", "last"), [(100, []), (5, ["to a=4"])], ids=["beside", "freed first"])
def test_a_plan_to_which_no_front_can_be_led_is_undone(room: int, last: list[str]) -> None:
    fleet, after = CountedFleet({"a": 4}, room=room), devices(a=2, b=2)
    with pytest.raises(ConnectionError):
        moved(fleet, devices(a=4), after, unreachable=after)
    assert fleet.counts == {"a": 4, "b": 0}
    assert [each for each in fleet.log if each.startswith("to")][-1:] == last


@pytest.mark.parametrize(("room", "broken"), [(100, ""), (5, ""), (100, "b")], ids=["beside", "freed first", "fails"])
def test_a_node_that_vanishes_in_a_roll_out_is_not_waited_for_and_the_plan_not_blamed(room: int, broken: str) -> None:
    fleet = CountedFleet({"a": 4}, room, frozenset(broken), gone=frozenset("b"))
    began_s = steps.now_s()
    with pytest.raises(NoDevicesError, match="no node has a device for 2 of 2 b"):
        moved(fleet, devices(a=4), devices(a=2, b=2), patience_s=600.0)
    assert steps.now_s() - began_s < 60.0
    assert fleet.counts == {"a": 4, "b": 0}


def test_a_start_that_waits_for_nodes_says_once_for_which_devices(caplog: pytest.LogCaptureFixture) -> None:
    """At first nodes may still join, but those of an old plan may be gone for ever."""
    fleet = CountedFleet({}, silent=frozenset("b"), gone=frozenset("b"))
    lack = "no node has a device for 2 of 2 b"
    with pytest.raises(CannotStartError, match=f"after 1.5 s only 0 of 2 b run: {lack}"):
        asyncio.run(steps.start(fleet, {"a": 1, "b": 2}, 1.5))
    assert [record.getMessage() for record in caplog.records] == [f"the start waits for more nodes: {lack}"]


@pytest.fixture
def fleet() -> Any:
    """The module, which imports Ray."""
    from isobatch.deployments.deployer import fleet

    return fleet


@pytest.fixture
def ours(fleet: Any) -> Any:
    return fleet.ServeFleet("shop.000001", lambda kind, count: None, lambda kind: {"CPU": 0.1}, lambda: True)


def test_devices_that_no_node_has_are_missing_and_used_ones_are_not(
    fleet: Any, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.ray_facts, "nodes", lambda: [{"CPU": 2.0, "v100": 1.0}, {"CPU": 2.0, "k80": 4.0}])
    assert ours.missing_devices({"v100": 3, "k80": 4}) == {"v100": 2}


def test_the_application_of_a_kind_that_could_not_start_is_deleted(
    fleet: Any, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {"shop.000001.v100": "DEPLOY_FAILED", "shop.000001.k80": "RUNNING", "shop.000001.p100": "DELETING"}
    result = {name: SimpleNamespace(status=SimpleNamespace(value=state)) for name, state in states.items()}
    deleted, scaled = list[str](), list[tuple[str, int]]()
    monkeypatch.setattr(fleet.serve, "status", lambda: SimpleNamespace(applications=result))
    monkeypatch.setattr(fleet.ray_facts, "delete_soon", deleted.append)
    monkeypatch.setattr(fleet.ray_facts, "scale", lambda name, deployment, count: scaled.append((name, count)))
    ours.scale_to({"v100": 0, "k80": 0, "p100": 0, "t4": 0})
    assert (deleted, scaled) == (["shop.000001.v100"], [("shop.000001.k80", 0)])


def test_replicas_that_another_deployer_leads_stay(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled, result = list[int](), {"shop.000001.v100": SimpleNamespace(status=SimpleNamespace(value="RUNNING"))}
    monkeypatch.setattr(fleet.serve, "status", lambda: SimpleNamespace(applications=result))
    monkeypatch.setattr(fleet.ray_facts, "scale", lambda name, deployment, count: scaled.append(count))
    for leads in (True, False):
        one = fleet.ServeFleet("shop.000001", lambda kind, count: None, dict, lambda leads=leads: leads)
        one.scale_to({"v100": 3 if leads else 1})
    assert scaled == [3]


@pytest.mark.parametrize(
    ("message", "failed"),
    [
        ("A replica failed to start with exception. Retrying. Error:\nthe node ended", False),
        ("The deployment failed to start 3 times in a row. Error:\nno weights here", True),
    ],
)
def test_only_what_serve_has_given_up_has_failed(
    fleet: Any, ours: Any, monkeypatch: pytest.MonkeyPatch, message: str, failed: bool
) -> None:
    """A roll-out that gave up first would end the replicas that are starting, and so never succeed."""
    unhealthy = SimpleNamespace(value="UNHEALTHY")
    split = SimpleNamespace(status=unhealthy, message=message, replica_states={"RUNNING": 5, "STARTING": 2})
    result = SimpleNamespace(status=unhealthy, message="", deployments={"split": split})
    monkeypatch.setattr(fleet.serve, "status", lambda: SimpleNamespace(applications={"shop.000001.v100": result}))
    states = ours.states()["v100"]
    assert (states.running, states.starting, bool(states.failed)) == (5, 2, failed)


def test_the_name_of_a_kind_may_have_a_dot(fleet: Any, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = SimpleNamespace(status=SimpleNamespace(value="RUNNING"), message="", deployments={})
    names = ["shop", "shop.000001.a100-1g.10gb", "shop.000002.a100-1g.10gb"]
    monkeypatch.setattr(fleet.serve, "status", lambda: SimpleNamespace(applications=dict.fromkeys(names, result)))
    assert [*ours.states()] == ["a100-1g.10gb"]
    monkeypatch.setattr(fleet.ray_facts, "undeclared_applications", lambda: names)
    assert fleet.fleets_of("shop", but=ours.prefix) == ["shop.000002.a100-1g.10gb"]


def test_replicas_that_are_benched_stay_beside_those_of_the_plan() -> None:
    fleet = CountedFleet({"a": 4})
    moved(fleet, devices(a=4), devices(a=3), stay={"a": 1})
    assert fleet.counts == {"a": 4}
    moved(fleet, devices(a=3), devices(a=2), stay={"a": 1})
    assert fleet.counts == {"a": 3}
    moved(fleet, devices(a=2), devices(a=3))
    assert fleet.counts == {"a": 3}


def test_a_replica_that_is_benched_no_longer_ends_with_the_next_plan_that_does_without_it() -> None:
    fleet = CountedFleet({"a": 4})
    moved(fleet, devices(a=3), devices(a=3))
    assert fleet.log == ["to a=3", "a=3"]


def test_benched_replicas_that_run_already_need_no_more_room() -> None:
    fleet = CountedFleet({"a": 2, "b": 2}, room=5)
    assert moved(fleet, devices(a=1, b=2), devices(a=2, b=1), stay={"a": 1}).missing_s == 0.0
    assert fleet.counts == {"a": 3, "b": 1}
    assert fleet.log[0] == "a=3", "nothing ends first"


def test_a_plan_for_more_devices_starts_them_beside_benched_replicas() -> None:
    fleet = CountedFleet({"a": 4})
    moved(fleet, devices(a=3), devices(a=4), stay={"a": 1})
    assert fleet.counts == {"a": 5}


@pytest.mark.parametrize("room", [100, 4], ids=["beside", "freed first"])
@pytest.mark.parametrize("before", [devices(a=4), devices(a=3)], ids=["of the plan", "beside it"])
def test_benched_replicas_stay_after_a_plan_that_does_not_start(room: int, before: Plan) -> None:
    fleet = CountedFleet({"a": 4}, room, broken=frozenset("b"))
    with pytest.raises(CannotStartError):
        moved(fleet, before, devices(a=2, b=1), patience_s=0.2, stay={"a": 1})
    assert fleet.counts == {"a": 4, "b": 0}
