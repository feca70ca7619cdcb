"""A served network with several labels gives transformers' own answers, in every protocol."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.documented import DocumentedClient, check_interface, served, tensors
from tests.helpers.grpc_client import inferred
from tests.helpers.tiny_labels import NAMES, label_network, reference_logits

TEXTS = ["ball tax the", "the of", "film song was price"]


def serving(**fields: Any) -> DocumentedClient:
    return served(model=str(label_network()), name="labels", device="cpu", max_inputs=8, **fields)


@pytest.fixture(scope="module")
def client() -> Iterator[DocumentedClient]:
    with serving() as client:
        yield client


def expected() -> np.ndarray:
    return 1 / (1 + np.exp(-reference_logits(TEXTS)))


def named(row: np.ndarray, labels: list[int]) -> list[dict[str, object]]:
    return [
        {"label": label, "name": NAMES[label], "score": pytest.approx(float(row[label]), abs=1e-5)} for label in labels
    ]


def test_predict_lists_the_labels_of_each_input_the_most_probable_first(client: DocumentedClient) -> None:
    outputs = client.post("/predict", json={"inputs": TEXTS, "scores": "all"}).json()["outputs"]
    assert [len(each["labels"]) for each in outputs] == (expected() > 0.5).sum(axis=1).tolist()
    assert len(outputs[1]["labels"]) == 0 < len(outputs[0]["labels"])
    for output, row in zip(outputs, expected(), strict=True):
        best = sorted(range(4), key=lambda label: -row[label])
        assert output["labels"] == named(row, [label for label in best if row[label] > 0.5])
        assert output["scores"] == named(row, best)
    assert "scores" not in client.post("/predict", json={"inputs": TEXTS}).json()["outputs"][0]
    (two,) = client.post("/predict", json={"inputs": TEXTS[0], "top_k": 2}).json()["outputs"]
    assert len(two["scores"]) == 2


def test_tensors_have_a_row_for_each_text(client: DocumentedClient) -> None:
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": [3, 1], "data": TEXTS}
    names = ["labels", "label", "name", "score", "scores", "exit_block"]
    result = tensors(client, "labels", inputs=[tensor], outputs=[{"name": name} for name in names])
    has = expected() > 0.5
    most = int(has.sum(axis=1).max())
    assert result["labels"]["data"] == has.sum(axis=1).tolist()
    assert result["label"]["shape"] == result["name"]["shape"] == [3, most]
    assert result["label"]["data"][most : 2 * most] == [-1] * most
    assert result["name"]["data"][most : 2 * most] == [""] * most
    assert result["scores"]["shape"] == [3, 4]
    assert result["scores"]["data"] == pytest.approx(expected().ravel().tolist(), abs=1e-5)
    about = {each["name"]: each for each in client.get("/v2/models/labels").json()["outputs"]}
    assert about["scores"]["shape"] == [-1, 4]


def test_the_best_labels_have_their_names(client: DocumentedClient) -> None:
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": [3, 1], "data": TEXTS}
    wanted = {"name": "scores", "parameters": {"classification": 3}}
    reply = client.post("/v2/models/labels/infer", json={"inputs": [tensor], "outputs": [wanted]})
    (scores,) = reply.json()["outputs"]
    best = [(row, label) for row in expected() for label in np.argsort(-row)[:3]]
    values, *named = zip(*(text.split(":") for text in scores["data"]), strict=True)
    assert scores["shape"] == [3, 3]
    assert [*map(float, values)] == pytest.approx([row[label] for row, label in best], abs=1e-5)
    assert [*zip(*named, strict=True)] == [(str(label), NAMES[label]) for _, label in best]


def test_grpc_says_the_same() -> None:
    _, raw = inferred(label_network(), [2, 1], [b"the of", b"film"])
    assert np.frombuffer(raw["labels"], "<i8").tolist() == [0, 1]
    assert raw["name"] == b"\0\0\0\0\x03\0\0\0art"


def test_vllms_classify_gives_sigmoids_and_the_most_probable_label(client: DocumentedClient) -> None:
    data = client.post("/classify", json={"input": TEXTS}).json()["data"]
    for each, row in zip(data, expected(), strict=True):
        assert each["probs"] == pytest.approx(row.tolist(), abs=1e-5)
        assert each["label"] == NAMES[int(row.argmax())]
    raw = client.post("/classify", json={"input": TEXTS, "use_activation": False}).json()["data"]
    assert [each["probs"] for each in raw] == [pytest.approx(row, abs=1e-4) for row in reference_logits(TEXTS).tolist()]


def test_teis_predict_gives_logits_and_refuses_its_softmax_in_one_sentence() -> None:
    with serving(predict_form="tei") as client:
        raw = client.post("/predict", json={"inputs": TEXTS[0], "raw_scores": True}).json()
        reply = client.post("/predict", json={"inputs": TEXTS[0]})
    row = reference_logits(TEXTS[:1])[0]
    assert {each["label"]: each["score"] for each in raw} == {
        name: pytest.approx(float(score), abs=1e-4) for name, score in zip(NAMES, row, strict=True)
    }
    assert reply.status_code == 424
    assert reply.json()["error"].startswith("this network gives several labels, of which the softmax")


def test_the_document_describes_labels(client: DocumentedClient) -> None:
    check_interface(client, "labels", "LabelsOutput", "LabelScore")
