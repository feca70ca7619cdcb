"""The driver in real time, on threads: answers are the model's own, early ones come early, failures are retried."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Limits
from isobatch.deployments.dispatch.queue_orders import queue_order_named
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.answers import Answer, RefusedError
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.replica.local_workers import LocalWorkers
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.orders import Departed, Failed, Order, Stayed
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.model import Batch, Exits, Launched
from tests.helpers.asking import until
from tests.helpers.toy_model import RAMPS, Toy, left_at

REPLICAS = {"front": ["f0", "f1"], "back": ["b0"]}


TIMES = (0.001,) * 4
ROUTE = Route(
    (Stage(0, 2, 4, "front", TIMES, ramps=frozenset({0})), Stage(2, 4, 4, "back", TIMES, ramps=frozenset({2})))
)


class Rig:
    """A driver on threads, with a toy on each."""

    def __init__(self, pause_s: float = 0.0, limits: Limits | None = None, workers: Any = None) -> None:
        self.toys = {name: Toy(pause_s) for names in REPLICAS.values() for name in names}
        self.threads = LocalWorkers({name: SplitReplica(toy) for name, toy in self.toys.items()})
        dispatcher = Dispatcher(ROUTE, REPLICAS, limits)
        self.workers = workers(self.threads) if workers else self.threads
        self.driver = Driver(dispatcher, self.workers, time.perf_counter)

    async def ask(self, *inputs: list[int], within_s: float = 60.0) -> list[Answer]:
        return await self.driver.answer(pack(Toy().encode(list(inputs))), within_s)


@asynccontextmanager
async def rigged(**fields: Any) -> AsyncIterator[Rig]:
    rig = Rig(**fields)
    yield rig
    await rig.driver.close()
    assert rig.driver.dispatcher.inside == 0, "somebody was forgotten"


async def test_hundreds_at_once_each_get_their_own_answer() -> None:
    wanted = [[block, label] for label in range(10) for block in range(4)] * 10

    async with rigged() as rig:
        answers = await asyncio.gather(*(rig.ask(pair) for pair in wanted))
        for (block, label), (answer,) in zip(wanted, answers, strict=True):
            assert (answer.label, answer.exit_block) == (label, left_at(block, RAMPS))
            assert [step.block for step in answer.steps] == ([0] if answer.exit_block < 2 else [0, 2])
            assert all(step.queued_ms >= 0 and step.computed_ms >= 0 for step in answer.steps)
        assert max(rig.toys["b0"].sizes) == 4, "survivors merged"


def waiting_toys(monkeypatch: pytest.MonkeyPatch, waits: Callable[[Batch], bool]) -> threading.Event:
    """Launches of such batches end when this is set."""
    end, run = threading.Event(), Toy.run

    def held(toy: Toy, batch: Batch, *told: Any) -> Launched:
        if waits(batch):
            assert end.wait(60)
        return run(toy, batch, *told)

    monkeypatch.setattr(Toy, "run", held)
    return end


async def test_an_admitted_input_keeps_its_place_when_one_of_a_higher_priority_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = waiting_toys(monkeypatch, lambda batch: True)
    async with rigged(limits=Limits(max_inside=9, queue_order=queue_order_named("priority"))) as rig:
        admitted = [asyncio.ensure_future(rig.ask(*[[3, 1]] * 4)) for _ in range(2)]  # one for each replica
        await asyncio.sleep(0.05)
        admitted.append(asyncio.ensure_future(rig.ask([3, 1])))
        await asyncio.sleep(0.05)
        with pytest.raises(RefusedError, match="9 inputs may be inside"):
            await rig.driver.answer(pack(Toy().encode([[3, 7]])), 60.0, priority=5)
        end.set()
        assert [len(await each) for each in admitted] == [4, 4, 1]


async def test_inputs_that_exit_are_answered_before_the_rest_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    end = waiting_toys(monkeypatch, lambda batch: batch.cursor == 1)  # behind the first ramp

    async with rigged() as rig:
        pending = asyncio.ensure_future(rig.ask([0, 1], [3, 1]))
        await until(lambda: rig.driver.counts.exits[0])
        assert rig.driver.counts.exits.total() == 1
        end.set()
        assert [answer.exit_block for answer in await pending] == [0, 3]
        assert rig.toys["f0"].sizes == [2, 1], "they were mates"


async def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    async with rigged() as rig:
        with pytest.raises(RefusedError, match="deadline cannot be met") as refused:
            await rig.ask([0, 1], within_s=0.0001)
        assert refused.value.status == 503
        assert 0 < refused.value.retry_after_s < 1


async def test_a_request_that_waits_too_long_is_refused() -> None:
    async with rigged(pause_s=0.05) as rig:
        slow = asyncio.gather(*(rig.ask([3, 1], [3, 1], [3, 1], [3, 1]) for _ in range(4)))
        await asyncio.sleep(0.01)
        with pytest.raises(RefusedError, match="deadline passed") as expired:
            await rig.ask([3, 1], within_s=0.05)
        assert expired.value.status == 504
        await slow


async def test_all_inputs_of_a_request_are_admitted_or_none() -> None:
    async with rigged(limits=Limits(max_inside=3)) as rig:
        with pytest.raises(RefusedError, match="3 inputs may be inside"):
            await rig.ask(*[[0, 1]] * 4)
        assert len(await rig.ask(*[[0, 1]] * 3)) == 3
        assert rig.driver.dispatcher.waiting() == {}


async def test_a_client_that_goes_away_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    end = waiting_toys(monkeypatch, lambda batch: True)

    async with rigged() as rig:
        busy = asyncio.gather(*(rig.ask(*[[0, 1]] * 4) for _ in range(4)))
        await asyncio.sleep(0.01)
        gone = asyncio.ensure_future(rig.ask(*[[3, 9]] * 4))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        end.set()
        await busy
        assert sum(sum(toy.sizes) for toy in rig.toys.values()) == 16


async def test_inputs_that_fail_or_whose_client_leaves_early_are_excused_and_those_that_are_late_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other plan would answer them in time."""
    end = waiting_toys(monkeypatch, lambda batch: True)
    async with rigged() as rig:
        busy = asyncio.gather(*(rig.ask(*[[0, 1]] * 4) for _ in range(4)))
        await asyncio.sleep(0.01)
        gone = asyncio.ensure_future(rig.ask(*[[3, 1]] * 3))
        late = asyncio.ensure_future(rig.ask(*[[3, 1]] * 2, within_s=0.1))
        await asyncio.sleep(0.01)
        gone.cancel()
        with pytest.raises(RefusedError, match="deadline passed"):
            await late
        end.set()
        await busy
        assert rig.driver.counts.excused == 3
        with pytest.raises(RefusedError, match="the network failed"):
            await rig.ask([3, -1])
        assert rig.driver.counts.excused == 4


async def test_a_driver_that_is_closed_leaves_no_launch_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    end = waiting_toys(monkeypatch, lambda batch: True)

    async with rigged() as rig:
        gone = asyncio.ensure_future(rig.ask(*[[3, 1]] * 12))
        while not rig.driver.dispatcher.inside:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # its launches are sent
        gone.cancel()
        await rig.driver.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        end.set()


class Remote:
    """Workers whose errors come as from replicas in other processes: as a message."""

    def __init__(self, threads: LocalWorkers) -> None:
        self._threads = threads
        self.drop, self.close, self.suspect = threads.drop, threads.close, threads.suspect

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        try:
            async for reply in self._threads.run(replica, order):
                yield reply
        except RuntimeError as error:
            raise Failed(f"RuntimeError: {error}", is_loss=False).error from error


@pytest.mark.parametrize("workers", [None, Remote])
async def test_an_input_that_fails_on_every_replica_names_the_reason(
    workers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with rigged(workers=workers) as rig:
        with pytest.raises(RefusedError, match="the network failed: RuntimeError; the replica's log") as failed:
            await rig.ask([3, -1])
        assert failed.value.status == 500
        assert "a label of -1 breaks the toy" in caplog.text
        (answer,) = await rig.ask([3, 1])
        assert answer.label == 1


class HangsOnce:
    """Workers of which the first launch on one of two replicas never comes back."""

    def __init__(self, threads: LocalWorkers) -> None:
        self._threads = threads
        self.suspected: list[str] = []
        self.drop, self.close = threads.drop, threads.close

    async def run(self, replica: str, order: Order) -> AsyncIterator[Departed | Stayed]:
        if replica == "f0" and not self.suspected:
            await asyncio.Event().wait()
        async for reply in self._threads.run(replica, order):
            yield reply

    def suspect(self, replica: str) -> None:
        self.suspected.append(replica)


async def test_a_launch_that_hangs_is_tried_on_another_replica_and_its_own_is_checked() -> None:
    async with rigged(limits=Limits(stuck_after_s=1.0, first_launch_s=0.0), workers=HangsOnce) as rig:
        answers = await asyncio.gather(*(rig.ask([3, label], within_s=20.0) for label in range(10)))
        assert [answer.label for (answer,) in answers] == list(range(10))
        assert rig.workers.suspected == ["f0"]


class Fickle(Toy):
    """In full it says another label than at a ramp."""

    def run(self, batch: Batch, stop: int, ramps: Any, kept: Any = ()) -> Launched:
        launched = super().run(batch, stop, ramps, kept)
        if stop < self.num_blocks:
            return launched
        exits = launched.exits
        return Launched(Exits(exits.rows, exits.blocks, np.roll(exits.logits, 1, axis=1)), None)


@pytest.mark.parametrize(("toy", "missed"), [(Toy, 0), (Fickle, 20)])
async def test_audits_tell_whether_the_full_network_agrees_and_change_no_answer(toy: type[Toy], missed: int) -> None:
    threads = LocalWorkers({name: SplitReplica(toy()) for names in REPLICAS.values() for name in names})
    driver = Driver(Dispatcher(ROUTE, REPLICAS, Limits(audit_share=1.0, audit_cost=0.5)), threads, time.perf_counter)
    pairs = [[block, label] for block in range(3) for label in range(10)]
    answers = await driver.answer(pack(toy().encode(pairs)), 60.0)
    left = [(label, left_at(block, RAMPS)) for block, label in pairs]
    assert [(each.label, each.exit_block) for each in answers] == left
    while driver.counts.audited.total() < 30:  # inputs that run to the end take the shadows along
        await driver.answer(pack(toy().encode([[3, 1]])), 60.0)
    await driver.close()
    assert driver.counts.exits[2] == 20, "a shadow is not answered again"
    assert (driver.counts.missed[0], driver.counts.missed[2]) == (missed // 2, missed)
