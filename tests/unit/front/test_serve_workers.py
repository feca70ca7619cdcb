"""A front follows Serve's list of replicas: it connects to new ones, drops those that go, and notices lost ones."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from isobatch.deployments.config import AppConfig
from isobatch.deployments.replica.serve_replica import ServeReplica
from isobatch.deployments.transport.connection import MESSAGE_LIMIT_BYTES
from isobatch.deployments.transport.orders import Order
from isobatch.deployments.transport.packed import pack
from isobatch.deployments.transport.replica_connection import ReplicaAddress
from isobatch.profiles.model import Words
from tests.helpers.asking import until
from tests.helpers.toy_model import Toy

CONFIG = AppConfig(loader="tests.helpers.toy_model:load")
GROUP = "toy.cpu"
ORDER = Order(1, frozenset(), (pack(Toy().encode([[3, 1]])),))


class Serve:
    """Knows some replicas; a handle to them asks the one that is named, or any."""

    def __init__(self) -> None:
        self.replicas: dict[str, ServeReplica] = {}
        self.slow_s: dict[str, float] = {}  # how long a replica takes to say where it is
        self.devices: dict[str, str] = {}  # the devices on which replicas stand by

    def start(self, *names: str, directory: str = "") -> None:
        self.replicas |= {name: ServeReplica(CONFIG, "cpu", directory) for name in names}

    def tell(self) -> None:
        from isobatch.deployments.front import router  # it imports Ray

        router.listeners[GROUP](frozenset(self.replicas))

    def handle(self, *_: str) -> "Handle":
        return Handle(self, "")


class Handle:
    def __init__(self, serve: Serve, name: str) -> None:
        self._serve, self._name = serve, name
        self.whereabouts = self

    def options(self, session_id: str) -> "Handle":
        return Handle(self._serve, session_id)

    async def remote(self) -> ReplicaAddress:
        known = self._serve.replicas
        name = self._name if self._name in known else min(known)
        self._serve.tell()
        await asyncio.sleep(self._serve.slow_s.get(self._name, 0.0))
        return (await known[name].whereabouts())._replace(replica=name, device_id=self._serve.devices.get(name, ""))


class Scene:
    def __init__(self, directory: str) -> None:
        self.serve = Serve()
        self.told: list[set[str]] = []
        from isobatch.deployments.front.follower import ServeWorkers

        self.workers = ServeWorkers(self._changed, CONFIG, directory)

    def _changed(self, _: str, replicas: Collection[str]) -> None:
        self.told.append(set(replicas))

    def warm_ups_wait(self, gate: asyncio.Event, *names: str) -> list[str]:
        """The replicas that warm up from now on, for which they wait until the gate opens."""
        warmed = list[str]()

        async def warm_up(name: str, plan: str) -> None:
            warmed.append(f"{name} for {plan}")
            await gate.wait()

        for name in names:
            self.serve.replicas[name]._orders.warm_up = partial(warm_up, name)
        return warmed

    def starts(self, *names: str) -> tuple[list[str], asyncio.Event]:
        """Replicas start under another plan: what they warm up for, and the gate for which they wait."""
        self.workers.plan, gate = "another", asyncio.Event()
        self.serve.start(*names)
        return self.warm_ups_wait(gate, *names), gate

    async def runs_on(self, replica: str, order: Order = ORDER) -> bool:
        return [1 async for _ in self.workers.run(replica, order)] != []


@asynccontextmanager
async def staged(monkeypatch: pytest.MonkeyPatch, directory: str = "") -> AsyncIterator[Scene]:
    monkeypatch.setattr("isobatch.deployments.front.follower.TRUSTED_AFTER_S", 0.05)
    monkeypatch.setattr("isobatch.deployments.ray_facts.node_address", lambda: "127.0.0.1")
    monkeypatch.setattr("isobatch.deployments.replica.serve_replica.replica_name", lambda: "set by the handle")
    monkeypatch.setattr("isobatch.deployments.front.router.listeners", {})
    stage = Scene(directory)
    monkeypatch.setattr("isobatch.deployments.front.follower.serve.get_deployment_handle", stage.serve.handle)
    stage.serve.start("a", "b")
    await stage.workers.open()
    await stage.workers.join(GROUP)
    async with asyncio.timeout(60):
        yield stage
    await stage.workers.close()
    for replica in stage.serve.replicas.values():
        replica._orders.close()
        replica._exchange.close()
    await asyncio.sleep(0)


async def test_words_of_large_inputs_stay_in_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be longer than a message may be."""
    words = (Words("x" * MESSAGE_LIMIT_BYTES, (), (), ()),)
    large = replace(pack(Toy().encode([[3, 1]] * (CONFIG.by_value_bytes // 8))), words=words)
    async with staged(monkeypatch) as stage:
        assert await stage.runs_on("a", Order(1, frozenset(), (large,)))


async def test_a_replica_that_goes_gets_no_more_orders_and_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(monkeypatch) as stage:
        going = stage.serve.replicas.pop("a")
        end = asyncio.ensure_future(going.close())
        await asyncio.sleep(0.1)
        assert not end.done(), "the front has not heard of it"
        stage.serve.tell()
        await until(lambda: stage.told[-1] == {"b"})
        with pytest.raises(ConnectionError, match="replica a has gone"):
            await stage.runs_on("a")
        await end


async def test_a_broken_connection_is_opened_again_if_serve_lists_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(monkeypatch) as stage:
        await until(lambda: len(stage.serve.replicas["a"]._orders.gate.authorized) == 1)
        for caller in tuple(stage.serve.replicas["a"]._orders.gate.authorized):
            caller.hang_up()
        await until(lambda: stage.told[-1] == {"b"})
        await until(lambda: stage.told[-1] == {"a", "b"})
        assert await stage.runs_on("a")


async def test_replicas_run_full_batches_of_a_plan_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are connected before the front follows a changed plan, and those that come later."""
    async with staged(monkeypatch) as stage:
        gate = asyncio.Event()
        warmed = stage.warm_ups_wait(gate, "a", "b")
        stage.workers.plan = "another"
        joining = asyncio.ensure_future(stage.workers.join(GROUP))
        await until(lambda: sorted(warmed) == ["a for another", "b for another"])
        stage.serve.start("c")
        later = stage.warm_ups_wait(gate, "c")
        stage.serve.tell()
        await until(lambda: later == ["c for another"])
        assert stage.told[-1] == {"a", "b"}, "the new one is not used yet"
        assert await stage.runs_on("a"), "orders do not wait"
        assert not joining.done()
        gate.set()
        await joining
        await until(lambda: stage.told[-1] == {"a", "b", "c"})
        assert await stage.runs_on("c")
        await stage.workers.join(GROUP)
        assert (len(warmed), later) == (2, ["c for another"]), "each once"


async def test_the_only_replica_of_a_group_is_used_while_it_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(monkeypatch) as stage:
        stage.serve.replicas.clear()
        warmed, gate = stage.starts("c")
        joining = asyncio.ensure_future(stage.workers.join(GROUP))
        await until(lambda: stage.told[-1] == {"c"} and len(warmed) == 1)
        assert await stage.runs_on("c")
        assert not joining.done()
        gate.set()
        await joining
        assert warmed == ["c for another"]
        assert stage.told[-1] == {"c"}


async def test_a_replica_that_warms_up_is_used_once_the_others_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(monkeypatch) as stage:
        warmed, gate = stage.starts("c")
        stage.serve.tell()
        await until(lambda: len(warmed) == 1)
        for name in ("a", "b"):
            del stage.serve.replicas[name]
        stage.serve.tell()
        await until(lambda: stage.told[-1] == {"c"})
        assert await stage.runs_on("c")
        gate.set()


async def test_a_replica_that_goes_does_not_wait_for_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(monkeypatch) as stage:
        stage.workers.plan, gate = "another", asyncio.Event()
        stage.serve.start("c")
        warmed = stage.warm_ups_wait(gate, "c", "a")
        joining = asyncio.ensure_future(stage.workers.join(GROUP))
        await until(lambda: len(warmed) == 1)
        going = [stage.serve.replicas.pop("c")]
        stage.serve.tell()
        await until(lambda: len(warmed) == 2)
        going.append(stage.serve.replicas.pop("a"))
        stage.serve.tell()
        for replica in going:
            await replica.close()
        await joining
        assert stage.told[-1] == {"b"}


async def test_replicas_on_devices_of_other_applications_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(monkeypatch) as stage:
        stage.serve.devices = {"c": "ours", "d": "theirs"}
        stage.workers.plan, stage.workers.uses = "another", lambda device_id: device_id == "ours"
        stage.serve.start("c", "d")
        gate = asyncio.Event()
        gate.set()
        warmed = stage.warm_ups_wait(gate, "a", "b", "c", "d")
        stage.serve.tell()
        await until(lambda: stage.told[-1] == {"a", "b", "c", "d"})
        await stage.workers.join(GROUP)
        assert warmed == ["c for another"]
        stage.workers.uses = lambda device_id: True
        await stage.workers.join(GROUP)
        assert sorted(warmed) == [f"{name} for another" for name in "abcd"]


async def test_a_replica_that_cannot_run_full_batches_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(monkeypatch) as stage:
        stage.workers.plan = "no plan"
        stage.serve.start("c")
        stage.serve.tell()
        await until(lambda: stage.told[-1] == {"a", "b", "c"})
        assert "replica c has not run its full batches: LaunchError: UserError: this plan" in caplog.text


async def test_a_slow_replica_is_connected_after_the_wait_for_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(monkeypatch) as stage:
        stage.serve.slow_s["slow"] = 0.1
        stage.serve.start("slow")
        stage.serve.tell()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stage.workers.join(GROUP), 0.02)
        await until(lambda: "slow" in stage.told[-1])


async def test_a_replica_with_other_weights_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node may have older files, and would answer all the same."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)

    async with staged(monkeypatch, str(tmp_path / "ours")) as stage:
        stage.serve.start("old", directory=str(tmp_path / "theirs"))
        stage.serve.start("new", directory=str(tmp_path / "ours"))
        stage.serve.tell()
        await until(lambda: "runs other weights" in caplog.text and "new" in stage.told[-1])
        assert "old" not in stage.told[-1]
