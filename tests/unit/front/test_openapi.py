"""The front's OpenAPI document is complete and true."""

from pathlib import Path

from tests.helpers.documented import TOY, ask_examples, check_document, front, served


def test_the_document_is_complete() -> None:
    check_document(front().openapi())


def test_every_example_of_the_demo_is_answered() -> None:
    with served(model=None) as demo:
        assert ask_examples(demo, name="demo", version="1") == 14 + 2 + 2


def test_a_network_of_texts_has_texts_as_examples(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    paths = front(**TOY | {"model": str(tmp_path)}).openapi()["paths"]
    (_, several) = paths["/predict"]["post"]["requestBody"]["content"]["application/json"]["examples"].values()
    assert several["value"] == {"inputs": ["a text to be classified"] * 2}
