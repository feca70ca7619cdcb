"""The load generator against a small server: open loop, with latency counted from when a request was due."""

import asyncio
import gc
import json
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from experiments.replan.timeline import PersistentLoad
from isobatch.cluster.load.generator import BROKEN, LoadGenerator, LoadRecord, run_noting_polls
from isobatch.cluster.load.report import Summary, summary, write
from isobatch.profiles.errors import UserError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Found = TypeVar("Found")
Answer = Callable[[int], tuple[float, bytes]]  # request number -> (seconds it takes, reply)


def measured(answer: Answer, ask: Callable[[str], Awaitable[Found]]) -> Found:
    """The result of `ask` at a server with these answers, which handles one request at a time on each connection."""
    count = iter(range(10_000))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (await reader.readline()).startswith(b"POST"):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            pause_s, reply = answer(next(count))
            await asyncio.sleep(pause_s)
            if not reply:
                break
            writer.write(reply)
            if b"Connection: close" in reply:
                await reader.read()  # nobody reads what else is asked here
        writer.close()

    async def run() -> Found:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await ask(f"http://127.0.0.1:{port}/predict")
        finally:
            server.close()

    return run_noting_polls(run())


def test_every_request_is_sent_when_it_is_due() -> None:
    """At least as soon as this process gets a processor."""
    due_s = np.arange(40) / 200

    async def late_s() -> list[float]:
        began_s = asyncio.get_running_loop().time()

        async def one(when_s: float) -> float:
            await asyncio.sleep(when_s)
            return asyncio.get_running_loop().time() - began_s - when_s

        return await asyncio.gather(*map(one, due_s))

    async def ask(url: str) -> tuple[LoadRecord, list[float]]:
        return await asyncio.gather(LoadGenerator(url, [b"{}"]).at(due_s), late_s())

    record, at_best_s = measured(lambda _: (0.0, OK), ask)
    assert (record.status == 200).all()
    assert (record.sent_s >= due_s).all()
    assert np.median(record.sent_s - due_s) < 0.02 + np.median(at_best_s)


def test_requests_that_wait_for_a_connection_are_not_lost_while_others_are_answered() -> None:
    """Five requests at once over one connection, with more patience than one takes and less than all of them."""
    report = measured(lambda n: (0.3, OK), lambda url: LoadGenerator(url, [b"{}"], 1).at(np.zeros(5), patience_s=1.2))
    assert report.status.tolist() == [200] * 5


def test_a_request_without_an_answer_is_lost_some_time_after_the_last_answer() -> None:
    def ask(url: str) -> Awaitable[LoadRecord]:
        return LoadGenerator(url, [b"{}"], 2).at(np.zeros(3), patience_s=1.0)

    record = measured(lambda n: (0.1 if n == 1 else 3600.0, OK), ask)
    assert sorted(record.status.tolist()) == [BROKEN, BROKEN, 200]


def test_a_server_that_stalls_does_not_lighten_its_load() -> None:
    """One connection, and a first answer after 0.3 s: all requests that were due meanwhile count their wait."""
    due_s = np.arange(20) / 100
    record = measured(lambda n: (0.3 if n == 0 else 0.0, OK), lambda url: LoadGenerator(url, [b"{}"], 1).at(due_s))
    result = summary(record, slo_ms=100)
    assert result.outcomes == {"answered": 20}
    assert result.latency_ms["p50"] > 150
    assert result.good_share < 0.5


def test_a_slow_server_is_told_from_a_slow_generator() -> None:
    record = measured(lambda _: (0.15, OK), lambda url: LoadGenerator(url, [b"{}"]).at(np.arange(20) / 40))
    result = summary(record, slo_ms=100).lateness
    assert result.late == 20
    assert result.server_share > 0.5
    assert result.server_ms["p50"] > 145
    assert result.generator_ms["p50"] < result.server_ms["p50"]

    def answer(number: int) -> tuple[float, bytes]:
        """Of the first: for 0.5 s, in which all others are due, the generator's process does something else."""
        if number == 0:
            time.sleep(0.5)
        return 0.0, OK

    record = measured(answer, lambda url: LoadGenerator(url, [b"{}"]).at(np.arange(20) / 100))
    result = summary(record, slo_ms=100).lateness
    assert result.generator_share > 0.5
    assert result.late_by_generator >= 10
    assert result.warning.startswith("WARNING: the generator itself was late")


def test_outcomes_are_distinguished_and_refusals_keep_their_reason() -> None:
    refused = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 5\r\n\r\nwhy: "
    chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    replies, sources = [OK, refused, chunks, b""], list[LoadGenerator]()

    def ask(url: str) -> Awaitable[LoadRecord]:
        sources.append(LoadGenerator(url, [b"{}"], 1))
        return sources[-1].at(np.arange(4) / 20)

    record = measured(lambda n: (0.0, replies[n]), ask)
    assert record.status.tolist() == [200, 503, 200, BROKEN]
    assert sources[0].errors[503] == b"why: "
    assert summary(record, 100).outcomes == {"answered": 2, "refused": 1, "unanswered": 1}
    assert summary(measured(lambda n: (0.0, refused), ask), 100).latency_ms == {}


def test_a_request_whose_connection_broke_is_sent_again_over_a_new_one() -> None:
    replies = [b"", b"", OK]

    async def ask(url: str) -> tuple[LoadRecord, set[int]]:
        load = PersistentLoad(url, [b"{}"], "", lambda body, answer: True, again_s=5.0)
        return await load.at(np.zeros(1)), load.resent

    record, resent = measured(lambda n: (0.0, replies[n]), ask)
    assert (record.status.tolist(), resent) == ([200], {0})


def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    last = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    record = measured(lambda _: (0.0, last), lambda url: LoadGenerator(url, [b"{}"], 1).at(np.arange(5) / 50))
    assert record.status.tolist() == [200] * 5


def test_clients_send_the_next_request_when_they_are_answered() -> None:
    """And not before: four at once, and whoever is answered asks again without a pause."""
    record = measured(lambda _: (0.02, OK), lambda url: LoadGenerator(url, [b"{}"], 4).by_clients(4, 0.4))
    assert (record.status == 200).all()
    assert len(record.status) > 4
    pauses_s = record.due_s[4:] - np.sort(record.ended_s)[:-4]
    assert min(pauses_s) >= 0.0
    assert np.median(pauses_s) < 0.005, "four times less than an answer takes"


def test_clients_go_on_once_a_server_that_was_away_is_back() -> None:
    """It ends at the first request, and listens again on the same port 0.3 s later."""
    servers = list[asyncio.Task[asyncio.Server]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(OK)
        writer.close()

    async def run() -> LoadRecord:
        loop = asyncio.get_running_loop()

        async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1000)
            first.close()
            writer.close()
            back = asyncio.start_server(answer, "127.0.0.1", port)
            loop.call_later(0.3, lambda: servers.append(asyncio.ensure_future(back)))

        first = await asyncio.start_server(end, "127.0.0.1", 0)
        port = first.sockets[0].getsockname()[1]
        return await LoadGenerator(f"http://127.0.0.1:{port}", [b"{}"], 1).by_clients(1, 1.5)

    statuses = asyncio.run(run()).status.tolist()
    assert statuses[0] == BROKEN
    assert set(statuses[1:]) == {200}


def record(due_s: list[float], took_s: float, status: int | list[int] = 200, *duration_s: float) -> LoadRecord:
    times = np.array(due_s)
    return LoadRecord(times, times, times, times + took_s, np.broadcast_to(status, len(times)), times, *duration_s)


def test_rates_are_per_second_of_the_load() -> None:
    def asked(due_s: list[float], took_s: float, duration_s: float) -> Summary:
        return summary(record(due_s, took_s, 200, duration_s), 100)

    slow = asked([0.0], 6.0, duration_s=5.0)
    assert (slow.seconds, slow.offered_per_s, slow.answered_per_s, slow.goodput_per_s) == (5.0, 0.2, 0.0, 0.0)
    assert asked([0.0, 1.0], 0.01, duration_s=4.0).goodput_per_s == 0.5
    assert asked([0.0, 8.0], 0.01, duration_s=4.0).seconds == 8.0


def test_texts_of_known_lengths_are_counted_in_tokens_too() -> None:
    recorded = record([0.0, 1.0, 2.0, 3.0], 0.01, [200, 200, 503, 200])
    result = summary(recorded, 100, tokens=(10, 40))
    assert (result.offered_tokens_per_s, result.good_tokens_per_s) == (100 / 3, 90 / 3)
    assert summary(recorded, 100).offered_tokens_per_s is None


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    """The one before is replaced, not written over: what is half written is never at its place."""
    path, before = tmp_path / "report.json", tmp_path / "before.json"
    path.write_text("before")
    before.hardlink_to(path)
    write(summary(record([0.0], 1.0), 100), path)
    assert before.read_text() == "before"
    assert json.loads(path.read_text())["requests"] == 1


def test_connections_may_be_more_files_than_the_soft_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # so that no file of another test closes meanwhile
    before, opened = (
        resource.getrlimit(resource.RLIMIT_NOFILE),
        {int(path.name) for path in Path("/proc/self/fd").iterdir()},
    )
    few = [number for number in range(len(opened) + 20) if number not in opened][19] + 1  # 20 numbers below it are free
    with socket.create_server(("127.0.0.1", 0), backlog=99) as server:
        load, none = LoadGenerator(f"http://127.0.0.1:{server.getsockname()[1]}", [b""]), np.array([])
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
            with monkeypatch.context() as limited:
                limited.setattr(resource, "setrlimit", lambda *_: None)
                with pytest.raises(
                    UserError, match=r"32 connections are more files than .* raise the limit \(ulimit -n"
                ):
                    asyncio.run(load.at(none))
            asyncio.run(load.at(none))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
