"""Streams behind the HAProxy before a front's gRPC: they take no places of calls, and are read as fast as answered."""

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest

from isobatch.deployments.front import bodies, grpc_proxy
from isobatch.deployments.front.headers import CLIENT
from isobatch.deployments.front.open_inference import rpc
from isobatch.deployments.front.open_inference.messages import SERVICE
from isobatch.deployments.front.open_inference.rpc import Places
from isobatch.deployments.front.proxy import ProxyLimit
from tests.helpers.asking import until
from tests.helpers.grpc_proxy import INFER, REQUEST, STREAM, everything, frame, front_at, headers, refusal


async def flooded(channel: grpc.aio.Channel, count: int, requests: int, **options: Any) -> list[list[Any]]:
    """The replies to so many streams, each with so many requests and their end."""
    streams = [channel.stream_stream(STREAM)(**options) for _ in range(count)]
    for each in streams:
        for _ in range(requests):
            await each.write(REQUEST)
        await each.done_writing()
    return await asyncio.gather(*map(everything, streams))


async def test_streams_and_questions_take_no_calls_places(
    one_place: None, held: threading.Event, free_port: int
) -> None:
    async with front_at(free_port) as (channel, service):
        stream = channel.stream_stream(STREAM)
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


async def test_a_flood_of_streams_waits(monkeypatch: pytest.MonkeyPatch, held: threading.Event, free_port: int) -> None:
    """Who floods waits: the front has no more of them than places, refuses nobody, and answers all in the end."""
    monkeypatch.setattr(grpc_proxy, "MOST", 4)
    monkeypatch.setattr(ProxyLimit, "_send", lambda *_: None)
    monkeypatch.setattr(ProxyLimit, "value", 4)
    async with front_at(free_port) as (channel, service):
        replies = asyncio.create_task(flooded(channel, 3, 20))
        await until(lambda: service.burden().inside == 4)
        await asyncio.sleep(0.2)
        assert service.burden().inside == 4
        held.set()
        assert [len(each) for each in await replies] == [20, 20, 20]
        assert service.burden().strained == 0


async def test_no_request_of_a_stream_outlives_its_client(
    monkeypatch: pytest.MonkeyPatch, held: threading.Event, free_port: int
) -> None:
    monkeypatch.setattr(rpc, "MOST_RUNNING", 1)
    async with front_at(free_port) as (channel, service):
        stream = channel.stream_stream(STREAM)(metadata=(("x-deadline-ms", "600000"),))
        for _ in range(3):
            await stream.write(REQUEST)
        await until(lambda: service.burden().inside == 3)
        stream.cancel()
        await until(lambda: service.burden().inside == 0)


async def test_streams_are_refused_no_faster_than_answered(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setattr(ProxyLimit, "value", 4)
    async with front_at(free_port) as (channel, _):
        began_s = time.monotonic()
        replies = await flooded(channel, 2, 16, metadata=(("x-deadline-ms", "0.001"),))
        assert [len(each) for each in replies] == [16, 16]
        assert time.monotonic() - began_s > 32 / 4 * rpc.PUSH_BACK_S


async def test_a_stream_in_which_nothing_is_sent_ends(
    monkeypatch: pytest.MonkeyPatch, held: threading.Event, free_port: int
) -> None:
    monkeypatch.setattr(grpc_proxy, "IDLE_S", 1)
    async with front_at(free_port) as (channel, _):
        unanswered = channel.stream_stream(STREAM)()
        await unanswered.write(REQUEST)
        refused = await refusal(everything(unanswered))
        assert "or nothing was sent for 300 seconds" in (refused.details() or "")
        held.set()
        answered = channel.stream_stream(STREAM)()
        await answered.write(REQUEST)
        assert await answered.read()
        assert (await refusal(answered.read())).code().name == "CANCELLED"


async def test_no_address_holds_all_streams(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setattr(grpc_proxy, "STREAMS_OF_ONE_ADDRESS", 2)
    async with front_at(free_port) as (channel, _):
        open_one = channel.stream_stream(STREAM)
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


@pytest.mark.parametrize(
    ("proxies", "clients"), [("", [b"127.0.0.1"] * 2), ("127.0.0.0/8", [b"127.0.0.1", b"10.0.0.8"])]
)
async def test_streams_are_told_apart_by_clients_addresses(
    monkeypatch: pytest.MonkeyPatch, free_port: int, proxies: str, clients: list[bytes]
) -> None:
    """Whatever they say of themselves, unless a proxy says it that is trusted."""
    monkeypatch.setenv("ISOBATCH_TRUSTED_PROXIES", proxies)
    seen: list[bytes] = []
    take = Places.take

    async def noted(self: Places, client: bytes) -> None:
        seen.append(client)
        await take(self, client)

    monkeypatch.setattr(Places, "take", noted)

    async with front_at(free_port) as (channel, _):
        for metadata in ((), ((CLIENT.decode(), "10.0.0.7"), ("x-forwarded-for", "10.0.0.8"))):
            call = channel.stream_stream(STREAM)(iter([REQUEST]), metadata=metadata)
            assert len(await everything(call)) == 1
    assert seen == clients


async def test_a_stream_with_an_unfinished_message_ends_after_what_came_before(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setattr(bodies, "READ_WITHIN_S", 0.3)
    whole = bytes(1) + len(REQUEST).to_bytes(4, "big") + REQUEST
    async with front_at(free_port):
        reader, writer = await asyncio.open_connection("127.0.0.1", free_port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b"", 0) + frame(1, 4, headers(STREAM)))
        writer.write(frame(0, 0, whole + whole[:-1]))
        came = b""
        while b"did not arrive" not in came:
            came += (part := await reader.read(65_536))
            assert part
        assert b"label" in came, "the first request was answered"
        writer.close()
