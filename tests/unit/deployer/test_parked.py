"""The deployer of an application that is parked: without Ray, on replicas that start and end at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from threading import Event as Signal
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.serve.fleet import profile
from isobatch.deployments.config import AppConfig
from isobatch.deployments.deployer.steps import Moved, ReplicaStates, Undone
from isobatch.deployments.front.messages import FrontMessage, Question
from isobatch.deployments.graph import Graph, read_graph
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.files import save
from tests.helpers.asking import until
from tests.helpers.toy_model import Toy

PASS_S = 0.3
PATIENCE_S = 5.0


@dataclass
class Replicas:
    """As `ServeFleet`; they outlive the deployer."""

    prefix: str = "calm"
    counts: dict[str, int] = field(default_factory=dict)
    broken: bool = False
    room: bool = True
    scaled_s: dict[str, float] = field(default_factory=dict)  # when each kind was scaled first

    def states(self) -> dict[str, ReplicaStates]:
        return {kind: ReplicaStates(running=0 if self.broken else count) for kind, count in self.counts.items()}

    def scale_to(self, counts: Mapping[str, int]) -> None:
        self.counts |= counts
        self.scaled_s = dict.fromkeys(counts, time.monotonic()) | self.scaled_s

    def has_room(self, more: Mapping[str, int]) -> bool:
        return self.room

    def missing_devices(self, counts: Mapping[str, int]) -> dict[str, int]:
        return {}


@dataclass
class LedReplicas:
    """The same for one deployer, which may have been replaced."""

    replicas: Replicas
    leads: Callable[[], bool]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replicas, name)

    def scale_to(self, counts: Mapping[str, int]) -> None:
        if self.leads():
            self.replicas.scale_to(counts)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.fixture
def begin(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> Callable[[AppConfig], Any]:
    """Starts a deployer, which leads what the one before it has left."""
    from isobatch.deployments import ray_facts
    from isobatch.deployments.deployer import deployer

    class Living(deployer.Deployer):
        def __del__(self) -> None:
            """It never ends."""

    stored = dict[str, str]()
    monkeypatch.setattr(ray_facts, "remember", stored.__setitem__)
    monkeypatch.setattr(ray_facts, "recall", stored.get)
    monkeypatch.setattr(ray_facts, "application_name", lambda: "calm")
    monkeypatch.setattr(deployer, "join_serves_log", lambda: None)
    monkeypatch.setattr(deployer, "fleets_of", lambda application, but: [])
    monkeypatch.setattr(deployer, "ServeFleet", lambda prefix, bind, needs, leads: LedReplicas(replicas, leads))
    return lambda config: Living(config, lambda kind, count: None)


@pytest.fixture
def config(tmp_path: Path) -> AppConfig:
    save(profile(PASS_S), tmp_path / "virtual.json")
    return AppConfig(profile=str(tmp_path / "virtual.json"), devices={"v100": 2}, backend="virtual", slo_ms=5000)


async def test_an_application_that_leaves_a_fleet_with_standby_uses_any_device(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig
) -> None:
    """Only where replicas stand by do they know the ids of their devices."""
    stands_by = config.model_copy(update={"standby": {"v100": 2}, "sharers": 2})
    used = list[list[str]]()
    for each in (stands_by, stands_by, config):
        graphs, one = list[Graph](), begin(each)
        front = asyncio.create_task(followed(one, each, graphs))
        await until(graphs.__len__)
        ids = {"a": "v100-0", "b": "v100-1"} if each.standby else {"a": "", "b": ""}
        used.append(graphs[0].members({f"{graphs[0].fleet}.v100": ids})["v100-0"])
        await one.use(frozenset(("v100-0",)))
        front.cancel()
    assert used == [["a", "b"], ["a"], ["a", "b"]]


async def test_after_a_failed_roll_out_the_earlier_replicas_stay_benched(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig
) -> None:
    graphs, one = list[Graph](), begin(config)
    front = asyncio.create_task(followed(one, config, graphs))
    await until(graphs.__len__)
    plan = replace(graphs[0].plan, placements=(replace(graphs[0].plan.placements[0], replicas=1),))
    assert isinstance(await one.apply(plan, benched={"slow": "v100"}), Moved)
    assert [*graphs[-1].benched] == ["slow"]
    replicas.broken = True
    more = replace(plan, placements=(replace(plan.placements[0], replicas=3),))
    assert isinstance(await one.apply(more, patience_s=0.1), Undone)
    await one.use(frozenset(("v100-0",)))
    assert (graphs[-1].plan, [*graphs[-1].benched]) == (plan, ["slow"])
    front.cancel()


async def test_a_replica_of_a_kind_that_the_plan_no_longer_uses_ends_once_it_is_benched_no_longer(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig
) -> None:
    graphs, one, left = list[Graph](), begin(config), list[int]()
    front = asyncio.create_task(followed(one, config, graphs))
    await until(graphs.__len__)
    replicas.counts["k80"] = 1
    for benched in ({"slow": "k80"}, {"slow": "k80"}, {}):
        assert isinstance(await one.apply(graphs[0].plan, benched=benched), Moved)
        left.append(replicas.counts["k80"])
    assert left == [1, 1, 0]
    front.cancel()


async def test_the_next_deployer_keeps_benched_replicas(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig
) -> None:
    benched = list[list[str]]()
    for _ in range(2):
        graphs, one = list[Graph](), begin(config)
        front = asyncio.create_task(followed(one, config, graphs))
        await until(graphs.__len__)
        if not benched:
            plan = replace(graphs[0].plan, placements=(replace(graphs[0].plan.placements[0], replicas=1),))
            assert isinstance(await one.apply(plan, benched={"slow": "v100"}), Moved)
        benched.append([*graphs[-1].benched])
        front.cancel()
    assert (benched, replicas.counts) == ([["slow"], ["slow"]], {"v100": 2})


async def test_an_application_that_gets_other_devices_stays_parked(
    begin: Callable[[AppConfig], Any], config: AppConfig
) -> None:
    graphs, one = list[Graph](), begin(config)
    front = asyncio.create_task(followed(one, config, graphs))
    await until(graphs.__len__)
    await one.park(7.0)
    await one.use(frozenset(("v100-0",)))
    assert (graphs[-1].wakes_in_s, graphs[-1].device_ids) == (7.0, {"v100-0"})
    front.cancel()


@dataclass
class Handle:
    """As Serve's handle to a deployer."""

    deployer: Any

    def options(self, stream: bool) -> "Handle":
        return self

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.deployer, name))


async def test_a_front_reports_whether_inputs_wait_in_it(begin: Callable[[AppConfig], Any], config: AppConfig) -> None:
    from isobatch.deployments.front.follower import Follower

    one = begin(config)
    await one.park(0.1)
    driver = await Follower(config, Handle(one), "").open(Toy(), time.monotonic)
    answer = asyncio.create_task(driver.answer(pack(Toy().encode([[3, 7]])), within_s=60.0))
    for waits in (True, False):
        await asyncio.sleep(0.01)
        assert [each.holds_inputs for each in (await one.counted()).values()] == [waits]
        answer.cancel()
    await driver.close()


@dataclass
class Waiting:
    """A deployer whose messages are given, to a front that cannot reach its replicas until `gate` is set."""

    messages: asyncio.Queue[FrontMessage] = field(default_factory=asyncio.Queue)
    replies: list[int] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def lease(self, front: str, config: AppConfig) -> AsyncIterator[FrontMessage]:
        while True:
            yield await self.messages.get()

    async def reply(self, front: str, number: int, content: Any) -> None:
        self.replies.append(number)

    async def whereabouts(self) -> None:
        await self.gate.wait()
        raise TimeoutError


async def test_a_front_answers_questions_while_it_follows_plans_one_after_another(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobatch.deployments.front import follower

    graph, waiting = read_graph(config), Waiting()
    graphs = (replace(graph, wakes_in_s=9.0), replace(graph, version=1), replace(graph, version=2))
    monkeypatch.setattr(follower.serve, "get_deployment_handle", lambda *_: Handle(waiting))
    monkeypatch.setattr(follower.router, "watch", lambda *_: None)
    for number, content in enumerate((*graphs, Question.COUNTS)):
        waiting.messages.put_nowait(FrontMessage(number, content))
    driver = await follower.Follower(config, Handle(waiting), "").open(Toy(), time.monotonic)
    await until(lambda: waiting.replies)
    assert waiting.replies == [3]
    waiting.gate.set()
    await until(lambda: len(waiting.replies) == 3)
    assert waiting.replies == [3, 1, 2]
    await driver.close()


async def ends() -> None:
    raise ConnectionError("the replica has ended")


async def test_a_front_opens_though_a_replica_ends_while_it_starts(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobatch.deployments.front import follower

    waiting = Waiting()
    waiting.messages.put_nowait(FrontMessage(0, read_graph(config)))
    monkeypatch.setattr(waiting, "whereabouts", ends)
    monkeypatch.setattr(follower.serve, "get_deployment_handle", lambda *_: Handle(waiting))
    monkeypatch.setattr(follower.router, "listeners", {})
    opening = asyncio.create_task(follower.Follower(config, Handle(waiting), "").open(Toy(), time.monotonic))
    await until(lambda: follower.router.listeners)
    for listener in follower.router.listeners.values():
        listener(frozenset())
    async with asyncio.timeout(PATIENCE_S):
        await (await opening).close()


async def test_a_front_that_starts_while_a_kind_of_device_is_gone_opens_with_the_plan_for_the_others(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller, which is answered while the front waits for replicas, chooses that plan."""
    from isobatch.deployments.front import follower

    graph, waiting = read_graph(config), Waiting()
    monkeypatch.setattr(follower, "JOIN_WITHIN_S", 0.01)
    monkeypatch.setattr(follower.serve, "get_deployment_handle", lambda *_: Handle(waiting))
    monkeypatch.setattr(follower.router, "watch", lambda *_: None)
    for number, content in enumerate((graph, Question.COUNTS)):
        waiting.messages.put_nowait(FrontMessage(number, content))
    opening = asyncio.create_task(follower.Follower(config, Handle(waiting), "").open(Toy(), time.monotonic))
    waiting.messages.put_nowait(FrontMessage(2, replace(graph, version=1, device_ids=frozenset(("v100-0",)))))
    await until(lambda: waiting.replies == [1, 2])
    await asyncio.sleep(0)
    assert not opening.done()
    plan = replace(graph.plan, placements=(replace(graph.plan.placements[0], replicas=1),))
    waiting.messages.put_nowait(FrontMessage(3, replace(graph, plan=plan, version=2)))
    async with asyncio.timeout(PATIENCE_S):
        await (await opening).close()


async def test_a_front_that_starts_while_a_kind_of_device_is_gone_answers_the_controller(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or no front would follow the plan for the other devices."""
    from isobatch.deployments.front import follower

    waiting = Waiting()
    monkeypatch.setattr(follower, "OPEN_WITHIN_S", 0.01)
    monkeypatch.setattr(follower.serve, "get_deployment_handle", lambda *_: Handle(waiting))
    monkeypatch.setattr(follower.router, "watch", lambda *_: None)
    for number, content in enumerate((read_graph(config), Question.COUNTS)):
        waiting.messages.put_nowait(FrontMessage(number, content))
    async with asyncio.timeout(PATIENCE_S):
        driver = await follower.Follower(config, Handle(waiting), "").open(Toy(), time.monotonic)
    await until(lambda: waiting.replies == [1])
    await driver.close()


async def test_a_front_tries_again_to_reach_replicas_that_stand_by(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobatch.deployments.front import follower

    config = config.model_copy(update={"standby": {"k80": 1}, "sharers": 2})
    graph, waiting, attempts = read_graph(config), Waiting(), list[float]()
    waiting.messages.put_nowait(FrontMessage(0, replace(graph, wakes_in_s=9.0)))

    def no_application(*_: str) -> None:
        attempts.append(time.monotonic())
        raise LookupError

    monkeypatch.setattr(follower, "STANDBY_AGAIN_S", 0.01)
    monkeypatch.setattr(follower.serve, "get_deployment_handle", no_application)
    monkeypatch.setattr(follower.router, "watch", lambda *_: None)
    front = follower.Follower(config, Handle(waiting), "")
    driver = await front.open(Toy(), time.monotonic)
    await until(lambda: len(attempts) == 3)
    await driver.close()


async def followed(one: Any, config: AppConfig, graphs: list[Graph]) -> None:
    """What a front is led to."""
    async for message in one.lease("front", config):
        if isinstance(message.content, Graph):
            graphs.append(message.content)
            await one.reply("front", message.number, None)


async def test_an_application_stays_parked_until_a_plan_is_applied_even_if_its_deployer_ends(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig
) -> None:
    graphs, first = list[Graph](), begin(config)
    fronts = [asyncio.create_task(followed(first, config, graphs))]
    await until(lambda: graphs)
    assert replicas.counts == {"v100": 2}
    replicas.counts["k80"] = 1  # a slow one, which the plan does not count on
    await first.park(7.0)
    await first.park(9.0)
    assert [graph.wakes_in_s for graph in graphs] == [None, 7.0]
    assert replicas.counts == {"v100": 0, "k80": 0}
    assert graphs[-1].members({f"{graphs[-1].fleet}.v100": {"a": ""}}) == {"v100-0": []}, "none is used any longer"
    replicas.prefix = "the fleet of another configuration"
    second = begin(config)
    fronts.append(asyncio.create_task(followed(second, config, graphs)))
    await until(lambda: len(graphs) == 3)
    assert (graphs[-1].wakes_in_s, replicas.counts) == (7.0, {"v100": 0, "k80": 0})
    replicas.broken = True
    assert isinstance(await second.apply(await second.plan(), patience_s=0.1), Undone)
    assert (len(graphs), replicas.counts) == (3, {"v100": 0, "k80": 0})
    replicas.broken = False
    assert isinstance(await second.apply(await second.plan()), Moved)
    assert (graphs[-1].wakes_in_s, replicas.counts) == (None, {"v100": 2, "k80": 0})
    for front in fronts:
        front.cancel()


@pytest.mark.parametrize("room", [True, False])
async def test_a_parked_application_that_is_deployed_with_another_plan_waits_for_no_devices_that_others_use(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig, room: bool
) -> None:
    graphs, changed = list[Graph](), config.model_copy(update={"slo_ms": 4000})
    await begin(config).park(7.0)
    replicas.room = room
    front = asyncio.create_task(followed(begin(changed), changed, graphs))
    await until(graphs.__len__)
    assert (graphs[0].wakes_in_s, replicas.counts) == ((None, {"v100": 2}) if room else (7.0, {}))
    front.cancel()


async def test_an_application_that_is_parked_while_its_replicas_start_waits_for_none(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig
) -> None:
    """They would never come, and its front would fail after ten minutes."""
    graphs, one, replicas.broken = list[Graph](), begin(config), True
    front = asyncio.create_task(followed(one, config, graphs))
    await until(lambda: replicas.counts == {"v100": 2})
    await one.park(7.0)
    await until(graphs.__len__)
    assert (graphs[0].wakes_in_s, replicas.counts) == (7.0, {"v100": 0})
    front.cancel()


async def test_a_roll_out_that_ends_after_the_next_deployment_began_ends_none_of_its_replicas(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig
) -> None:
    """The next deployment still runs the plan from before, because it began in the middle of the roll-out."""
    graphs, first = list[Graph](), begin(config)

    async def follow() -> None:
        async for message in first.lease("front", config):
            if isinstance(message.content, Graph):
                graphs.append(message.content)
                if len(graphs) == 2:
                    begin(config.model_copy(update={"max_inside": 9}))
                await first.reply("front", message.number, None)

    front = asyncio.create_task(follow())
    await until(lambda: graphs)
    (placement,) = graphs[0].plan.placements
    assert isinstance(await first.apply(replace(graphs[0].plan, placements=(replace(placement, replicas=1),))), Moved)
    assert replicas.counts == {"v100": 2}
    front.cancel()


async def test_a_roll_out_ends_without_blame_when_the_next_deployment_takes_its_replicas(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig
) -> None:
    graphs, first = list[Graph](), begin(config)
    front = asyncio.create_task(followed(first, config, graphs))
    await until(lambda: graphs)
    (placement,) = graphs[0].plan.placements
    replicas.broken = True
    wanted = replace(graphs[0].plan, placements=(replace(placement, replicas=3),))
    rolling = asyncio.create_task(first.apply(wanted))
    await until(lambda: replicas.counts == {"v100": 3})
    begin(config.model_copy(update={"max_inside": 9}))
    undone = await asyncio.wait_for(rolling, PATIENCE_S)
    assert isinstance(undone, Undone)
    assert undone.blameless
    front.cancel()


async def test_a_plan_is_not_to_blame_if_ray_could_not_be_reached(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import GetTimeoutError

    graphs, one, blameless = list[Graph](), begin(config), list[bool]()
    front = asyncio.create_task(followed(one, config, graphs))
    await until(lambda: graphs)
    for error in (ConnectionError(), GetTimeoutError(), KeyError()):

        def away(error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(replicas, "states", away)
        undone = await one.apply(graphs[0].plan)
        assert isinstance(undone, Undone)
        blameless.append(undone.blameless)
    assert blameless == [True, True, False]
    front.cancel()


async def test_replicas_that_are_left_end_though_rays_store_was_away_at_first(
    begin: Callable[[AppConfig], Any], config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobatch.deployments.deployer import deployer

    ended, tries = list[str](), count()

    def delete(names: list[str]) -> None:
        if not next(tries):
            raise ConnectionError("Ray's store is away")
        ended.extend(names)

    monkeypatch.setattr(deployer.ray_facts, "drained_s", lambda drain_s: 0.01)
    monkeypatch.setattr(deployer, "CLEAN_UP_EVERY_S", 0.01)
    monkeypatch.setattr(deployer, "fleets_of", lambda application, but: ["calm.3f9a01.v100"])
    monkeypatch.setattr(deployer, "delete_fleets", delete)
    graphs, one = list[Graph](), begin(config)
    front = asyncio.create_task(followed(one, config, graphs))
    await until(lambda: ended)
    assert ended == ["calm.3f9a01.v100"]
    front.cancel()


async def test_a_deployer_answers_while_rays_store_does_not(
    begin: Callable[[AppConfig], Any], config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobatch.deployments import ray_facts

    recall, waits, back = ray_facts.recall, Signal(), Signal()

    def recall_later(key: str) -> str | None:
        waits.set()
        assert back.wait(PATIENCE_S)
        return recall(key)

    graphs, one = list[Graph](), begin(config)
    monkeypatch.setattr(ray_facts, "recall", recall_later)
    front = asyncio.create_task(followed(one, config, graphs))
    assert await asyncio.to_thread(waits.wait, PATIENCE_S)
    assert isinstance(await one.apply(await one.plan()), Undone), "it is not running yet"
    back.set()
    await until(lambda: graphs)
    waits.clear()
    back.clear()
    parking = asyncio.create_task(one.park(7.0))
    assert await asyncio.to_thread(waits.wait, PATIENCE_S)
    assert await one.plan()
    assert len(graphs) == 1, "what is not stored yet is sent to no front"
    back.set()
    await parking
    assert [graph.wakes_in_s for graph in graphs] == [None, 7.0]
    front.cancel()


async def test_replicas_of_an_earlier_deployer_stay_until_its_fronts_have_drained(
    begin: Callable[[AppConfig], Any], replicas: Replicas, config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve lets these drain for longer than they ask for. It may not answer when their deployer's successor begins."""
    from ray.serve._private import constants

    from isobatch.deployments.deployer import deployer

    before = count()

    def fleets_of(application: str, but: str) -> list[str]:
        if not next(before):
            raise ConnectionError("Serve is away")
        return []

    monkeypatch.setattr(deployer, "fleets_of", fleets_of)
    monkeypatch.setattr(constants, "RAY_SERVE_DIRECT_INGRESS_SHUTDOWN_BUFFER_S", 0.1)
    monkeypatch.setattr(constants, "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", 0.4)
    quick = config.model_copy(update={"drain_s": 0.01})

    began_s, graphs, one = time.monotonic(), list[Graph](), begin(quick)
    replicas.counts["k80"] = 1
    with pytest.raises(ConnectionError):
        await followed(one, quick, graphs)
    front = asyncio.create_task(followed(one, quick, graphs))
    await until(lambda: replicas.counts == {"v100": 2, "k80": 0})
    assert replicas.scaled_s["k80"] - began_s >= 0.5
    front.cancel()
