"""A served network with one output: scores with exits, in the interfaces of rerankers, and numbers."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobatch import load
from isobatch.deployments.models.ramps import read_rules
from isobatch.deployments.transport.packed import pack, unpack, wanting_best
from isobatch.profiles.promise import RULES
from tests.helpers.documented import DocumentedClient, check_interface, served
from tests.helpers.tiny_scores import (
    lists,
    network_of_numbers,
    prepared_network_of_numbers,
    prepared_reranker,
    reference_outputs,
    reranker,
)

QUERY, DOCUMENTS = "the 1", ["ball in tax", "film of", "goal team was", "the bank saw"]


def serving(folder: Path, **fields: Any) -> DocumentedClient:
    return served(model=str(folder), name="scores", device="cpu", max_inputs=64, **fields)


@pytest.fixture
def ranks() -> Path:
    return prepared_reranker() / "out"


@pytest.fixture(scope="module")
def client() -> Iterator[DocumentedClient]:
    with serving(prepared_reranker() / "out") as client:
        yield client


@pytest.fixture
def numbers() -> Path:
    return prepared_network_of_numbers() / "out"


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-5)


def test_the_page_learns_that_answers_are_scores(client: DocumentedClient) -> None:
    """It would call a score of 2.35 "235 % sure"."""
    assert client.get("/page/about.json").json()["scores"] is True


def test_rerank_gives_the_scores_that_the_network_gives_here(client: DocumentedClient, ranks: Path) -> None:
    answers = load(ranks).predict([(QUERY, each) for each in DOCUMENTS])
    assert min(each.exit_block for each in answers) < 3, "some leave early"
    ranked = client.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS}).json()
    assert [each["score"] for each in ranked] == near(sorted((each.score for each in answers), reverse=True))
    assert ranked[0]["index"] == 2, "it has two words of sport"
    results = client.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()["results"]
    assert [each["relevance_score"] for each in results] == near([each["score"] for each in ranked[:2]])
    data = client.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    assert [each["score"] for each in data] == near([each.score for each in answers])
    outputs = client.post("/predict", json={"inputs": [[QUERY, each] for each in DOCUMENTS]}).json()["outputs"]
    assert [each["exit_block"] for each in outputs] == [each.exit_block for each in answers]


def test_the_full_network_is_asked_for_as_always(client: DocumentedClient) -> None:
    ranked = client.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS}, headers={"X-Full": "1"}).json()
    logits = reference_outputs(reranker(), [[QUERY] * len(DOCUMENTS), DOCUMENTS])
    scores = 1 / (1 + np.exp(-logits))
    assert {each["index"]: each["score"] for each in ranked} == {
        place: near(score) for place, score in enumerate(scores.tolist())
    }


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network, with ramps that let no document go because its score is sure."""
    folder = tmp_path_factory.mktemp("scores") / "strict"
    shutil.copytree(prepared_reranker() / "out", folder)
    rules = read_rules(folder / RULES)
    ramps = tuple(ramp.model_copy(update={"threshold": 0.0}) for ramp in rules.ramps)
    rules.model_copy(update={"ramps": ramps}).write(folder / RULES)
    return folder


def test_documents_that_cannot_be_among_the_best_leave_early(strict: Path) -> None:
    """Nearly all of the best two of six documents are those of the full network."""

    def asked(top_n: int | None) -> tuple[list[set[int]], int, int]:
        replies = [
            client.post("/v1/rerank", json={"query": query, "documents": documents, "top_n": top_n}).json()
            for query, documents, _ in lists(30, seed=5)
        ]
        exits = client.get("/stats").json()["exits"]
        best = [{each["index"] for each in reply["results"][:2]} for reply in replies]
        return best, sum(count for block, count in exits.items() if int(block) < 3), sum(exits.values())

    with serving(strict) as client:
        (full, none, before), (best_two, early, inputs) = asked(None), asked(2)
    assert none == 0 < 0.1 < early / (inputs - before)
    assert sum(map(len, map(set.intersection, best_two, full))) > 0.9 * 2 * 30


def test_no_document_of_another_request_counts(strict: Path) -> None:
    """Nor of a request that wants more than it has."""
    model, (query, documents, _) = load(strict), lists(1, seed=5)[0]
    encoded, last = pack(model.encode([(query, each) for each in documents])), model.num_blocks
    blocks = {
        wanted: [
            model.run(unpack([*others, wanting_best(encoded, 7, wanted)]), last, model.ramp_blocks).exits.blocks[-6:]
            for others in ([], [wanting_best(encoded, 8, 1)])
        ]
        for wanted in range(8)
    }
    for alone, beside in blocks.values():
        assert alone.tolist() == beside.tolist()
    depths = [alone.sum() for alone, _ in blocks.values()]
    assert depths[0] == depths[6] == depths[7] == 6 * (last - 1)
    assert depths[1:7] == sorted(depths[1:7])


def test_audits_compare_scores_within_the_tolerance(ranks: Path) -> None:
    model, result = load(ranks), lists(20, seed=5)
    values = [(query, each) for query, documents, _ in result for each in documents]
    early, full = ([each.score for each in model.predict(values, exits)] for exits in (True, False))
    with serving(ranks, answers="early") as client:
        for query, documents, _ in result:
            client.post("/rerank", json={"query": query, "texts": documents})
        stats = client.get("/stats").json()
    measured = (np.abs(np.array(early) - np.array(full)) <= 0.05).mean()
    assert stats["audits"]["agreement"]["audits"] > 50
    assert stats["audits"]["agreement"]["share"] == pytest.approx(measured, abs=0.02)
    assert "NDCG@10" in stats["promise"]


def test_numbers_are_served_as_they_are(numbers: Path) -> None:
    with serving(numbers) as client:
        _check_numbers(client)
    with serving(numbers, predict_form="tei") as client:
        (tei,) = client.post("/predict", json={"inputs": DOCUMENTS[0]}, headers={"X-Full": "1"}).json()
    expected = float(reference_outputs(network_of_numbers(), [DOCUMENTS[:1]])[0])
    assert tei["score"] == near(1 / (1 + np.exp(-expected))), "TEI always takes the sigmoid"


def _check_numbers(numbers: DocumentedClient) -> None:
    expected = reference_outputs(network_of_numbers(), [DOCUMENTS])
    full = {"X-Full": "1"}
    outputs = numbers.post("/predict", json={"inputs": DOCUMENTS, "scores": "all"}, headers=full).json()["outputs"]
    assert [each["score"] for each in outputs] == pytest.approx(expected.tolist(), abs=1e-4)
    assert [each["scores"][0]["score"] for each in outputs] == [each["score"] for each in outputs]
    early = numbers.post("/predict", json={"inputs": DOCUMENTS}).json()["outputs"]
    assert [each["score"] for each in early] == pytest.approx(expected.tolist(), abs=6)
    (probs,) = numbers.post("/classify", json={"input": DOCUMENTS[0]}, headers=full).json()["data"]
    assert probs["probs"] == pytest.approx(expected[:1].tolist(), abs=1e-4), "vLLM has no activation for regression"
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": [4, 1], "data": DOCUMENTS}
    request = {"inputs": [tensor], "outputs": [{"name": "score"}, {"name": "scores"}]}
    reply = numbers.post("/v2/models/scores/infer", json=request, headers=full).json()["outputs"]
    for each in reply:
        assert each["data"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_document_describes_every_response(client: DocumentedClient) -> None:
    check_interface(client, "scores")
