"""A served network with one output: scores with exits, in the interfaces of rerankers, and numbers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobatch import load
from isobatch.deployments.transport.packed import contest, pack, unpack
from tests.helpers.documented import DocumentedClient, check_interface, served
from tests.helpers.preparing import prepared_network
from tests.helpers.tiny_scores import (
    in_lists,
    in_numbers,
    lists,
    network_of_numbers,
    numbered,
    reference_outputs,
    reranker,
)

QUERY, DOCUMENTS = "the 1", ["ball in tax", "film of", "goal team was", "the bank saw"]


def serving(folder: Path, **fields: Any) -> DocumentedClient:
    return served(model=str(folder), name="scores", device="cpu", max_inputs=64, **fields)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("ranks")
    with prepared_network(place, reranker(), in_lists(place / "a.jsonl", lists(300, seed=7)), "8%", "--queries"):
        yield place / "out"


@pytest.fixture(scope="module")
def client(ranks: Path) -> Iterator[DocumentedClient]:
    with serving(ranks) as client:
        yield client


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("numbers")
    with prepared_network(place, network_of_numbers(), in_numbers(place / "a.csv", numbered(900, seed=7)), "5%"):
        yield place / "out"


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-5)


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


def test_documents_that_cannot_be_among_the_best_leave_early(ranks: Path) -> None:
    """Nearly all of the best two of six documents are those that the same exits give without `top_n`."""

    def asked(top_n: int | None) -> tuple[list[set[int]], float]:
        with serving(ranks) as client:
            best = [
                client.post("/v1/rerank", json={"query": query, "documents": documents, "top_n": top_n}).json()
                for query, documents, _ in lists(60, seed=5)
            ]
            exits = client.get("/stats").json()["exits"]
        depth = sum(int(block) * count for block, count in exits.items()) / sum(exits.values())
        return [{each["index"] for each in reply["results"][:2]} for reply in best], depth

    (all_documents, depth), (best_two, depth_of_best) = asked(None), asked(2)
    assert depth_of_best < depth - 0.1
    assert sum(map(len, map(set.intersection, best_two, all_documents))) > 0.95 * 2 * 60


def test_no_document_of_another_request_counts(ranks: Path) -> None:
    """Nor of one that wants all scores, or more than it has documents."""
    model = load(ranks)
    encoded = pack(model.encode([(QUERY, each) for each in DOCUMENTS]))
    plain, alone, beside, more = (
        model.run(unpack(parts), model.num_blocks, model.ramp_blocks).exits.blocks[:4].tolist()
        for parts in (
            [encoded],
            [contest(encoded, 7, 1)],
            [contest(encoded, 7, 1), contest(encoded, 8, 1)],
            [contest(encoded, 7, 5), contest(encoded, 8, 1)],
        )
    )
    assert alone == beside != plain == more


def test_audits_compare_scores_within_the_tolerance(ranks: Path) -> None:
    model, found = load(ranks), lists(100, seed=5)
    values = [(query, each) for query, documents, _ in found for each in documents]
    early, full = ([each.score for each in model.predict(values, exits)] for exits in (True, False))
    with serving(ranks, answers="early") as client:
        for query, documents, _ in found:
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
