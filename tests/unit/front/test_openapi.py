"""The front's OpenAPI document is complete and true."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from isobatch.deployments.front.page import EXPLAINING
from tests.helpers.documented import TOY, DocumentedClient, ask_examples, check_document, front, served

INFER = "/v2/models/toy/infer"


@pytest.fixture(scope="module")
def toy() -> Iterator[DocumentedClient]:
    with served(max_inputs=3, max_body_bytes=400) as client:
        yield client


def test_the_document_is_complete(toy: DocumentedClient) -> None:
    check_document(toy.app.openapi())


def test_every_example_of_the_demo_is_answered() -> None:
    with served(model=None) as demo:
        assert ask_examples(demo, name="demo", version="1") == 14 + 2 + 2


def test_a_network_of_texts_has_texts_as_examples(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    paths = front(**TOY | {"model": str(tmp_path)}).openapi()["paths"]
    (_, several) = paths["/predict"]["post"]["requestBody"]["content"]["application/json"]["examples"].values()
    assert several["value"] == {"inputs": ["a text to be classified"] * 2}


@pytest.mark.parametrize("path", ["/predict", INFER])
@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b'{"inputs": [0, 3]}', {"Origin": "http://evil.example"}, 403),
        (b" " * 401, {}, 413),
        (b"{}", {"Content-Encoding": "br"}, 415),
        (b'{"inputs": [{"shape": [1, 1], "datatype": "INT32", "data": [1]}]}', {}, 422),
        (b'{"inputs": [{"shape": [1, 2], "datatype": "INT32", "data": [0, -1]}]}', {}, None),
        (b'{"inputs": [0, 3]}', {"X-Deadline-Ms": "0.001"}, 503),
    ],
)
def test_errors_are_as_described(
    toy: DocumentedClient, path: str, body: bytes, headers: dict[str, str], status: int | None
) -> None:
    if path == "/predict" and status is None:
        body = b'{"inputs": [0, -1]}'
    assert toy.post(path, content=body, headers=headers).status_code == (status or 500)


def test_a_key_is_described_where_one_is_asked_for(toy: DocumentedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "security" not in toy.app.openapi()
    monkeypatch.setenv("KEY", "secret")
    client = served(api_key_variable="KEY")
    assert set(client.app.openapi()["components"]["securitySchemes"]) == {"bearer", "header"}
    assert client.get("/stats").status_code == client.get("/v2/models/toy").status_code == 401
    assert client.get("/openapi.json").status_code == 401
    assert {client.get(path).status_code for path in EXPLAINING} == {200}
