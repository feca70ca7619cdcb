"""Long texts are read beside the event loop, one request at a time and in time, so that the front goes on meanwhile."""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import wait
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from isobatch.deployments.config import AppConfig
from isobatch.deployments.front import bodies
from isobatch.deployments.front.answers import Answer, RefusedError
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.incoming import Content, IncomingRequest
from isobatch.deployments.front.load import LongWork
from isobatch.deployments.front.protocols.tei import MOST_CHARACTERS
from isobatch.deployments.front.service import LONG_BYTES, Service
from isobatch.deployments.models.loading import read_encoder
from tests.helpers.clock import Clock
from tests.helpers.command_lines import material
from tests.helpers.documented import served, while_busy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return material(tmp_path_factory.mktemp("long")) / "my-bert"


@asynccontextmanager
async def opened(folder: Path, clock: Any = time.perf_counter, *drivers: list[Driver]) -> AsyncIterator[Service]:
    service = Service(AppConfig(model=str(folder), slo_ms=60_000), clock, None, *[each.append for each in drivers])
    await service.open()
    yield service
    await service.close()


async def test_only_large_requests_are_read_beside_the_event_loop(folder: Path) -> None:
    here = threading.get_ident()
    async with opened(folder) as service:

        async def beside(size: int, grown: int = 0) -> bool:
            threads = list[int]()

            def read() -> Content[list[Answer]]:
                threads.append(threading.get_ident())
                return Content(service.packed(["a good film"]), list)

            assert len(await service.answer(service.register("predict", size, {}), read, grown)) == 1
            return threads != [here]

        assert [await beside(LONG_BYTES - 1), await beside(LONG_BYTES)] == [False, True]
        assert await beside(0, LONG_BYTES), "a size that is known late"


@pytest.mark.parametrize("path", ["/predict", "/v2/models/my-bert/infer", "/classify", "/tokenize"])
def test_compressed_bodies_are_decompressed_in_their_turn_beside_the_event_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A thousand of them that wait would take gigabytes."""
    unpacking, unpack = list[bool](), bodies.decompressed

    def noted(body: bytes, most: int) -> bytes:
        unpacking.append(threading.current_thread().name.startswith("long-work"))
        return unpack(body, most)

    monkeypatch.setattr(bodies, "decompressed", noted)
    text = "a good film"
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": [1], "data": [text]}
    body = {"/classify": {"input": text}}.get(path, {"inputs": [tensor] if "infer" in path else text})
    content, headers = gzip.compress(json.dumps(body).encode()), {"Content-Encoding": "gzip"}
    with while_busy(folder) as (client, end, threads):
        waiting = threads.submit(client.post, path, content=content, headers=headers)
        assert not wait([waiting], timeout=0.2).done
        assert unpacking == []
        end.set()
        assert waiting.result().status_code == 200, waiting.result().text
    assert unpacking == [True]


def test_small_requests_and_others_are_answered_while_long_ones_wait(folder: Path) -> None:
    with while_busy(folder) as (client, end, threads):
        waiting = [
            threads.submit(client.post, "/predict", json={"inputs": "a good film " * LONG_BYTES}),
            threads.submit(client.post, "/tokenize", json={"inputs": "a good film"}),
        ]
        assert client.post("/predict", json={"inputs": "a good film"}).status_code == 200
        assert client.get("/info").status_code == 200
        assert not wait(waiting, timeout=0.2).done
        end.set()
        assert [each.result().status_code for each in waiting] == [200, 200]


def test_tokenize_is_refused_if_its_client_has_gone_before_its_turn(folder: Path) -> None:
    with while_busy(folder) as (client, end, threads):
        body, headers = {"inputs": "a good film"}, {"X-Deadline-Ms": "50"}
        waiting = threads.submit(client.post, "/tokenize", json=body, headers=headers)
        assert not wait([waiting], timeout=0.2).done
        end.set()
        reply = waiting.result()
        assert (reply.status_code, reply.json()["error_type"]) == (429, "overloaded")
        assert client.post("/tokenize", json=body).status_code == 200


async def test_long_work_that_waited_until_too_late_is_not_done() -> None:
    work, end, took_s = LongWork(1, clock := Clock(100.0)), threading.Event(), list[float]()
    first = asyncio.create_task(work.run(end.wait, 0.0, learn=took_s.append))
    await asyncio.sleep(0)
    late = asyncio.create_task(work.run(lambda: pytest.fail("it was done"), clock.now_s + 1.0))
    early = asyncio.create_task(work.run(lambda: "done", clock.now_s + 3.0))
    await asyncio.sleep(0)
    clock.now_s += 2.0
    end.set()
    assert await first, "what waits for nothing is done in any case"
    with pytest.raises(RefusedError) as refused:
        await late
    assert (refused.value.status, refused.value.retry_after_s, await early, took_s) == (503, 1.0, "done", [2.0])


async def test_what_comes_too_late_for_its_thread_counts_as_refused_and_what_would_is_refused_at_once(
    folder: Path,
) -> None:
    async with opened(folder, clock := Clock(100.0), drivers := list[Driver]()) as service:

        def asked(within_ms: int, size: int = LONG_BYTES) -> IncomingRequest:
            return service.register("predict", size, {b"x-deadline-ms": b"%d" % within_ms})

        def read() -> Content[list[Answer]]:
            clock.now_s += 2.0
            return Content(service.packed(["a good film"]), list)

        end = threading.Event()
        blocking = asyncio.create_task(service.long_work.run(end.wait))
        await asyncio.sleep(0)
        late, early = [asyncio.create_task(service.answer(asked(each), read)) for each in (1_000, 50_000)]
        await asyncio.sleep(0)
        clock.now_s += 1.5
        end.set()
        with pytest.raises(RefusedError, match="deadline cannot be met"):
            await late
        assert (len(await early), drivers[0].counts.arrivals) == (1, 2)
        end.clear()
        await blocking
        blocking = asyncio.create_task(service.long_work.run(end.wait))
        await asyncio.sleep(0)
        asked(1_000, 100)
        asked(5_000)
        with pytest.raises(RefusedError):
            asked(1_000)
        end.set()
        await blocking
        asked(1_000)


async def test_a_thread_keeps_its_turn_until_its_work_is_done_though_its_client_has_gone() -> None:
    work, begun, end = LongWork(1, time.perf_counter), threading.Event(), threading.Event()
    running = asyncio.create_task(work.run(lambda: begun.set() or end.wait(), expected_s=2.0))  # type: ignore[func-returns-value]
    await asyncio.to_thread(begun.wait)
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0.01)
        assert (work.busy, work.ahead_s) == (True, 2.0)
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (work.busy, work.ahead_s) == (False, 0.0)
    work.close()


def test_each_thread_has_a_tokenizer_of_its_own(folder: Path) -> None:
    """A call sets how texts are cut, also for a call that another thread has just begun."""
    tokenizer, lengths = read_encoder(folder).tokenizer, list[int]()  # type: ignore[attr-defined]
    tokenizer("good", truncation=True, max_length=5)

    def uncut() -> None:
        lengths.append(len(tokenizer("good " * 9)["input_ids"]))

    thread = threading.Thread(target=uncut)
    thread.start()
    thread.join()
    assert (lengths, tokenizer.backend_tokenizer.truncation["max_length"]) == ([11], 5)


def test_tokenize_refuses_too_many_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.deployments.front.protocols.tei.MOST_TOKENIZED", 10)
    with served(model=str(folder)) as client:
        reply = client.post("/tokenize", json={"inputs": ["good film"] * 2})
        assert [len(each) for each in reply.json()] == [4, 4]
        reply = client.post("/tokenize", json={"inputs": ["good film"] * 9})
    sentence = "the texts have 12 tokens or more: 10 are allowed"
    assert (reply.status_code, reply.json()["error"]) == (413, sentence)


def test_tokenize_waits_no_longer_than_the_slo_whatever_its_client_says(folder: Path) -> None:
    service = Service(AppConfig(model=str(folder), slo_ms=500), Clock(100.0))
    sent = {}, {b"x-deadline-ms": b"50"}, {b"x-deadline-ms": b"86400000"}
    assert [service.gives_up_s(headers) for headers in sent] == pytest.approx([100.5, 100.05, 100.5])


def test_tokenize_refuses_too_many_characters(folder: Path) -> None:
    texts: dict[str, Any] = {"inputs": ["good " * 300] * (MOST_CHARACTERS // 1500 + 1)}
    with served(model=str(folder), max_inputs=1000) as client:
        reply = client.post("/tokenize", json=texts)
        assert (reply.status_code, "characters together: 1048576 are allowed" in reply.text) == (413, True), reply.text
