"""Long texts are read beside the event loop, one request at a time, so that the front goes on meanwhile."""

import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.answers import Answer
from isobatch.deployments.front.http import create_api
from isobatch.deployments.front.protocols.tei import MOST_TOKENIZED
from isobatch.deployments.front.service import LONG_BYTES, Content, Service
from isobatch.deployments.models.loading import read_encoder
from tests.helpers.command_lines import material
from tests.helpers.documented import served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return material(tmp_path_factory.mktemp("long")) / "my-bert"


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Service]:
    service = Service(AppConfig(model=str(folder), slo_ms=60_000), time.perf_counter)
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


def test_small_requests_and_others_are_answered_while_long_ones_wait(folder: Path) -> None:
    service, end = Service(AppConfig(model=str(folder), slo_ms=60_000), time.perf_counter), threading.Event()
    with TestClient(create_api(service)) as client, ThreadPoolExecutor(2) as threads:
        assert client.portal
        client.portal.start_task_soon(service.long_work.run, end.wait)
        try:
            waiting = [
                threads.submit(client.post, "/predict", json={"inputs": "a good film " * LONG_BYTES}),
                threads.submit(client.post, "/tokenize", json={"inputs": "a good film"}),
            ]
            assert client.post("/predict", json={"inputs": "a good film"}).status_code == 200
            assert client.get("/info").status_code == 200
            assert not wait(waiting, timeout=0.2).done
        finally:
            end.set()
        assert [each.result().status_code for each in waiting] == [200, 200]


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


def test_tokenize_refuses_too_many_characters(folder: Path) -> None:
    texts: dict[str, Any] = {"inputs": ["good " * 300] * (MOST_TOKENIZED // 1500 + 1)}
    with served(model=str(folder), max_inputs=1000) as client:
        reply = client.post("/tokenize", json=texts)
        assert (reply.status_code, "characters together: 1048576 are allowed" in reply.text) == (413, True), reply.text
