"""A deadline counts from the arrival: late requests are refused unread, and no answer comes after its deadline."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi.testclient import TestClient

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.front.answers import Answer, RefusedError
from isobatch.deployments.front.headers import KERNEL
from isobatch.deployments.front.http import create_api
from isobatch.deployments.front.incoming import Content, IncomingRequest
from isobatch.deployments.front.load import SLICE_S
from isobatch.deployments.front.proxy import Burden
from isobatch.deployments.front.service import Service
from tests.helpers.documented import DocumentedClient
from tests.helpers.toy_model import Toy

TOY = AppConfig(model="/models/toy", loader="tests.helpers.toy_model:load")


class Clock:
    """Real time, and what is added to it."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.ahead_s


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Service, Clock]]:
    clock = Clock()
    service = Service(TOY, clock)
    await service.open()
    yield service, clock
    await service.close()


def within(seconds: float) -> dict[bytes, bytes]:
    return {b"x-deadline-ms": f"{1e3 * seconds:.9f}".encode()}


def content(service: Service, write: Callable[[list[Answer]], Any] = list) -> Callable[[], Content[Any]]:
    return lambda: Content(service.encoded([0, 3]), write)


def takes_a_second(clock: Clock) -> Callable[[list[Answer]], list[Answer]]:
    """The answers are written in this time."""

    def slow(answers: list[Answer]) -> list[Answer]:
        clock.ahead_s += 1.0
        return answers

    return slow


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    with DocumentedClient(create_api(Service(TOY, time.perf_counter))) as client:
        client.encoded = []
        encode = Toy.encode
        monkeypatch.setattr(Toy, "encode", lambda toy, inputs: client.encoded.append(inputs) or encode(toy, inputs))
        yield client


@pytest.mark.parametrize("path", ["/predict", "/v2/models/toy/infer"])
def test_a_request_past_its_deadline_is_refused_before_it_is_read(client: TestClient, path: str) -> None:
    def started(waited_s: float, kernel: str = KERNEL) -> tuple[str, str]:
        return "X-Request-Start", f"t={(time.time() - waited_s) * 1e6:.0f};{kernel}"

    def ask(*headers: tuple[str, str]) -> Any:
        return client.post(path, content=b"{", headers=[*headers, ("X-Deadline-Ms", "30000")])

    assert ask(started(0.1)).status_code == 400
    assert ask(started(31.0, "of another node")).status_code == 400, "its clock may be half a minute behind"
    refused = ask(started(31.0), started(0.1))  # the second as a trailer, which uvicorn adds to the headers
    assert (refused.status_code, "deadline" in refused.json()["error"]) == (503, True)
    assert int(refused.headers["Retry-After"]) >= 1
    assert client.encoded == []
    assert client.get("/stats").json()["requests"]["refused"] == 3


async def test_a_request_that_arrived_past_its_deadline_is_not_read() -> None:
    async with opened() as (service, clock):
        incoming = service.register("", 0, within(0.9))
        clock.ahead_s += 1.0
        with pytest.raises(RefusedError, match="before the whole request arrived"):
            await service.answer(incoming, lambda: pytest.fail("it was read"))


async def test_inputs_that_wait_unread_take_time_of_the_network_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatcher, "needed_s", lambda _, now_s, left_s, weight: 0.1 * weight)
    async with opened() as (service, _):
        service._costs[""].work_s.learn(0, SLICE_S)

        async def one() -> None:
            await service.answer(service.register("", 0, within(60.0)), content(service))

        waiting = [asyncio.create_task(one()) for _ in range(20)]
        await asyncio.sleep(0)
        service.register("", 0, within(5.0))
        with pytest.raises(RefusedError):
            service.register("", 0, within(1.5))
        await asyncio.gather(*waiting)


async def test_an_answer_that_is_ready_too_late_is_refused() -> None:
    async with opened() as (service, clock):
        slow = takes_a_second(clock)
        with service.counted():
            assert len(await service.answer(service.register("", 0, within(5.0)), content(service, slow))) == 1
        with pytest.raises(RefusedError, match="before the answer was ready") as late, service.counted():
            await service.answer(service.register("", 0, within(0.9)), content(service, slow))
        assert late.value.status == 504
        assert (await service.stats())["requests"]["answered"] == 1


async def test_a_request_that_is_refused_unread_counts_as_arrived() -> None:
    """Else a controller sees only as many as its plan can answer, however many more ask."""

    async with opened() as (service, clock):

        def asked() -> int:
            return service._driver.counts.observed(service.num_blocks).arrivals

        for _ in range(9):
            await service.answer(service.register("", 0, within(5.0)), content(service))
        assert asked() == 9
        with pytest.raises(RefusedError):
            service.register("", 0, within(1e-9))  # at the door
        hurried = service.register("", 0, within(0.9))
        service._costs[""].work_s.learn(0, 1.0)
        first = asyncio.create_task(service.answer(service.register("", 0, within(60.0)), content(service)))
        await asyncio.sleep(0)
        clock.ahead_s += 1.0
        with pytest.raises(RefusedError):
            await service.answer(hurried, content(service))  # while it waited
        await first
        assert asked() == 12


async def test_late_and_long_waiting_requests_count_as_strained_and_hurried_ones_that_are_refused_do_not() -> None:
    async with opened() as (service, clock):

        async def strain(incoming: IncomingRequest, write: Callable[[list[Answer]], Any] = list) -> int:
            before = service.burden().strained
            with contextlib.suppress(RefusedError), service.counted():
                await service.answer(incoming, content(service, write))
            return service.burden().strained - before

        assert await strain(service.register("", 0, within(5.0))) == 0
        assert await strain(service.register("", 0, within(0.95)), takes_a_second(clock)) == 1
        assert await strain(service.register("", 0, within(0.5)), takes_a_second(clock)) == 0, "it was in a hurry"
        waited = {b"x-request-start": f"t={(time.time() - 0.2) * 1e6:.0f};{KERNEL}".encode()}  # in the proxy
        assert await strain(service.register("", 0, within(0.9) | waited)) == 1
        assert await strain(service.register("", 0, within(60.0) | waited)) == 0
        with pytest.raises(RefusedError), service.counted():
            service.register("", 0, within(1e-9))
        assert service.burden().strained == 2


async def test_the_time_in_which_a_client_sends_its_body_is_no_strain() -> None:
    """Else clients with slow networks would lower the limit of an idle front to a few places."""
    async with opened() as (service, clock):
        slow = service.register("", 0, within(1.0))
        clock.ahead_s += 0.5
        with service.counted():
            await service.answer(slow, content(service))
        started = {b"x-request-start": f"t={(time.time() - 0.5) * 1e6:.0f};{KERNEL}".encode()}
        for headers, body_s in (({b"x-request-sent": b"450000"}, 0.0), ({}, 0.45)):  # to the proxy, to this process
            with service.counted():
                await service.answer(
                    service.register("", 0, within(1.0) | started | headers, body_s=body_s), content(service)
                )
        for headers, problem in ((within(1.0), "before the whole request arrived"), ({}, "cannot be met")):
            too_slow = service.register("", 0, headers)
            clock.ahead_s += 1.5
            with pytest.raises(RefusedError, match=problem), service.counted():
                await service.answer(too_slow, content(service))
        assert service.burden() == Burden(inside=0, strained=0, answered=3)


async def test_a_slow_turn_of_the_event_loop_takes_no_time_from_later_requests() -> None:
    """HAProxy knows when a request came; without it, a request may have waited for the whole last turn."""
    async with opened() as (service, clock):

        def slow() -> Content[Any]:
            clock.ahead_s += 1.0
            return content(service)()

        await service.answer(service.register("", 0, within(5.0)), slow)
        clock.ahead_s += 0.5
        with pytest.raises(RefusedError):
            service.register("", 0, within(0.9))
        came_now = {b"x-request-start": f"t={(time.time() - 0.001) * 1e6:.0f};{KERNEL}".encode()}
        incoming = service.register("", 0, within(0.9) | came_now)
        assert len(await service.answer(incoming, content(service))) == 1


@pytest.mark.parametrize("usual_s", [0.5, 1.0])
async def test_a_refusal_is_a_strain_if_its_client_waits_for_as_long_as_most(usual_s: float) -> None:
    """A few hurried clients do not lower the limit for all; where all wait for less than the SLO, it follows them."""
    async with opened() as (service, clock):
        for _ in range(200):
            service.register("", 0, within(usual_s))
        with pytest.raises(RefusedError), service.counted():
            await service.answer(service.register("", 0, within(0.5)), content(service, takes_a_second(clock)))
        assert service.burden().strained == (usual_s == 0.5)
