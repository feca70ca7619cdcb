"""Hostile requests are refused in one short sentence, before they cost much, and are counted."""

import asyncio
import contextlib
import gc
import gzip
import json
import resource
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from isobatch.deployments.front import bodies
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.open_inference.tensors import JSON_BYTES_HEADER
from isobatch.deployments.front.proxy import allowed_connections
from isobatch.deployments.front.service import Service
from isobatch.deployments.models.encode import MAX_PIXELS, ImageEncoder, TextEncoder
from isobatch.profiles.errors import UserError
from tests.helpers.asking import until
from tests.helpers.documented import DocumentedClient, front
from tests.helpers.toy_model import OVERFLOWS

INFER = "/v2/models/toy/infer"
GOOD: dict[str, Any] = {"name": "inputs", "shape": [2, 2], "datatype": "INT64", "data": [[4, 7], [0, 3]]}
LIMIT = 2**20


@pytest.fixture(scope="module")
def client() -> Iterator[DocumentedClient]:
    with DocumentedClient(front(max_body_bytes=LIMIT), raise_server_exceptions=False) as client:
        yield client


def counts(client: TestClient) -> dict[str, int]:
    return dict(client.get("/stats").json()["requests"])


def refused(client: TestClient, status: int, path: str = INFER, **request: Any) -> str:
    """The one sentence; it is counted, short and quick."""
    before, began_s = counts(client), time.process_time()
    reply = client.post(path, **request)
    assert time.process_time() - began_s < 1
    assert reply.status_code == status, reply.text[:500]
    assert len(reply.content) <= 1024
    assert list(reply.json()) == ["error"]
    assert counts(client) == before | {"refused": before["refused"] + 1}
    return str(reply.json()["error"])


@pytest.mark.parametrize("kind", ["FP32", "BYTES", "BOOL"])
@pytest.mark.parametrize(
    ("shape", "status", "sentence"),
    [
        ([5_000_000, 0], 422, "5000000 inputs in one request: 256 are allowed"),
        ([1, 0], 400, "must hold at least one value"),
        ([2, 10**18], 400, "must hold at least one value"),
        ([10**4000, 1], 422, "inputs in one request"),
        ([1] * 9, 400, "at most 8 items"),
        ([-1, -1], 400, "must be a list of sizes"),
        ([0], 422, "'inputs' is empty"),
        ([], 400, "must be a list of sizes"),
        ([1.5], 400, "valid integer"),
        ("2", 400, "valid list"),
        ([[2]], 400, "valid integer"),
    ],
)
def test_a_false_shape_is_not_trusted(client: TestClient, kind: str, shape: Any, status: int, sentence: str) -> None:
    fields = {"inputs": [GOOD | {"datatype": kind, "shape": shape, "data": []}]}
    assert sentence in refused(client, status, content=json.dumps(fields) if shape != [10**4000, 1] else huge(kind))


def huge(kind: str) -> str:
    return '{{"inputs":[{{"name":"i","datatype":"{}","shape":[{},1],"data":[]}}]}}'.format(kind, "9" * 4000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"outputs": 5},
        {"outputs": [5]},
        {"outputs": ["name"]},
        {"outputs": [{"name": 5}]},
        {"outputs": [{"name": "label"}, {"name": ["x"]}]},
        {"outputs": [{"name": "label", "parameters": [1]}]},
        {"outputs": [{"name": "label"}] * 1000},
        {"parameters": [1]},
        {"parameters": {"binary_data_output": []}},
        {"parameters": {"timeout": "soon"}},
        {"inputs": [GOOD | {"parameters": [1]}]},
        {"inputs": [GOOD | {"parameters": {"binary_data_size": "9"}}]},
        {"inputs": [GOOD | {"name": "x" * 2000}]},
        {"inputs": [GOOD | {"datatype": ["FP32"]}]},
        {"inputs": [GOOD | {"datatype": "x" * 100_000}]},
        {"inputs": [GOOD | {"data": None}]},
        {"inputs": [GOOD | {"data": {"a": 1}}]},
        {"inputs": [GOOD | {"datatype": "BYTES", "data": [[1, 2], [3, 4]]}]},
        {"inputs": [GOOD | {"datatype": "BYTES", "shape": [1, 400], "data": ["x"] * 400}]},
        {"inputs": 5},
        {"id": 5},
        {"id": "x" * 2000},
    ],
)
def test_tensors_of_a_wrong_shape_are_refused(client: TestClient, wrong: dict[str, Any]) -> None:
    refused(client, 400, json={"inputs": [GOOD]} | wrong)


@pytest.mark.parametrize("told", ["9" * 5000, "-1", "1e3", "", "x" * 5000, "99", "0"])
def test_a_false_content_length_is_not_trusted(client: TestClient, told: str) -> None:
    sentence = refused(client, 400, content=b"{}", headers={JSON_BYTES_HEADER: told})
    assert sentence.startswith(f"{JSON_BYTES_HEADER} is '{told[:20]}")
    assert sentence.endswith("': it must be a number from 1 to 2, the bytes of the body that are JSON")


@pytest.mark.parametrize("digits", [12, 19])
async def test_a_large_content_length_is_refused_before_the_body_comes(digits: int) -> None:
    length = b"9" * digits
    with pytest.raises(RefusedError, match=f"the body has {length.decode()} bytes: 100 are allowed"):
        await asyncio.wait_for(bodies.body_of({b"content-length": length}, Network(), 100), 5)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_body_that_is_no_json_is_refused_in_the_v2_protocol_too(client: TestClient, number: str) -> None:
    sentence = refused(client, 400, content=f'{{"id": {number}, "inputs": []}}')
    assert f"before '{number.lstrip('-')}, \"in" in sentence


@pytest.mark.parametrize("body", [b"[1]", b"[", b"[" * 100_000])
def test_garbage_collection_is_on_again_after_any_body(body: bytes) -> None:
    with contextlib.suppress(RefusedError):
        bodies.json_in(body)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("datatype", "data"), [("FP32", [[1.0, 1e39], [0, 0]]), ("FP16", [[1e6, 1], [0, 0]]), ("FP64", [[0, 0], [None, 1]])]
)
def test_an_input_that_is_not_finite_is_refused_with_its_row(client: TestClient, datatype: str, data: Any) -> None:
    sentence = refused(client, 422, json={"inputs": [GOOD | {"datatype": datatype, "data": data}]})
    assert sentence == f"input {int(data[1][0] is None)} holds numbers that are not finite"
    raw = np.array([[1, 2], [np.inf, 0]], datatype.lower().replace("fp", "float")).tobytes()
    about = GOOD | {"datatype": datatype, "data": None, "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [about]}).encode()
    assert "input 1 holds" in refused(client, 422, content=text + raw, headers={JSON_BYTES_HEADER: str(len(text))})


@pytest.mark.parametrize("path", ["/predict", INFER])
def test_an_answer_that_is_not_finite_is_a_refusal_that_names_the_row(client: TestClient, path: str) -> None:
    inputs = [[0, 3], [OVERFLOWS, 3]]
    body = {"inputs": inputs if path == "/predict" else [GOOD | {"data": inputs}]}
    assert refused(client, 422, path, json=body) == "input 1 has no finite answer: its numbers are too large"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", {"inputs": [0, 1], "x" * 500_000: 1}),
        ("/predict", {"inputs": '\\u001b\\u0000\\ud800"' * 30_000}),
        (INFER, {"inputs": [GOOD], "outputs": [{"name": '\\"' * 500}]}),
        (INFER, {"inputs": [GOOD], "outputs": [{"name": "\ud800"}]}),
        ("/v2/models/" + "x" * 5000 + "/infer", {"inputs": [GOOD]}),
        ("/v2/models/toy/versions/" + "9" * 5000 + "/infer", {"inputs": [GOOD]}),
    ],
)
def test_an_error_repeats_only_a_little_of_the_request(client: TestClient, path: str, body: Any) -> None:
    content = json.dumps(body)
    reply = client.post(path, content=content)
    assert reply.status_code in (400, 404, 422)
    assert len(reply.content) <= 1024
    assert reply.json()["error"].isprintable()


def test_every_failure_is_one_sentence_in_json(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise KeyError("x" * 5000)

    monkeypatch.setattr(Service, "encoded_each", broken)
    monkeypatch.setattr(Service, "stats", broken)
    for path, body in (("/predict", {"inputs": 1}), (INFER, {"inputs": [GOOD]})):
        reply = client.post(path, json=body)
        assert (reply.status_code, list(reply.json())) == (500, ["error"])
        assert "KeyError" in reply.json()["error"]
    reply = client.get("/stats")
    assert (reply.status_code, "KeyError" in reply.json()["error"], len(reply.content) < 200) == (500, True, True)


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda body: zlib.compress(body, wbits=-zlib.MAX_WBITS)),
    ],
)
def test_compressed_bodies_are_read_up_to_the_size_limit(client: TestClient, encoding: str, pack: Any) -> None:
    headers = {"Content-Encoding": encoding}
    assert client.post("/predict", content=pack(b'{"inputs": [0, 3]}'), headers=headers).status_code == 200
    body = json.dumps({"inputs": [GOOD]}).encode()
    assert client.post(INFER, content=pack(body), headers=headers).json()["outputs"][0]["data"] == [7, 3]
    assert "decompressed" in refused(client, 413, content=pack(b" " * (LIMIT + 1)), headers=headers)
    assert "Content-Encoding" in refused(client, 400, content=pack(body)[:-3], headers=headers)
    assert "Content-Encoding" in refused(client, 400, content=body, headers=headers)
    for path in ("/predict", INFER):
        assert "'br'" in refused(client, 415, path, content=body, headers={"Content-Encoding": "br"})


class Network:
    """A client's body that arrives in parts of the size of `parts`, one every 20 ms; then nothing comes."""

    def __init__(self, *parts: int) -> None:
        self.parts = list(parts)

    async def __call__(self) -> dict[str, Any]:
        if not self.parts:
            await asyncio.sleep(3600)
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": bytes(self.parts.pop(0)), "more_body": True}


async def test_a_body_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "READ_WITHIN_S", 0.05)
    with pytest.raises(RefusedError) as error:
        await bodies.body_of({}, Network(), 100)
    assert error.value.status == 408


async def test_a_body_that_the_proxy_gives_up_is_a_closed_connection() -> None:
    async def fails() -> dict[str, Any]:
        raise RuntimeError("the task was cancelled")

    with pytest.raises(RefusedError, match="the connection closed before the whole body had arrived"):
        await bodies.body_of({}, fails, 100)


async def test_where_too_many_bodies_arrive_the_slowest_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ARRIVING", arriving := bodies.ArrivingBodies())
    arriving.places = lambda: 2 * 10
    slow = [asyncio.create_task(bodies.body_of({}, Network(17_000), 10**6)) for _ in range(10)]
    await asyncio.sleep(0.3)
    assert not any(each.done() for each in slow), "there is room"
    quick = [asyncio.create_task(bodies.body_of({}, Network(*[50_000] * 15), 10**6)) for _ in range(4)]
    await until(lambda: sum(each.done() for each in slow) >= 4)
    await asyncio.sleep(0.05)
    given_up = [str(each.exception()) for each in slow if each.done()]
    assert len(given_up) == 4
    assert all("more slowly than others" in sentence for sentence in given_up)
    assert not any(each.done() for each in quick)
    for each in (*slow, *quick):
        each.cancel()


async def test_a_small_body_that_the_front_itself_reads_late_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy front reads hundreds of requests before it comes to their bodies, which arrived with them."""
    monkeypatch.setattr(bodies, "ARRIVING", arriving := bodies.ArrivingBodies())
    arriving.places = lambda: 2 * 10

    async def late() -> dict[str, Any]:
        await asyncio.sleep(2 * bodies.JUDGED_AFTER_S)
        return {"type": "http.request", "body": b"x", "more_body": False}

    assert await asyncio.gather(*(bodies.body_of({}, late, 100) for _ in range(50))) == [b"x"] * 50


async def test_bodies_that_are_too_large_together_are_given_up_the_slowest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "ARRIVING", bodies.ArrivingBodies())
    monkeypatch.setattr(bodies, "MOST_ARRIVING_BYTES", 5_000)
    sizes = [2_000], [1_000], [1_000] * 30, [500] * 30
    tasks = [asyncio.create_task(bodies.body_of({}, Network(*each), 10**6)) for each in sizes]
    await until(lambda: sum(each.done() for each in tasks) >= 3)
    assert [each.done() for each in tasks] == [True, True, False, True]
    for each in tasks:
        each.cancel()


@pytest.mark.parametrize(
    ("timeout", "within_s"), [(50_000_000, 50.0), (0, None), (-1, None), (10**100, 86_400), (None, None)]
)
def test_the_timeout_of_triton_is_a_deadline_over_http_too(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, timeout: int | None, within_s: float | None
) -> None:
    seen, answer = [], Driver.answer

    async def watched(driver: Driver, inputs: Any, within_s: float, *_: object) -> Any:
        seen.append(within_s)
        return await answer(driver, inputs, 60.0)

    monkeypatch.setattr(Driver, "answer", watched)
    request = {"inputs": [GOOD], "parameters": {"timeout": timeout}}
    assert client.post(INFER, json=request).status_code == 200
    assert client.post(INFER, json=request, headers={"X-Deadline-Ms": "250000"}).status_code == 200
    assert seen == [pytest.approx(within_s or 60.0, rel=0.5), pytest.approx(250.0, rel=0.5)]


@pytest.mark.parametrize("told", ["1e300", "inf", "nan", "-1", "1_000", "x" * 5000])
def test_no_deadline_exceeds_the_limits_of_timers(client: TestClient, told: str) -> None:
    refused(client, 400, "/predict", json={"inputs": [0, 1]}, headers={"X-Deadline-Ms": told})


def pixels(images: Any, **_: object) -> dict[str, Any]:
    return {"pixel_values": np.asarray(images, np.float32).transpose(2, 0, 1)[None] / np.float32(1e-20)}


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ([[1e25, 0.0]], "image 1 holds numbers that are too large"),
        ([[1e39, 0.0]], "finite numbers only"),
        ([[10**400, 0]], "array of numbers"),
        ([[], []], "image 1 is 2 x 0"),
        (np.zeros((1, MAX_PIXELS + 1), np.uint8), "pixels are allowed"),
        (np.zeros((2, 0, 3)), "image 1 is 2 x 0"),
        ([], "must be height x width"),
    ],
)
def test_an_image_is_measured_before_it_is_preprocessed(image: Any, sentence: str) -> None:
    with np.errstate(over="ignore"), pytest.raises(UserError, match=sentence):
        ImageEncoder(pixels, 3)([np.ones((1, 2)), image])


def test_an_image_that_the_preprocessor_cannot_read_is_named() -> None:
    def no_range(**_: object) -> Any:
        raise ValueError("values outside the range [0, 1]\nand more")

    with pytest.raises(UserError, match=r"image 0 cannot be read by .*: values outside the range \[0, 1\]$"):
        ImageEncoder(no_range, 3)([np.ones((1, 2))])


class SeeingTokenizer:
    def __init__(self, truncation_side: str) -> None:
        self.truncation_side, self.seen = truncation_side, list[str]()

    def __call__(self, first: list[str], second: Any, **_: object) -> Any:
        self.seen.extend(first + (second or []))
        return {"input_ids": [[1] * min(4, len(text) // 2) for text in first]}


@pytest.mark.parametrize(("side", "read"), [("right", "a" * 256), ("left", "b" * 256)])
def test_only_the_readable_part_of_a_text_is_tokenized(side: str, read: str) -> None:
    tokenizer = SeeingTokenizer(side)
    TextEncoder(tokenizer, 4)(["a" * 10**6 + "b" * 10**6, "short"])
    assert tokenizer.seen == [read, "short"]
    with pytest.raises(UserError, match="cannot stand in one request"):
        TextEncoder(tokenizer, 4)(["one", ["a", "pair"]])


def test_haproxy_never_opens_too_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy refuses to start otherwise: it counts two and a half files a connection, and some of its own."""
    for files, connections in ((20_000, 7795), (1_048_576, 8192), (4096, 1433)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert allowed_connections(8192) == connections
        assert 2.5 * connections + 30 < files
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    with pytest.raises(UserError, match=r"only 256 files may be open here, but serving needs 2,048: raise ulimit -n"):
        allowed_connections(8192)
