"""A served network that labels words gives transformers' own answers, in every protocol."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from isobatch import load
from isobatch.deployments.tasks import TOKENS
from tests.helpers.documented import DocumentedClient, check_interface, served, tensors
from tests.helpers.grpc_client import inferred
from tests.helpers.tiny_words import word_network

TEXTS = ["ada bee saw romes.", "oslo", ""]


@pytest.fixture(scope="module")
def client() -> Iterator[DocumentedClient]:
    with served(model=str(word_network()), name="words", device="cpu", max_inputs=8) as client:
        yield client


def expected() -> list[dict[str, Any]]:
    model = load(word_network())
    return [TOKENS.output(each, model.labels) for each in model.predict(TEXTS)]


def test_predict_answers_every_word_and_the_entities(client: DocumentedClient) -> None:
    outputs = client.post("/predict", json={"inputs": TEXTS}).json()["outputs"]
    for output, own in zip(outputs, expected(), strict=True):
        for part in ("tokens", "entities"):
            assert [{**each, "score": 0} for each in output[part]] == [{**each, "score": 0} for each in own[part]]
            scores = [[each["score"] for each in one[part]] for one in (output, own)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-5)
        assert output["exit_block"] == 3
    (person, place) = outputs[0]["entities"]
    assert (person["entity_group"], person["word"], person["start"], person["end"]) == ("PER", "ada bee", 0, 7)
    assert (place["entity_group"], place["word"]) == ("LOC", "romes")
    assert [each["word"] for each in outputs[0]["tokens"]] == ["ada", "bee", "saw", "romes", "."]


def test_a_text_may_be_given_as_its_words(client: DocumentedClient) -> None:
    reply = client.post("/predict", json={"inputs": [["ada", "bee"], ["oslo"]]}).json()["outputs"]
    assert [[each["word"] for each in output["tokens"]] for output in reply] == [["ada", "bee"], ["oslo"]]
    assert reply[1]["tokens"][0]["name"] == "B-LOC"


@pytest.mark.parametrize("wrong", [3, [["ada", 3]], {"tokens": ["ada"]}, [[]]])
def test_inputs_that_are_neither_are_refused_in_one_sentence(client: DocumentedClient, wrong: Any) -> None:
    reply = client.post("/predict", json={"inputs": wrong})
    assert reply.status_code == 422
    assert "text 0 must be a text or a list of words" in reply.json()["error"]


def test_tensors_have_a_row_for_each_text(client: DocumentedClient) -> None:
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": [3, 1], "data": TEXTS}
    result = tensors(client, "words", inputs=[tensor])
    own = expected()
    assert result["words"]["data"] == [5, 1, 0]
    assert result["label"]["shape"] == result["name"]["shape"] == result["start"]["shape"] == [3, 5]
    assert result["label"]["data"][:6] == [*(each["label"] for each in own[0]["tokens"]), own[1]["tokens"][0]["label"]]
    assert result["label"]["data"][6:] == [-1] * 9
    assert result["name"]["data"][5:] == ["B-LOC", *[""] * 9]
    assert result["end"]["data"][:5] == [each["end"] for each in own[0]["tokens"]]
    assert result["exit_block"]["shape"] == [3]


def test_grpc_says_the_same() -> None:
    outputs, raw = inferred(word_network(), [2, 1], [b"oslo", b"ada saw"])
    assert list(outputs["label"].shape) == [2, 2]
    assert np.frombuffer(raw["label"], "<i8").tolist() == [3, -1, 1, 0]
    assert np.frombuffer(raw["words"], "<i8").tolist() == [1, 2]
    assert raw["name"] == b"\x05\0\0\0B-LOC\0\0\0\0\x05\0\0\0B-PER\x01\0\0\0O"


def test_the_document_describes_words(client: DocumentedClient) -> None:
    check_interface(client, "words", "Token", "Entity", "WordsOutput")
