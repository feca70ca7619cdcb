"""The shape of answers and errors, and their description, without Ray: wrong requests never reach the network."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.helpers.documented import (
    TOY,
    TOY_OF_TEXTS,
    DocumentedClient,
    ask_examples,
    check_document,
    front,
    served,
    with_document,
)


def taking_three() -> DocumentedClient:
    return DocumentedClient(with_document(front(max_inputs=3, max_body_bytes=200), "the toy that takes three inputs"))


@pytest.fixture
def client() -> Iterator[TestClient]:
    with taking_three() as client:
        yield client


@pytest.fixture(scope="module")
def refusing() -> Iterator[TestClient]:
    """One for all requests that compute nothing."""
    with taking_three() as client:
        yield client


def test_a_list_is_answered_in_order(client: TestClient) -> None:
    reply = client.post("/predict", json={"inputs": [[4, 7], [0, 3]]})
    assert reply.status_code == 200
    assert reply.json()["model"] == "toy"
    outputs = reply.json()["outputs"]
    assert [(output["label"], output["exit_block"]) for output in outputs] == [(7, 3), (3, 0)]
    assert outputs[0]["score"] == pytest.approx(0.69, abs=0.01)
    assert all(output["queued_ms"] >= 0 and output["computed_ms"] >= 0 for output in outputs)


def test_a_request_for_the_full_network_leaves_at_no_ramp(client: TestClient) -> None:
    def left(told: str) -> int:
        reply = client.post("/predict", json={"inputs": [0, 3]}, headers={"X-Full": told})
        assert reply.status_code == 200, reply.text
        return int(reply.json()["outputs"][0]["exit_block"])

    assert (left("1"), left("0")) == (3, 0)
    refused = client.post("/predict", json={"inputs": [0, 3]}, headers={"X-Full": "yes"})
    assert (refused.status_code, "X-Full is 'yes': it must be 1 (or 0" in refused.json()["error"]) == (400, True)


def test_a_body_may_begin_with_a_byte_order_mark(client: TestClient) -> None:
    """As files that Windows' programs have written."""
    assert client.post("/predict", content=b'\xef\xbb\xbf{"inputs": [0, 3]}').status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 150, 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b'{"inputs": "\\ud800"}', 400, "not JSON: \\ud800 is half of a surrogate pair"),
        (b'{"inputs": ["\\ud800", "a longer text"]}', 400, "not JSON: \\ud800 is half of a surrogate pair"),
        (b'{"inputs": "\\ud83d\\ude00"', 400, "truncated"),
        (b'{"inputs": [NaN, 1]}', 400, "not JSON: JSON is malformed: invalid character (byte 12), before 'NaN, 1]}'"),
        (b"[1]", 400, '{"inputs": ...}'),
        (b'{"inputs": [0, 1], "input": 2}', 400, "'input' is not known"),
        (b'{"inputs": []}', 422, "'inputs' is empty"),
        (b'{"inputs": [[0, 1, 2]]}', 422, "input 0 is [0, 1, 2]: it must be [block, label]"),
        (b'{"inputs": [[0, 1], "text"]}', 422, "input 1 is 'text'"),
        (b'{"inputs": null}', 422, "input 0 is None"),
        (b'{"inputs": [[0, 1], [0, 1], [0, 1], [0, 1]]}', 422, "4 inputs in one request: 3 are allowed"),
        (b" " * 201, 413, "201 bytes: 200 are allowed"),
    ],
)
def test_wrong_inputs_never_reach_the_network(refusing: TestClient, body: bytes, status: int, sentence: str) -> None:
    reply = refusing.post("/predict", content=body)
    assert (reply.status_code, sentence in reply.json()["error"]) == (status, True), reply.text
    assert refusing.get("/stats").json()["exits"] == dict.fromkeys("0123", 0)


def test_a_body_of_unknown_length_is_limited_too(refusing: TestClient) -> None:
    reply = refusing.post("/predict", content=(b" " * 50 for _ in range(5)))
    assert (reply.status_code, "more than the 200 bytes" in reply.json()["error"]) == (413, True)


def test_a_failing_network_is_a_500_with_a_sentence_and_the_next_request_is_answered(client: TestClient) -> None:
    reply = client.post("/predict", json={"inputs": [[0, -1]]})
    assert (reply.status_code, "RuntimeError" in reply.json()["error"]) == (500, True)
    assert client.post("/predict", json={"inputs": [[0, 1]]}).status_code == 200
    assert client.get("/stats").json()["requests"] == {"answered": 1, "refused": 0, "failed": 1, "abandoned": 0}


def test_errors_for_other_paths_and_methods_name_the_right_ones(refusing: TestClient) -> None:
    assert refusing.get("/nothing").status_code == 404
    assert "POST /predict answers" in refusing.get("/nothing").json()["error"]
    assert refusing.get("/predict").status_code == 405


def test_health(refusing: TestClient) -> None:
    ready = {"status": "ready", "model": "toy"}
    for path, content in (("/healthz", {"status": "ok"}), ("/readyz", ready), ("/health", ready)):
        assert refusing.get(path).json() == content
        assert (refusing.head(path).status_code, refusing.head(path).content) == (200, b"")


def test_every_answer_says_the_version(client: TestClient) -> None:
    version = client.get("/stats").json()["version"]
    replies = [client.post("/predict", json={"inputs": [[0, 1]]}), client.post("/predict", content=b"?")]
    replies += [client.get("/nothing"), client.head("/healthz")]
    assert {reply.headers["x-isobatch-version"] for reply in replies} == {version}


def test_stats_have_counts_and_latencies(client: TestClient) -> None:
    client.post("/predict", json={"inputs": [[4, 7], [0, 3], [1, 1]]})
    stats = client.get("/stats").json()
    assert (stats["slo_ms"], stats["observations"]) == (60_000, 0)
    assert stats["survival"] == pytest.approx([1.0, 2 / 3, 2 / 3, 1 / 3], abs=1e-3)
    assert set(stats["latency_ms"]) == {"p50", "p95", "p99"}
    (split,) = stats["splits"]
    assert (split["blocks"], split["batch"], split["launches"]) == ([0, 4], 32, 1)
    assert split["fill"] == pytest.approx(3 / 32)


def test_an_answer_says_that_its_text_was_cut() -> None:
    with served(**TOY_OF_TEXTS) as client:
        outputs = client.post("/predict", json={"inputs": ["0 3", "0 4 and more", "3 5"]}).json()["outputs"]
        assert [each.get("truncated") for each in outputs] == [None, True, None]
        assert [each["label"] for each in outputs] == [3, 4, 5]


def test_a_text_that_is_too_long_is_refused_if_configured() -> None:
    with served(**TOY_OF_TEXTS, too_long="refuse") as client:
        assert client.post("/predict", json={"inputs": ["0 3"]}).status_code == 200
        reply = client.post("/predict", json={"inputs": ["0 3", "0 4 and more"]})
        assert reply.status_code == 422
        assert reply.json()["error"] == (
            "input 1 is longer than the network reads: shorten it (this server has too_long: refuse)"
        )


def test_the_document_is_complete_and_every_example_of_the_demo_is_answered() -> None:
    check_document(front().openapi())
    with served(model=None) as demo:
        assert ask_examples(demo, name="demo", version="1") == 16 + 2 + 2


def test_a_network_of_texts_has_texts_as_examples(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    paths = front(**TOY | {"model": str(tmp_path)}).openapi()["paths"]
    (_, several) = paths["/predict"]["post"]["requestBody"]["content"]["application/json"]["examples"].values()
    assert several["value"] == {"inputs": ["a text to be classified"] * 2}
