"""The HAProxy before a front's gRPC server: the calls that it refuses, those that it lets through, and its life."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from isobatch.deployments.front import bodies, grpc_proxy
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.calls import Call, CallConnection, Method
from isobatch.deployments.front.grpc_proxy import GrpcProxy
from isobatch.deployments.front.headers import SENT, STARTED, sent_s_by, waited_s_by
from isobatch.deployments.front.open_inference.messages import SERVICE, message
from isobatch.deployments.front.open_inference.rpc import serving
from isobatch.deployments.front.proxy import MOST, RETRY_S, Burden, haproxy_reply
from isobatch.deployments.front.service import Service
from tests.helpers.asking import until
from tests.helpers.grpc_proxy import (
    INFER,
    LIVE,
    REQUEST,
    STATISTICS,
    STREAM,
    frame,
    front_at,
    headers,
    proxy,
    refusal,
    toy,
)


async def test_calls_beyond_the_limit_get_a_grpc_status(one_place: None, held: threading.Event, free_port: int) -> None:
    """Within milliseconds, with a time to come back that differs from one to the next."""

    async with front_at(free_port) as (channel, service):
        infer = channel.unary_unary(INFER)
        admitted = asyncio.ensure_future(infer(REQUEST))
        await until(lambda: service.burden().inside)
        result, took_s = set[str | bytes](), []
        for _ in range(20):
            began_s = time.perf_counter()
            refused = await refusal(infer(REQUEST))
            took_s.append(time.perf_counter() - began_s)
            assert (refused.code().name, refused.details()) == ("UNAVAILABLE", grpc_proxy._CROWDED)
            result.add(dict(refused.trailing_metadata() or refused.initial_metadata())["grpc-retry-pushback-ms"])
        assert min(took_s) < 0.2
        assert len(result) > 1, "not all come back at once"
        assert all(1000 <= int(each) <= 1000 * RETRY_S for each in result)
        assert service.burden().inside == 1, "it has seen none of them"
        while (seen := (await service.stats())["requests"]["refused"]) < 20:
            await asyncio.sleep(0.02)
        assert seen == 20, "but it counts them"
        held.set()
        assert await admitted


async def test_one_address_is_limited(held: threading.Event, monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setattr(grpc_proxy, "CALLS_OF_ONE_ADDRESS", 2)

    async with front_at(free_port) as (channel, service):
        infer = channel.unary_unary(INFER)
        admitted = [asyncio.ensure_future(infer(REQUEST)) for _ in range(2)]
        await until(lambda: service.burden().inside == 2)
        assert (await refusal(infer(REQUEST))).code().name == "UNAVAILABLE"
        held.set()
        assert all(await asyncio.gather(*admitted))
        assert await infer(REQUEST)


async def test_health_checks_are_answered_beside_partial_calls(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    """The front answers one question at once, and a call takes no place before all of it is here."""
    monkeypatch.setattr(grpc_proxy, "QUESTIONS_AT_ONCE", 1)
    answered, calls = asyncio.Event(), list[str]()
    all_fronts = Service.all_fronts

    async def slow(self: Service) -> Any:
        calls.append("statistics")
        await answered.wait()
        return await all_fronts(self)

    async def noted(_: Service) -> list[str]:
        calls.append("ready")
        return []

    monkeypatch.setattr(Service, "all_fronts", slow)
    monkeypatch.setattr(Service, "missing", noted)

    async with front_at(free_port) as (channel, _):
        _, writer = await asyncio.open_connection("127.0.0.1", free_port)
        half = [frame(1, 4, headers(LIVE), stream) for stream in (1, 3, 5)]
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b"", 0) + b"".join(half))
        await writer.drain()
        statistics = [asyncio.ensure_future(channel.unary_unary(STATISTICS)(b"")) for _ in range(3)]
        await until(lambda: calls)
        ready = asyncio.ensure_future(channel.unary_unary(f"/{SERVICE}/ServerReady")(b""))
        await asyncio.wait([ready, *statistics], timeout=0.2)
        assert calls == ["statistics"], "the others wait in HAProxy"
        answered.set()
        assert await ready
        await asyncio.gather(*statistics)
        assert calls.index("ready") == 1
        too_long = await refusal(channel.unary_unary(STATISTICS)(bytes(grpc_proxy.QUESTION_BYTES + 100)))
        assert too_long.code().name == "RESOURCE_EXHAUSTED"
        writer.close()


async def test_a_call_that_its_client_cancels_ends_in_the_front(held: threading.Event, free_port: int) -> None:
    async with front_at(free_port) as (channel, service):
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
        await stream.write(REQUEST)
        inferred = channel.unary_unary(INFER)(REQUEST)
        await until(lambda: service.burden().inside == 2)
        stream.cancel()
        inferred.cancel()
        await until(lambda: service.burden().inside == 0)
        assert (await service.stats())["requests"]["abandoned"] == 2


async def test_an_unfinished_call_has_no_place(
    one_place: None, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """It has a place in the front as soon as more of it is here than HAProxy can hold."""
    monkeypatch.setattr(bodies, "READ_WITHIN_S", 0.3)
    never = bytes([0]) + (10**6).to_bytes(4, "big") + bytes(100_000)
    long = message("ModelInferRequest")(model_name="toy", id="x" * 100_000).SerializeToString()

    async with front_at(free_port) as (channel, _):
        _, writer = await asyncio.open_connection("127.0.0.1", free_port)
        frames = [(1, 4, headers(INFER)), *((0, 0, never[at : at + 16_000]) for at in range(0, len(never), 16_000))]
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b"", 0))
        writer.write(frame(8, 0, (10**6).to_bytes(4, "big"), 0) + b"".join(frame(*each) for each in frames))
        infer = channel.unary_unary(INFER)

        async def is_let_in() -> bool:
            """Whether a long call comes to the front, which refuses its id."""
            return (await refusal(infer(long))).code() is grpc.StatusCode.INVALID_ARGUMENT

        while await is_let_in():
            pass  # the other one has not come that far yet
        assert await infer(REQUEST), "short calls have places of their own"
        until_s = time.monotonic() + 15  # by itself it would take twice as long
        while not await is_let_in():
            assert time.monotonic() < until_s, "its place is not given back"
        writer.close()


async def test_a_calls_wait_counts_whatever_header_it_sends(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    seen: list[Any] = []
    register = Service.register

    def noted(self: Service, *args: Any, **options: Any) -> Any:
        seen.append(args)
        return register(self, *args, **options)

    monkeypatch.setattr(Service, "register", noted)
    arguments = ((STARTED.decode(), "t=1"), (SENT.decode(), "9" * 9))

    async with front_at(free_port) as (channel, _):
        assert await channel.unary_unary(INFER)(REQUEST, metadata=arguments, timeout=7.0)
        assert await channel.unary_unary(INFER)(REQUEST, metadata=arguments)
    (*_, headers, left_s), (*_, unlimited_s) = seen
    assert 0 < waited_s_by(headers[STARTED]) < 7
    assert 0 < left_s < 8, "gRPC rounds up what it tells"
    assert unlimited_s is None
    assert 0 <= sent_s_by(headers[SENT]) < 7


async def test_an_incomplete_call_gets_its_own_error(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setattr(grpc_proxy, "REQUEST_S", 1)
    with proxy(free_port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
            refused = await refusal(channel.stream_unary(INFER)(unfinished(b"")))
    assert (refused.code().name, refused.details()) == ("DEADLINE_EXCEEDED", grpc_proxy._ERRORS[408][1])


async def unfinished(begins: bytes) -> AsyncIterator[bytes]:
    if begins:
        yield begins
    await asyncio.sleep(20)
    yield REQUEST


@asynccontextmanager
async def front_that(does: Method, port: int, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to HAProxy, before a front that does this at each call."""
    loop, methods = asyncio.get_running_loop(), dict.fromkeys((INFER, LIVE, STREAM), does)
    with socket.socket(socket.AF_UNIX) as front, proxy(port, front=front, **options):
        await loop.create_unix_server(lambda: CallConnection(methods, None, (), 2**20), sock=front)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(30):
            yield channel


async def test_calls_end_although_the_front_hangs(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    """Streams go on, and an inference whose message has a deadline of its own."""
    monkeypatch.setattr(grpc_proxy, "ANSWERED_S", 1)
    timeout = {"key": "timeout", "value": {"int64_param": 10**9}}
    timed = message("ModelInferRequest")(parameters=[timeout]).SerializeToString()

    async def hang(call: Call) -> bytes:
        await asyncio.sleep(60)
        return b""

    async with front_that(hang, free_port, slo_ms=200) as channel:
        infer, stream = channel.unary_unary(INFER), channel.stream_stream(STREAM)()
        await stream.write(REQUEST)
        waiting = [asyncio.ensure_future(each) for each in (infer(timed), stream.read())]
        ended = [infer(REQUEST), infer(REQUEST, metadata=[("x-deadline-ms", "300")])]
        for call in (*ended, channel.unary_unary(LIVE)(b"")):
            refused = await refusal(call)
            assert (refused.code().name, "not answer in time" in refused.details()) == ("UNAVAILABLE", True)
        assert not any(call.done() for call in waiting)
        stream.cancel()
        for call in waiting:
            call.cancel()


async def test_streams_end_although_the_front_answers_no_check(free_port: int) -> None:
    """By then new ones are refused at once, as other calls are."""
    with socket.socket(socket.AF_UNIX) as front, proxy(free_port, front=front) as haproxy:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel, asyncio.timeout(30):
            stream = channel.stream_stream(STREAM)
            inside = stream()
            await inside.write(REQUEST)
            await refusal(inside.read())
            for call in (stream().read(), channel.unary_unary(INFER)(REQUEST)):
                refused = await refusal(call)
                assert (refused.code().name, "does not answer" in refused.details()) == ("UNAVAILABLE", True)
            await until(lambda: haproxy.limit.refusals.total == 2)


async def test_an_unfinished_call_that_the_front_refuses_learns_when_to_come_back(free_port: int) -> None:
    """The front answers 408, so that HAProxy does not wait for the rest: HAProxy hands on what the answer says."""

    async def refuse(call: Call) -> bytes:
        raise RefusedError(503, "there is no room", retry_after_s=7)

    async with front_that(refuse, free_port) as channel:
        refused = await refusal(channel.stream_unary(INFER)(unfinished(bytes(100_000))))
        assert (refused.code().name, refused.details()) == ("UNAVAILABLE", "there is no room")
        metadata = dict(refused.trailing_metadata() or refused.initial_metadata())
        assert metadata["grpc-retry-pushback-ms"] == "7000"


# Its start, its restart and its end


async def test_admitted_calls_are_answered_when_the_server_ends(held: threading.Event, free_port: int) -> None:
    service = toy(free_port)
    await service.open()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        async with serving(service):
            call = channel.unary_unary(INFER)(REQUEST)
            await until(lambda: service.burden().inside)
            threading.Timer(0.3, held.set).start()
        assert await call
    await service.close()


async def test_haproxy_gets_the_limit_repeatedly(free_port: int) -> None:
    """One that was started again, because it was killed, knows nothing of what the one before it was told."""
    refused = iter(range(0, 10_000_000, 100))
    with proxy(free_port, lambda: Burden(10, next(refused), 0)) as it:
        await until(lambda: places(it) < MOST)
        assert it._process
        first = it._process
        first.kill()
        await until(lambda: it._process is not first and it._listens())
        await until(lambda: places(it) < MOST)
        assert "is started again" not in str(it._error_text())


def places(it: GrpcProxy) -> int:
    """As many inferences as the front may have at once."""
    head, *rows = (line.split(",") for line in haproxy_reply(it._admin, "show stat").splitlines() if line)
    (row,) = (row for row in rows if row[:2] == grpc_proxy._SERVERS[0].split("/"))
    return int(row[head.index("slim")])


async def test_calls_without_a_front_are_refused_with_a_sentence(free_port: int) -> None:
    with proxy(free_port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
            for method in (INFER, LIVE):
                refused = await refusal(channel.unary_unary(method)(REQUEST))
                assert (refused.code().name, refused.details()) == ("UNAVAILABLE", grpc_proxy._GONE)


def test_the_port_is_free_at_once_and_shared_meanwhile(free_port: int) -> None:
    with proxy(free_port), proxy(free_port) as second:
        folder = second._folder
    assert not folder.exists()
    with proxy(free_port):
        pass


FRONT = """
import sys, time
from isobatch.deployments.front.grpc_proxy import GrpcProxy
from isobatch.deployments.front.proxy import Burden
from isobatch.deployments.ray_settings import haproxy_program
it = GrpcProxy(haproxy_program(), "127.0.0.1", int(sys.argv[1]), 1.0, lambda: Burden(0, 0, 0))
it.open()
print(it._process.pid, flush=True)
time.sleep(60)
"""


async def test_it_does_not_outlive_a_front_that_is_killed(free_port: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FRONT, str(free_port)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as front:
        assert front.stdout
        child = int(front.stdout.readline())
        assert lives(child)
        front.send_signal(signal.SIGKILL)
    await until(lambda: not lives(child))


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
