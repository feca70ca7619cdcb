"""A connection from HAProxy on which calls of gRPC come as HTTP/1.1."""

import asyncio
import gc
import socket
import time
import weakref

import pytest

from isobatch.deployments.front.calls import Call, CallConnection, Method
from isobatch.deployments.front.headers import KERNEL
from tests.helpers.asking import until

PATH = "/inference.GRPCInferenceService/ServerLive"
EMPTY = b"5\r\n\0\0\0\0\0\r\n0\r\n"  # one message without a byte


def call_with(*headers: str, trailers: str = "") -> bytes:
    lines = [f"POST {PATH} HTTP/1.1", "host: here", "transfer-encoding: chunked", *headers, "", ""]
    return "\r\n".join(lines).encode() + EMPTY + trailers.encode() + b"\r\n"


async def connected(method: Method) -> socket.socket:
    """The end of HAProxy of a connection on which calls get to this method."""
    ours, haproxy = socket.socketpair()
    haproxy.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(lambda: CallConnection({PATH: method}, None, (), 2**20), ours)
    return haproxy


async def test_a_client_that_goes_after_a_long_message_is_noticed() -> None:
    """A message longer than what is read ahead pauses the connection."""
    read, gone = asyncio.Event(), asyncio.Event()

    async def infer(call: Call) -> bytes:
        await call.request()
        read.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            gone.set()
            raise
        return b""

    haproxy = await connected(infer)
    message = b"\0" + (100_000).to_bytes(4, "big") + bytes(100_000)
    head = call_with().partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    sent = head + b"%x\r\n" % len(message) + message + b"\r\n0\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(haproxy, sent)
    await asyncio.wait_for(read.wait(), 5)
    haproxy.close()
    await asyncio.wait_for(gone.wait(), 5)


async def test_the_time_in_which_a_message_arrives_counts_once() -> None:
    started_s, left_s = time.time(), asyncio.Future[tuple[float | None, float]]()

    async def infer(call: Call) -> bytes:
        await call.request()
        left_s.set_result((call.left_s, 60.0 - (time.time() - started_s)))
        return b""

    haproxy, loop = await connected(infer), asyncio.get_running_loop()
    head, end, message = call_with("grpc-timeout: 60S", f"x-request-start: t={1e6 * started_s:.0f};{KERNEL}").partition(
        b"\r\n\r\n"
    )
    await loop.sock_sendall(haproxy, head + end)
    await asyncio.sleep(0.3)
    await loop.sock_sendall(haproxy, message)
    left, expected = await asyncio.wait_for(left_s, 5)
    assert left == pytest.approx(expected, abs=0.1)
    haproxy.close()


async def test_nothing_remains_of_a_call_that_its_client_cancelled() -> None:
    """Its deadline may be hours away."""
    tasks = list["weakref.ref[asyncio.Task[None]]"]()

    async def infer(call: Call) -> bytes:
        task = asyncio.current_task()
        assert task
        tasks.append(weakref.ref(task))
        await asyncio.sleep(60)
        return b""

    def is_gone() -> bool:
        gc.collect()
        return tasks[0]() is None

    haproxy = await connected(infer)
    await asyncio.get_running_loop().sock_sendall(haproxy, call_with("grpc-timeout: 2H"))
    await until(lambda: tasks)
    haproxy.close()
    await until(is_gone)


async def test_trailers_of_a_client_are_no_metadata_of_this_call_or_of_the_next() -> None:
    seen = list[dict[bytes, bytes]]()

    async def live(call: Call) -> bytes:
        await call.request()
        seen.append(dict(call.headers))
        return b""

    haproxy, loop = await connected(live), asyncio.get_running_loop()
    first = call_with("x-client-address: 10.0.0.1", trailers="x-client-address: 10.0.0.7\r\nx-request-start: 1\r\n")
    for call in (first, call_with("x-client-address: 10.0.0.2")):
        await loop.sock_sendall(haproxy, call)
        answer = b""
        while b"grpc-status: 0" not in answer:
            answer += await asyncio.wait_for(loop.sock_recv(haproxy, 4096), 60)
    haproxy.close()
    assert [headers[b"x-client-address"] for headers in seen] == [b"10.0.0.1", b"10.0.0.2"]
    assert not any(b"x-request-start" in headers for headers in seen)
