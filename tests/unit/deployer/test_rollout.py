"""The order in which replicas start and end, on a simulated fleet."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from isobatch.deployments.deployer import steps
from isobatch.deployments.deployer.steps import CannotStartError, Moved, NoDevicesError, ReplicaStates, move
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
    log: list[str] = field(default_factory=list)
    counted: int = 0  # how often Ray was asked for its nodes

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

    def has_room(self, more: Mapping[str, int]) -> bool:
        return sum(self.counts.values()) + sum(more.values()) <= self.room

    def missing_devices(self, counts: Mapping[str, int]) -> dict[str, int]:
        self.counted += 1
        return {kind: count for kind, count in counts.items() if kind in self.gone}


def devices(**counts: int) -> Plan:
    """A plan for these numbers of devices."""
    kinds = enumerate(counts.items())
    return Plan(tuple(Placement(kind, count, (Split(block, block + 1, 1),)) for block, (kind, count) in kinds))


def moved(
    fleet: CountedFleet, before: Plan | None, after: Plan, patience_s: float = 5.0,
    stay: Mapping[str, int] | None = None, standby: Mapping[str, int] | None = None,
) -> Moved:  # fmt: skip
    """Move from one plan to another; the fleet's log also records the plans that fronts were led to."""

    async def lead(plan: Plan) -> None:
        fleet.log.append("to " + " ".join(f"{kind}={count}" for kind, count in plan.devices().items()))

    async def meanwhile(counts: Mapping[str, int]) -> None:
        if left := {kind: count for kind, count in counts.items() if count}:
            await lead(devices(**left))

    return asyncio.run(move(fleet, before, after, lead, meanwhile, patience_s, stay or {}, standby or {}))


def test_a_plan_for_the_same_devices_changes_no_replica() -> None:
    fleet = CountedFleet({"a": 4})
    assert moved(fleet, devices(a=4), devices(a=4)).missing_s == 0
    assert fleet.log == ["to a=4"]


def test_where_replicas_stand_by_a_plan_for_other_devices_changes_none() -> None:
    fleet = CountedFleet({"a": 4, "b": 2}, room=6)
    moved(fleet, devices(a=1), devices(a=3, b=1), standby={"a": 4, "b": 2})
    moved(fleet, devices(a=3, b=1), devices(b=2), standby={"a": 4, "b": 2})
    assert fleet.log == ["to a=3 b=1", "to b=2"]


def test_where_none_runs_replicas_start_and_fronts_are_led_to_them() -> None:
    fleet = CountedFleet({"a": 0})
    moved(fleet, None, devices(a=2))
    assert fleet.log == ["a=2", "to a=2"]
    broken = CountedFleet({"a": 0}, broken=frozenset("a"))
    with pytest.raises(CannotStartError):
        moved(broken, None, devices(a=2))
    assert (broken.counts, broken.log) == ({"a": 0}, ["a=2", "a=0"])


def test_new_replicas_start_before_old_ones_end() -> None:
    fleet = CountedFleet({"a": 4, "b": 1})
    assert moved(fleet, devices(a=4, b=1), devices(a=2, b=1, c=3)).missing_s == 0
    assert fleet.log == ["c=3", "to a=2 b=1 c=3", "a=2"]


def test_a_kind_that_is_no_longer_needed_keeps_no_replica() -> None:
    fleet = CountedFleet({"a": 4, "b": 1})
    moved(fleet, devices(a=4, b=1), devices(a=4))
    assert fleet.counts == {"a": 4, "b": 0}


def test_without_room_old_replicas_end_first_and_the_gap_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 1000, 2))
    monkeypatch.setattr(steps, "now_s", lambda: float(next(times)))
    fleet = CountedFleet({"a": 4}, room=5)
    told = moved(fleet, devices(a=4), devices(a=2, b=2))
    assert fleet.log[:4] == ["to a=2", "a=2", "b=2", "to a=2 b=2"]  # those that stay do what they can meanwhile
    assert 0 < told.missing_s < told.seconds


def test_without_remaining_devices_no_plan_runs_meanwhile() -> None:
    fleet = CountedFleet({"a": 4}, room=5)
    moved(fleet, devices(a=4), devices(b=4))
    assert fleet.log[:3] == ["a=0", "b=4", "to b=4"]


@pytest.mark.parametrize("room", [100, 5], ids=["beside", "freed first"])
@pytest.mark.parametrize(("why", "says"), [("broken", "no weights here"), ("silent", "only 0 of 2 b run")])
def test_a_plan_that_does_not_start_is_undone(room: int, why: str, says: str) -> None:
    fleet = CountedFleet({"a": 4}, room=room, **{why: frozenset("b")})
    with pytest.raises(CannotStartError, match=says):
        moved(fleet, devices(a=4), devices(a=2, b=2), patience_s=0.2)
    assert fleet.counts == {"a": 4, "b": 0}
    assert "to a=2 b=2" not in fleet.log
    assert [each for each in fleet.log if each.startswith("to")][-1:] in ([], ["to a=4"])


def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only in sleeps."""
    at_s = 0.0

    async def pass_s(seconds: float) -> None:
        nonlocal at_s
        at_s += seconds

    monkeypatch.setattr(steps, "now_s", lambda: at_s)
    monkeypatch.setattr(steps.asyncio, "sleep", pass_s)


def test_a_replica_that_fails_as_its_node_vanishes_does_not_blame_the_plan() -> None:
    fleet = CountedFleet({"a": 4}, broken=frozenset("b"), gone=frozenset("b"))
    with pytest.raises(NoDevicesError, match="no node has a device for 2 of 2 b"):
        moved(fleet, devices(a=4), devices(a=4, b=2))


@pytest.mark.parametrize("room", [100, 5], ids=["beside", "freed first"])
def test_a_node_that_vanishes_in_a_roll_out_is_not_waited_for(room: int) -> None:
    fleet = CountedFleet({"a": 4}, room=room, gone=frozenset("b"))
    began_s = steps.now_s()
    with pytest.raises(NoDevicesError, match="no node has a device for 2 of 2 b"):
        moved(fleet, devices(a=4), devices(a=2, b=2), patience_s=600.0)
    assert steps.now_s() - began_s < 60.0
    assert fleet.counts == {"a": 4, "b": 0}


def test_devices_that_no_node_has_are_missing_and_used_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch.deployments.deployer import fleet  # it imports Ray

    monkeypatch.setattr(fleet.ray_facts, "nodes", lambda: [{"CPU": 2.0, "v100": 1.0}, {"CPU": 2.0, "k80": 4.0}])
    ours = fleet.ServeFleet("shop.000001", lambda kind, count: None, lambda kind: {"CPU": 0.1})  # type: ignore[arg-type, return-value]
    assert ours.missing_devices({"v100": 3, "k80": 4}) == {"v100": 2}


def test_the_application_of_a_kind_that_could_not_start_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch.deployments.deployer import fleet  # it imports Ray

    states = {"shop.000001.v100": "DEPLOY_FAILED", "shop.000001.k80": "RUNNING", "shop.000001.p100": "DELETING"}
    found = {name: SimpleNamespace(status=SimpleNamespace(value=state)) for name, state in states.items()}
    deleted, scaled = list[str](), list[tuple[str, int]]()
    monkeypatch.setattr(fleet.serve, "status", lambda: SimpleNamespace(applications=found))
    monkeypatch.setattr(fleet.ray_facts, "delete_soon", deleted.append)
    monkeypatch.setattr(fleet.ray_facts, "scale", lambda name, deployment, count: scaled.append((name, count)))
    ours = fleet.ServeFleet("shop.000001", lambda kind, count: None, lambda kind: {"CPU": 0.1})  # type: ignore[arg-type, return-value]
    ours.scale_to({"v100": 0, "k80": 0, "p100": 0, "t4": 0})
    assert (deleted, scaled) == (["shop.000001.v100"], [("shop.000001.k80", 0)])


@pytest.mark.parametrize(
    ("message", "failed"),
    [
        ("A replica failed to start with exception. Retrying. Error:\nthe node ended", False),
        ("The deployment failed to start 3 times in a row. Error:\nno weights here", True),
    ],
)
def test_only_what_serve_has_given_up_has_failed(monkeypatch: pytest.MonkeyPatch, message: str, failed: bool) -> None:
    """A roll-out that gave up first would end the replicas that are starting, and so never succeed."""
    from isobatch.deployments.deployer import fleet  # it imports Ray

    unhealthy = SimpleNamespace(value="UNHEALTHY")
    split = SimpleNamespace(status=unhealthy, message=message, replica_states={"RUNNING": 5, "STARTING": 2})
    found = SimpleNamespace(status=unhealthy, message="", deployments={"split": split})
    monkeypatch.setattr(fleet.serve, "status", lambda: SimpleNamespace(applications={"shop.000001.v100": found}))
    ours = fleet.ServeFleet("shop.000001", lambda kind, count: None, lambda kind: {"CPU": 0.1})  # type: ignore[arg-type, return-value]
    states = ours.states()["v100"]
    assert (states.running, states.starting, bool(states.failed)) == (5, 2, failed)


def test_the_name_of_a_kind_may_have_a_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch.deployments.deployer import fleet  # it imports Ray

    found = SimpleNamespace(status=SimpleNamespace(value="RUNNING"), message="", deployments={})
    names = ["shop", "shop.000001.a100-1g.10gb", "shop.000002.a100-1g.10gb"]
    monkeypatch.setattr(fleet.serve, "status", lambda: SimpleNamespace(applications=dict.fromkeys(names, found)))
    ours = fleet.ServeFleet("shop.000001", lambda kind, count: None, lambda kind: {"CPU": 0.1})  # type: ignore[arg-type, return-value]
    assert [*ours.states()] == ["a100-1g.10gb"]
    assert fleet.fleets_of("shop", but=ours.prefix) == ["shop.000002.a100-1g.10gb"]


def test_replicas_that_are_benched_stay_beside_those_of_the_plan() -> None:
    fleet = CountedFleet({"a": 4})
    moved(fleet, devices(a=4), devices(a=3), stay={"a": 1})
    assert fleet.counts == {"a": 4}
    moved(fleet, devices(a=3), devices(a=2), stay={"a": 1})
    assert fleet.counts == {"a": 3}
    moved(fleet, devices(a=2), devices(a=3))
    assert fleet.counts == {"a": 3}
