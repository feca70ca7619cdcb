"""Replicas send survivors to each other over sockets: every answer is right, and no survivors stay held."""

import asyncio
import math
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace as replace_table
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from isobatch.cluster.serving.ports import held_ports
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Limits
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.answers import Answer, RefusedError
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.replica.local_workers import LocalWorkers
from isobatch.deployments.replica.serve_replica import ServeReplica, take_device
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.exchange import Exchange
from isobatch.deployments.transport.holdings import Holdings
from isobatch.deployments.transport.orders import Departed, Order, Stayed
from isobatch.deployments.transport.packed import pack
from isobatch.deployments.transport.replica_connection import ReplicaConnection, connect_to
from isobatch.deployments.transport.wire import Wire
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.model import Batch, Launched
from tests.helpers.asking import until
from tests.helpers.toy_model import BLOCKS, RAMPS, Toy, left_at
from tests.helpers.virtual_device import SURVIVAL, table

WIRE = Wire("127.0.0.1")
CONFIG = AppConfig(loader="tests.helpers.toy_model:load")


async def _for_ever(*_: object) -> None:
    await asyncio.Event().wait()


class Fleet:
    """Replicas behind sockets: orders and replies are sent, large survivors are fetched."""

    def __init__(self, names: list[str], by_value_bytes: int, hold_s: float) -> None:
        self.replicas = {name: ServeReplica(CONFIG, "cpu", "") for name in names}
        self._connections: dict[str, ReplicaConnection] = {}
        self._exchange = Exchange(Holdings())
        self._by_value_bytes, self._hold_s = by_value_bytes, hold_s
        self._hanging: list[ServeReplica] = []

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        if replica not in self.replicas:
            raise ConnectionError(f"replica {replica} has gone")
        order = replace(order, by_value_bytes=self._by_value_bytes, hold_s=min(order.hold_s, self._hold_s))
        async for reply in self._connections[replica].run(order):
            yield reply

    def drop(self, address: str, key: str) -> None:
        self._exchange.drop(address, key)

    def kill(self, name: str) -> None:
        """It answers nobody any more, and what it held is gone."""
        gone = self.replicas.pop(name)
        gone._orders.close()
        gone._exchange.close()
        gone._holdings.drop(list(gone._holdings._states))

    def hang(self, name: str) -> None:
        """Its machine is gone without a word: connections to it stay open, and nothing comes."""
        gone = self.replicas.pop(name)
        gone._exchange._answer = _for_ever  # type: ignore[method-assign]
        gone._orders.run = _nothing
        self._hanging.append(gone)

    async def open(self) -> None:
        await self._exchange.open(WIRE)
        for name, replica in self.replicas.items():
            self._connections[name] = await connect_to(WIRE, await replica.whereabouts(), lambda: None)

    def held(self) -> int:
        return sum(len(replica._holdings) for replica in self.replicas.values())

    def suspect(self, replica: str) -> None:
        """None of these is ever stuck."""

    async def close(self) -> None:
        """Exchanges stay open: who looks whether something is still held needs them."""

    def hang_up(self) -> None:
        for connection in self._connections.values():
            connection.retire()

    async def end(self) -> None:
        self.hang_up()
        for placed in (*self.replicas.values(), *self._hanging):
            placed._orders.close()
            placed._exchange.close()
        self._exchange.close()
        await asyncio.sleep(0)


async def _nothing(order: Order) -> AsyncIterator[Departed | Stayed]:
    await _for_ever()
    yield Stayed(None, np.zeros(0, np.int64), 0.0)


GROUPS = {"front": ["f0", "f1"], "back": ["b0", "b1"]}
TIMES = (0.001,) * 4
CHAIN = Route(
    (
        Stage(0, 1, 4, "front", TIMES, ramps=frozenset({0})),
        Stage(1, 3, 4, "back", TIMES, ramps=frozenset({2})),
        Stage(3, 4, 4, "front", TIMES),
    )
)
CALM = Limits(stuck_after_s=30.0)  # however slow the machine is
HOLD_S = 1.0  # survivors of launches that are given up are held for so long, and each test waits for their end


class Rig:
    """Two groups of two replicas; survivors go from one to the other and back."""

    def __init__(self, by_value_bytes: int, route: Route, limits: Limits, hold_s: float) -> None:
        names = [name for members in GROUPS.values() for name in members]
        self.fleet = Fleet(names, by_value_bytes, hold_s)
        self.route = route
        self.driver = Driver(Dispatcher(route, GROUPS, limits), self.fleet, time.perf_counter)

    async def ask(self, *inputs: list[int], within_s: float = 20.0) -> list[Answer]:
        return await self.driver.answer(pack(Toy().encode(list(inputs))), within_s)

    def without(self, *gone: str) -> dict[str, Collection[str]]:
        return {group: [name for name in members if name not in gone] for group, members in GROUPS.items()}


@asynccontextmanager
async def rigged(
    monkeypatch: pytest.MonkeyPatch,
    by_value_bytes: int = 0,
    route: Route = CHAIN,
    limits: Limits = CALM,
    hold_s: float = HOLD_S,
) -> AsyncIterator[Rig]:
    monkeypatch.setattr("isobatch.deployments.ray_facts.node_address", lambda: "127.0.0.1")
    monkeypatch.setattr("isobatch.deployments.replica.serve_replica.replica_name", lambda: "it")
    monkeypatch.setattr("isobatch.deployments.front.driver.GRACE_S", 0.2)
    monkeypatch.setattr("isobatch.deployments.transport.exchange.EXPIRE_EVERY_S", 0.05)
    rig = Rig(by_value_bytes, route, limits, hold_s)
    await rig.fleet.open()
    yield rig
    await rig.driver.close()
    assert rig.driver.dispatcher.inside == 0
    await until(lambda: not rig.fleet.held())  # nothing that nobody needs
    await rig.fleet.end()


def right(answers: list[list[Answer]], wanted: list[list[int]]) -> bool:
    given = [(answer.label, answer.exit_block) for (answer,) in answers]
    return given == [(label, left_at(block, RAMPS)) for block, label in wanted]


WANTED = [[block, label] for label in range(10) for block in range(4)] * 5


@pytest.mark.parametrize("by_value_bytes", [0, 60, 2**20])
async def test_answers_are_right_however_survivors_travel(monkeypatch: pytest.MonkeyPatch, by_value_bytes: int) -> None:
    async with rigged(monkeypatch, by_value_bytes) as rig:
        assert right(await asyncio.gather(*map(rig.ask, WANTED)), WANTED)


@pytest.mark.parametrize(
    ("end", "gone", "limits"),
    [(Fleet.kill, ("f1", "b0"), CALM), (Fleet.hang, ("f1",), Limits(stuck_after_s=0.5, first_launch_s=0.0))],
)
async def test_a_replica_that_is_lost_with_its_survivors_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[Fleet, str], None], gone: tuple[str, ...], limits: Limits
) -> None:
    async with rigged(monkeypatch, limits=limits) as rig:
        pending = [asyncio.ensure_future(rig.ask(pair)) for pair in WANTED]
        await until(lambda: len(rig.fleet.replicas["f1"]._holdings))
        for name in gone:
            end(rig.fleet, name)
        rig.driver.dispatcher.reroute(rig.route, rig.without(*gone))
        assert right(await asyncio.gather(*pending), WANTED)


async def test_clients_that_go_away_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rigged(monkeypatch, hold_s=HOLD_S / 2) as rig:
        pending = [asyncio.ensure_future(rig.ask(pair)) for pair in WANTED]
        await until(lambda: rig.fleet.held())
        for each in pending[::2]:
            each.cancel()
        answers = await asyncio.gather(*pending[1::2])
        assert right(answers, WANTED[1::2])
        rest = pending[::2]
        assert sum(each.cancelled() for each in rest) > len(rest) // 2


async def test_inputs_that_expire_between_two_splits_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rigged(monkeypatch) as rig:
        rig.driver.dispatcher.reroute(rig.route, {"front": GROUPS["front"], "back": []})
        with pytest.raises(RefusedError, match="deadline passed"):
            await rig.ask([3, 1], within_s=0.3)


async def test_a_front_that_vanishes_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rigged(monkeypatch, hold_s=math.inf) as rig:
        monkeypatch.setattr(rig.fleet, "drop", lambda address, key: None)  # it tells nobody anything any more
        await asyncio.gather(*(rig.ask(pair, within_s=1.5) for pair in WANTED[:20]))
        assert rig.fleet.held() > 0


async def between_splits(rig: Rig) -> asyncio.Future[list[list[Answer]]]:
    """Eight inputs whose survivors wait for replicas of the second split."""
    rig.driver.dispatcher.reroute(rig.route, {"front": GROUPS["front"], "back": []})
    pending = asyncio.gather(*(rig.ask([3, label]) for label in range(8)))
    await until(rig.fleet.held)
    return pending


async def go_on(rig: Rig, route: Route, asked: asyncio.Future[list[list[Answer]]]) -> None:
    rig.driver.dispatcher.reroute(route, GROUPS)
    rig.driver.pump()
    assert [answer.label for (answer,) in await asked] == list(range(8))


async def test_another_plan_continues_with_held_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Route((Stage(0, 2, 4, "back", TIMES, ramps=frozenset({0})), Stage(2, 4, 4, "front", TIMES)))

    async with rigged(monkeypatch) as rig:
        await go_on(rig, other, await between_splits(rig))


async def test_survivors_on_a_device_are_sent_when_another_replica_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Route((Stage(0, 2, 4, "front", TIMES), Stage(2, 4, 4, "front", TIMES, local=True)))
    moved = Route((Stage(0, 2, 4, "front", TIMES), Stage(2, 4, 4, "back", TIMES)))

    async with rigged(monkeypatch, 2**20, kept) as rig:
        for route in (kept, moved, kept):
            rig.driver.dispatcher.reroute(route, GROUPS)
            pending = [asyncio.ensure_future(rig.ask(pair)) for pair in WANTED]
            await asyncio.sleep(0.02)
        assert right(await asyncio.gather(*pending), [[3, label] for _, label in WANTED])


async def test_a_replica_ends_once_its_survivors_were_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rigged(monkeypatch) as rig:
        result = await between_splits(rig)
        ends = [asyncio.ensure_future(replica.close()) for replica in rig.fleet.replicas.values()]
        await asyncio.sleep(0.1)
        assert not all(end.done() for end in ends)
        await go_on(rig, rig.route, result)
        assert not any(end.done() for end in ends), "the front may still have something to ask"
        rig.fleet.hang_up()
        await asyncio.wait_for(asyncio.gather(*ends), 60.0)


async def test_a_replica_without_a_second_port_gives_the_first_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller tries again, and a port may be free then."""
    monkeypatch.setattr("isobatch.deployments.ray_facts.node_address", lambda: "127.0.0.1")
    monkeypatch.setattr("isobatch.deployments.replica.serve_replica.replica_name", lambda: "it")

    replica = ServeReplica(CONFIG, "cpu", "")
    host = "127.0.0.79"  # where no other test listens, and from which none connects
    with held_ports(2, host) as ports:
        pass
    with socket.create_server((host, ports[0])) as free, socket.create_server((host, ports[1])):
        replica._wire = Wire(host, ports)
        free.close()
        with pytest.raises(UserError, match="are all taken"):
            await replica.whereabouts()
    await asyncio.sleep(0)
    assert (await replica.whereabouts()).replica == "it"
    replica._orders.close()
    replica._exchange.close()
    await asyncio.sleep(0)


def test_each_replica_that_stands_by_takes_a_device_of_its_own(tmp_path: Path) -> None:
    taken = [take_device(tmp_path / "app", 2) for _ in range(2)]
    assert [number for number, _ in taken] == [0, 1]
    assert take_device(tmp_path / "other", 2)[0] == 0, "replicas of several applications share it"
    with pytest.raises(RuntimeError, match="each of the 2 devices"):
        take_device(tmp_path / "app", 2)
    taken[0][1].close()
    assert take_device(tmp_path / "app", 2)[0] == 0, "its replica has ended"


def test_users_of_one_machine_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of another user cannot be written."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("node_id", "application_name"):
        monkeypatch.setattr(f"isobatch.deployments.replica.serve_replica.{name}", lambda: "it")
    ServeReplica(CONFIG.model_copy(update={"standby": {"cpu": 1}}), "cpu", "")
    assert [folder.name for folder in tmp_path.iterdir()] == [f"isobatch-standby-{os.getuid()}"]


async def test_a_healthy_replica_in_a_warm_up_is_no_replica_that_hangs() -> None:
    """A healthy replica in a long warm-up is not ended, though an order waits behind it."""
    goes_on = threading.Event()

    class Waits(Toy):
        def run(self, batch: Batch, stop: int, ramps: Collection[int]) -> Launched:
            goes_on.wait(60)
            return super().run(batch, stop, ramps)

    workers, begun, end = LocalWorkers({"it": SplitReplica(Waits())}), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait(60)

    async def launch() -> int:
        return len([1 async for _ in workers.run("it", Order(1, frozenset(), (pack(Toy().encode([[3, 1]])),)))])

    warming, launched = asyncio.ensure_future(workers.between_launches("it", work)), asyncio.ensure_future(launch())
    await until(begun.is_set)
    await asyncio.sleep(0.01)
    assert workers.computes_for_s("it") == 0.0
    end.set()
    await warming
    await until(lambda: workers.computes_for_s("it") > 0.0)
    goes_on.set()
    assert await launched == 1
    await until(lambda: workers.computes_for_s("it") == 0.0)
    await workers.close()


async def test_a_warm_up_that_goes_on_for_ever_counts_as_hung() -> None:
    workers, end = LocalWorkers({"it": SplitReplica(Toy())}, most_warming_s=0.01), threading.Event()

    def work() -> None:
        end.wait(60)

    warming = asyncio.ensure_future(workers.between_launches("it", work))
    await until(lambda: workers.computes_for_s("it") > 0.0)
    end.set()
    await warming
    assert workers.computes_for_s("it") == 0.0
    await workers.close()


async def test_fronts_wait_for_the_same_full_batch_and_one_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, fails, gate = list[int](), [False, True, False], threading.Event()

    def warm_ups(model: Toy, directory: str, plan: Plan, *_: object) -> Iterator[tuple[str, int, Callable[[], None]]]:
        (size,) = (split.batch_size for split in plan.splits)

        def run() -> None:
            ran.append(size)
            if fails.pop(0):
                raise MemoryError("no room")
            if not fails:
                gate.wait(60)

        yield "the only launch", size, run

    monkeypatch.setattr("isobatch.deployments.models.backends.warm_ups", warm_ups)
    plans = [Plan((Placement("cpu", 1, (Split(0, BLOCKS, size),)),)) for size in (1, 2)]
    (tmp_path / "plan.json").write_text(plans[0].to_json())
    save(Profile("toy", (replace_table(table(), kind="cpu"),), ExitProfile(SURVIVAL)), tmp_path / "profile.json")
    files = {name: str(tmp_path / f"{name}.json") for name in ("plan", "profile")}
    replica = ServeReplica(checked(AppConfig, {**files, "loader": CONFIG.loader}), "cpu", "")
    with pytest.raises(MemoryError, match="no room"):
        await replica.warm_up(plans[1].to_json())
    fronts = [asyncio.ensure_future(replica.warm_up(plans[1].to_json())) for _ in range(2)]
    await until(lambda: len(ran) == 3)
    await asyncio.sleep(0.01)
    assert not any(front.done() for front in fronts)
    gate.set()
    await asyncio.gather(*fronts)
    assert ran == [1, 2, 2]
    await replica._workers.close()
