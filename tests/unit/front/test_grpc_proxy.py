"""The HAProxy before a front's gRPC server: whom it refuses and how, whom it lets through, and how long it lives."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.serving import local
from deployments.config import AppConfig
from deployments.front import grpc_proxy
from deployments.front.grpc_proxy import GrpcProxy
from deployments.front.headers import STARTED, TIMEOUT, waited_s_by
from deployments.front.open_inference import calls, rpc
from deployments.front.open_inference.messages import SERVICE, message
from deployments.front.open_inference.rpc import Places, serving
from deployments.front.proxy import MOST, RETRY_S, Burden, ProxyLimit, said
from deployments.front.service import Service
from deployments.ray_settings import haproxy_program
from tests.helpers.toy_model import Toy

pytestmark = pytest.mark.skipif(not haproxy_program(), reason="there is no HAProxy for this platform")
INFER, LIVE, STATISTICS = (f"/{SERVICE}/{method}" for method in ("ModelInfer", "ServerLive", "ModelStatistics"))
REQUEST = message("ModelInferRequest")(
    model_name="toy",
    inputs=[{"name": "inputs", "datatype": "INT64", "shape": (1, 2), "contents": {"int64_contents": [4, 7]}}],
).SerializeToString()


def calm() -> Burden:
    return Burden(0, 0, 0)


@pytest.fixture
def free_port() -> int:
    return local.free_port(0)


@contextmanager
def proxy(port: int, burden: Callable[[], Burden] = calm) -> Iterator[GrpcProxy]:
    """HAProxy without a front."""
    program = haproxy_program()
    assert program
    it = GrpcProxy(program, "127.0.0.1", port, 1.0, burden)
    try:
        it.open()
        yield it
    finally:
        it.drain()
        it.close()


def toy(port: int) -> Service:
    config = {"model": "/models/toy", "loader": "tests.helpers.toy_model:load", "slo_ms": 20_000, "drain_s": 5}
    return Service(AppConfig(grpc_port=port, **config), time.perf_counter)


def play(scene: Callable[[grpc.aio.Channel, Service], Awaitable[Any]], port: int) -> Any:
    async def act() -> Any:
        service = toy(port)
        await service.open()
        async with serving(service), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            result = await asyncio.wait_for(scene(channel, service), 60)
        await service.close()
        return result

    return asyncio.run(act())


@pytest.fixture
def one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front has room for one inference at once, whatever it learns."""
    monkeypatch.setattr(grpc_proxy, "MOST", 1)
    monkeypatch.setattr(grpc_proxy, "QUEUED", 10_000)
    monkeypatch.setattr(ProxyLimit, "_tell", lambda *_: None)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The network answers nothing until this is set."""
    end, run = threading.Event(), Toy.run

    def waits(*args: Any) -> Any:
        assert end.wait(60)
        return run(*args)

    monkeypatch.setattr(Toy, "run", waits)
    yield end
    end.set()


async def until(true: Callable[[], Any], within_s: float = 60.0) -> None:
    until_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until_s
        await asyncio.sleep(0.02)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


def test_what_the_front_has_no_room_for_is_refused_as_grpc_says_it(
    one_place: None, held: threading.Event, free_port: int
) -> None:
    """Within milliseconds, with a time to come back that differs from one to the next."""

    async def scene(channel: grpc.aio.Channel, service: Service) -> None:
        infer = channel.unary_unary(INFER)
        admitted = asyncio.ensure_future(infer(REQUEST))
        await until(lambda: service.burden().inside)
        told, took_s = set[str | bytes](), []
        for _ in range(20):
            began_s = time.perf_counter()
            refused = await refusal(infer(REQUEST))
            took_s.append(time.perf_counter() - began_s)
            assert (refused.code().name, refused.details()) == ("UNAVAILABLE", grpc_proxy._CROWDED)
            told.add(dict(refused.trailing_metadata() or refused.initial_metadata())["grpc-retry-pushback-ms"])
        assert min(took_s) < 0.2
        assert len(told) > 1, "not all come back at once"
        assert all(1000 <= int(each) <= 1000 * RETRY_S for each in told)
        assert service.burden().inside == 1, "it has seen none of them"
        held.set()
        assert await admitted

    play(scene, free_port)


def test_streams_and_questions_take_no_places_of_calls(one_place: None, held: threading.Event, free_port: int) -> None:
    async def scene(channel: grpc.aio.Channel, service: Service) -> None:
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        streams = [stream() for _ in range(3)]
        for each in streams:
            await each.write(REQUEST)
        await until(lambda: service.burden().inside == 3)
        inferred = asyncio.ensure_future(channel.unary_unary(INFER)(REQUEST))
        await until(lambda: service.burden().inside == 4)
        assert await channel.unary_unary(f"/{SERVICE}/ServerLive")(b"")
        held.set()
        assert await inferred
        for each in streams:
            assert await each.read()
            await each.done_writing()

    play(scene, free_port)


def test_a_flood_of_streams_is_read_no_faster_than_it_is_answered(
    monkeypatch: pytest.MonkeyPatch, held: threading.Event, free_port: int
) -> None:
    """Who floods waits: the front has no more of them than places, refuses nobody, and answers all in the end."""
    monkeypatch.setattr(grpc_proxy, "MOST", 4)
    monkeypatch.setattr(ProxyLimit, "_tell", lambda *_: None)
    monkeypatch.setattr(GrpcProxy, "places", 4)

    async def scene(channel: grpc.aio.Channel, service: Service) -> None:
        streams = [channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")() for _ in range(3)]
        for each in streams:
            for _ in range(20):
                await each.write(REQUEST)
            await each.done_writing()
        await until(lambda: service.burden().inside == 4)
        await asyncio.sleep(0.2)
        assert service.burden().inside == 4
        held.set()
        replies = await asyncio.gather(*(everything(each) for each in streams))
        assert [len(each) for each in replies] == [20, 20, 20]
        assert service.burden().strained == 0

    play(scene, free_port)


def test_refusing_what_streams_ask_is_no_faster_than_answering_it(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setattr(GrpcProxy, "places", 4)

    async def scene(channel: grpc.aio.Channel, service: Service) -> None:
        late = (("x-deadline-ms", "0.001"),)
        streams = [channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(metadata=late) for _ in range(2)]
        began_s = time.monotonic()
        for each in streams:
            for _ in range(16):
                await each.write(REQUEST)
            await each.done_writing()
        replies = await asyncio.gather(*(everything(each) for each in streams))
        assert [len(each) for each in replies] == [16, 16]
        assert time.monotonic() - began_s > 32 / 4 * rpc.PUSH_BACK_S

    play(scene, free_port)


async def everything(stream: Any) -> list[Any]:
    return [reply async for reply in stream]


def test_no_address_holds_all_streams(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setattr(grpc_proxy, "STREAMS_OF_ONE_ADDRESS", 2)

    async def scene(channel: grpc.aio.Channel, service: Service) -> None:
        open_one = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        streams = [open_one() for _ in range(2)]
        for each in streams:
            await each.write(REQUEST)
            assert await each.read()
        refused = await refusal(everything(open_one()))
        assert (refused.code().name, refused.details()) == ("UNAVAILABLE", grpc_proxy._CROWDED)
        await streams[0].done_writing()
        assert await streams[0].read() is grpc.aio.EOF
        again = open_one()
        await again.write(REQUEST)
        assert await again.read()
        for each in (streams[1], again):
            await each.done_writing()
            assert await each.read() is grpc.aio.EOF

    play(scene, free_port)


class Queue:
    """Streams that ask for places, one after the other, and what they got."""

    def __init__(self) -> None:
        self.most, self.inside, self.asked = 2, 0, 0
        self.served: list[int] = []
        self.waiting: list[asyncio.Task[None]] = []
        self.places = Places(lambda: self.most, 1.0, lambda: 0.0)

    async def ask(self, number: int) -> None:
        await self.places.take()
        self.served.append(number)
        self.inside += 1

    async def play(self, step: str) -> None:
        match step:
            case "ask":
                self.waiting.append(asyncio.create_task(self.ask(self.asked)))
                self.asked += 1
            case "leave" if self.inside:
                self.inside -= 1
                self.places.leave(answered=True)
            case "give up" if self.waiting:
                self.waiting.pop().cancel()
            case "more" | "fewer":
                self.most = max(1, self.most + (1 if step == "more" else -1))
        for _ in range(3):
            await asyncio.sleep(0)
        self.waiting = [task for task in self.waiting if not task.done()]


@given(st.lists(st.sampled_from(["ask", "ask", "leave", "more", "fewer", "give up"]), max_size=40))
def test_places_of_streams_are_never_too_many_and_go_to_who_waits_longest(steps: list[str]) -> None:
    async def act() -> None:
        queue = Queue()
        for step in steps:
            before = len(queue.served)
            await queue.play(step)
            assert len(queue.served) == before or queue.inside <= queue.most
            assert queue.inside or not queue.waiting, "somebody must be there who lets the next one in"
        while queue.waiting:
            assert queue.inside, "nobody is forgotten"
            await queue.play("leave")
        assert queue.served == sorted(queue.served)

    asyncio.run(act())


@pytest.mark.parametrize(("alone_s", "per_s"), [(0.01, 1000.0), (0.2, 200.0), (0.5, 20.0)])
def test_requests_of_streams_take_most_of_the_time_that_there_is(alone_s: float, per_s: float) -> None:
    """Of a server that answers so many a second, each after so long at least: all it can are answered, in time."""

    async def act() -> None:
        now_s, slo_s = 0.0, 1.0
        places = Places(lambda: MOST, slo_s, lambda: now_s)
        entered, times_s = deque[float](), list[float]()

        async def flood() -> None:
            while True:
                await places.take()
                entered.append(now_s)

        floods = [asyncio.create_task(flood()) for _ in range(5)]
        for _ in range(round(8 * per_s)):
            now_s += 1 / per_s
            for _ in range(3):
                await asyncio.sleep(0)
            if entered and now_s - entered[0] >= alone_s:
                times_s.append(now_s - entered.popleft())
                places.leave(answered=True)
        late = times_s[len(times_s) // 2 :]
        assert max(late) <= slo_s
        assert len(times_s) > 0.7 * 8 * per_s
        for each in floods:
            each.cancel()

    asyncio.run(act())


def test_health_checks_come_through_whatever_else_is_asked_or_only_half_asked(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """The front answers one question at once, and a call takes no place before all of it is here."""
    monkeypatch.setattr(grpc_proxy, "QUESTIONS_AT_ONCE", 1)
    answered, asked = asyncio.Event(), list[str]()
    everywhere = Service.everywhere

    async def slow(self: Service) -> Any:
        asked.append("statistics")
        await answered.wait()
        return await everywhere(self)

    monkeypatch.setattr(Service, "everywhere", slow)

    async def scene(channel: grpc.aio.Channel, service: Service) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", free_port)
        half = [frame(1, 4, headers(LIVE), stream) for stream in (1, 3, 5)]
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b"", 0) + b"".join(half))
        await writer.drain()
        statistics = [asyncio.ensure_future(channel.unary_unary(STATISTICS)(b"")) for _ in range(3)]
        await until(lambda: asked)
        live = asyncio.ensure_future(channel.unary_unary(LIVE)(b""))
        await asyncio.wait([live, *statistics], timeout=0.2)
        assert asked == ["statistics"], "the others wait in HAProxy"
        live.add_done_callback(lambda _: asked.append("live"))
        answered.set()
        assert await live
        await asyncio.gather(*statistics)
        assert asked.index("live") == 1
        too_long = await refusal(channel.unary_unary(STATISTICS)(bytes(grpc_proxy.QUESTION + 100)))
        assert too_long.code().name == "RESOURCE_EXHAUSTED"
        writer.close()

    play(scene, free_port)


def test_a_call_that_its_client_cancels_ends_in_the_front(held: threading.Event, free_port: int) -> None:
    async def scene(channel: grpc.aio.Channel, service: Service) -> None:
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
        await stream.write(REQUEST)
        inferred = channel.unary_unary(INFER)(REQUEST)
        await until(lambda: service.burden().inside == 2)
        stream.cancel()
        inferred.cancel()
        await until(lambda: service.burden().inside == 0)
        assert (await service.stats())["requests"]["abandoned"] == 2

    play(scene, free_port)


def test_a_call_whose_message_does_not_come_gives_its_place_back(
    one_place: None, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """It has a place in the front as soon as more of it is here than HAProxy can hold."""
    monkeypatch.setattr(calls, "READ_WITHIN_S", 0.3)
    never = bytes([0]) + (10**6).to_bytes(4, "big") + bytes(100_000)

    async def scene(channel: grpc.aio.Channel, service: Service) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", free_port)
        frames = [(1, 4, headers(INFER)), *((0, 0, never[at : at + 16_000]) for at in range(0, len(never), 16_000))]
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b"", 0))
        writer.write(frame(8, 0, (10**6).to_bytes(4, "big"), 0) + b"".join(frame(*each) for each in frames))
        infer = channel.unary_unary(INFER)
        while (await asyncio.wait([call := asyncio.ensure_future(infer(REQUEST))]) and call.exception()) is None:
            pass  # it has not come that far yet
        until_s = time.monotonic() + 15  # by itself it would take twice as long
        while time.monotonic() < until_s:
            with suppress(grpc.aio.AioRpcError):
                assert await infer(REQUEST)
                break
        else:
            raise AssertionError("its place is not given back")
        writer.close()

    play(scene, free_port)


def frame(kind: int, flags: int, content: bytes, stream: int = 1) -> bytes:
    """Of HTTP/2."""
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def literal(name: str, value: str) -> bytes:
    """A header as HPACK writes it in full."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def headers(path: str) -> bytes:
    told = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    told |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(literal(*each) for each in told.items())


def test_what_a_call_waited_counts_whatever_its_client_says(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    seen: list[Any] = []
    visit = Service.visit

    def noted(self: Service, *args: Any) -> Any:
        seen.append(args)
        return visit(self, *args)

    monkeypatch.setattr(Service, "visit", noted)
    told = ((STARTED.decode(), "t=1"), (TIMEOUT, "1H"))

    async def scene(channel: grpc.aio.Channel, service: Service) -> None:
        assert await channel.unary_unary(INFER)(REQUEST, metadata=told, timeout=7.0)
        assert await channel.unary_unary(INFER)(REQUEST, metadata=told)

    play(scene, free_port)
    (*_, headers, _, left_s), (*_, unlimited_s) = seen
    assert 0 < waited_s_by(headers[STARTED]) < 7
    assert 0 < left_s < 8, "gRPC rounds up what it tells; the client said an hour"
    assert unlimited_s is None


def test_the_time_in_haproxy_is_taken_from_what_the_client_waits() -> None:
    class Context:
        def invocation_metadata(self) -> list[tuple[str, str]]:
            return [(STARTED.decode(), f"t={int(1e6 * (time.time() - 40))}"), (TIMEOUT, "50S")]

        def time_remaining(self) -> float:
            return 49.9

    assert 5 < (rpc._call(Context()).left_s or 0) <= 10


def test_what_was_admitted_is_answered_though_the_server_ends(held: threading.Event, free_port: int) -> None:
    async def act() -> Any:
        service = toy(free_port)
        await service.open()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
            async with serving(service):
                call = channel.unary_unary(INFER)(REQUEST)
                await until(lambda: service.burden().inside)
                threading.Timer(0.3, held.set).start()
            assert await call
        await service.close()

    asyncio.run(act())


def test_haproxy_is_told_the_limit_and_told_it_again(free_port: int) -> None:
    """One that was started again, because it was killed, knows nothing of what the one before it was told."""
    refused = iter(range(0, 10_000_000, 100))

    async def act(it: GrpcProxy) -> None:
        await until(lambda: places(it) < MOST)
        assert it._process
        first = it._process
        first.kill()
        await until(lambda: it._process is not first and it._listens())
        await until(lambda: places(it) < MOST)
        assert "is started again" not in str(it._said())

    with proxy(free_port, lambda: Burden(10, next(refused), 0)) as it:
        asyncio.run(act(it))


def places(it: GrpcProxy) -> int:
    """As many inferences as the front may have at once."""
    head, *rows = (line.split(",") for line in said(it._orders, "show stat").splitlines() if line)
    (row,) = (row for row in rows if row[:2] == grpc_proxy._SERVERS[0].split("/"))
    return int(row[head.index("slim")])


def test_where_there_is_no_front_it_is_said_so(free_port: int) -> None:
    async def act() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
            for method in ("ModelInfer", "ServerLive"):
                refused = await refusal(channel.unary_unary(f"/{SERVICE}/{method}")(REQUEST))
                assert (refused.code().name, refused.details()) == ("UNAVAILABLE", grpc_proxy._GONE)

    with proxy(free_port):
        asyncio.run(act())


def test_a_call_that_does_not_come_is_told_so_and_not_that_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setattr(grpc_proxy, "REQUEST_S", 1)

    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(20)
        yield REQUEST

    async def act() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
            refused = await refusal(channel.stream_unary(INFER)(never()))
            assert (refused.code().name, refused.details()) == ("DEADLINE_EXCEEDED", grpc_proxy._SAYS[408][1])

    with proxy(free_port):
        asyncio.run(act())


def test_the_port_is_free_at_once_and_shared_meanwhile(free_port: int) -> None:
    with proxy(free_port), proxy(free_port) as second:
        folder = second._folder
    assert not folder.exists()
    with proxy(free_port):
        pass


FRONT = """
import sys, time
from deployments.front.grpc_proxy import GrpcProxy
from deployments.front.proxy import Burden
from deployments.ray_settings import haproxy_program
it = GrpcProxy(haproxy_program(), "127.0.0.1", int(sys.argv[1]), 1.0, lambda: Burden(0, 0, 0))
it.open()
print(it._process.pid, flush=True)
time.sleep(60)
"""


def test_it_does_not_outlive_a_front_that_is_killed(free_port: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FRONT, str(free_port)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front:
        assert front.stdout
        child = int(front.stdout.readline())
        assert lives(child)
        front.send_signal(signal.SIGKILL)
    asyncio.run(until(lambda: not lives(child)))


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
