"""The probabilities of all labels, and the rerank interface of other servers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isobatch.deployments.named import LOADER
from isobatch.profiles.errors import UserError
from tests.helpers.command_lines import material
from tests.helpers.documented import DocumentedClient, ask_examples, check_document, served
from tests.helpers.grpc_client import play
from tests.helpers.tiny_networks import WIDE, hugging_face

TEXTS = ["a good film", "the film was dull"]
QUERY = "was the film good"
LABELS = ["LABEL_0", "LABEL_1", "LABEL_2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return material(tmp_path_factory.mktemp("switch")) / "my-bert"


def serving(folder: Path, **fields: Any) -> DocumentedClient:
    return served(model=str(folder), max_inputs=4, **fields)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[DocumentedClient]:
    with serving(folder, relevant_label="LABEL_1") as client:
        yield client


def logits(folder: Path, *inputs: Any) -> NDArray[np.float32]:
    """Those of the plain network in transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        rows = [
            hugging_face("bert")(**tokenizer(*([each] if isinstance(each, str) else each), return_tensors="pt")).logits
            for each in inputs
        ]
    return torch.cat(rows).numpy()


def probabilities(folder: Path, *inputs: Any) -> list[list[float]]:
    return torch.from_numpy(logits(folder, *inputs)).softmax(dim=1).tolist()


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-5)


def test_the_document_is_complete_and_its_examples_work(client: DocumentedClient) -> None:
    check_document(client.app.openapi())
    assert ask_examples(client, name="my-bert", version="1") > 14


def test_a_request_may_list_all_labels_or_the_best_ones(client: DocumentedClient, folder: Path) -> None:
    def listed(**fields: Any) -> list[Any]:
        reply = client.post("/predict", json={"inputs": TEXTS, **fields})
        assert reply.status_code == 200, reply.text
        return [output.get("scores") for output in reply.json()["outputs"]]

    for scores, row in zip(listed(scores="all"), probabilities(folder, *TEXTS), strict=True):
        assert [each["score"] for each in scores] == near(sorted(row, reverse=True))
        assert all(each["score"] == near(row[each["label"]]) for each in scores)
        assert [each["name"] for each in scores] == [LABELS[each["label"]] for each in scores]
    assert listed(top_k=2) == listed(scores=2) == [scores[:2] for scores in listed(top_k=9)]
    assert listed() == listed(scores="winner") == [None, None]


def test_a_server_may_list_them_always(folder: Path) -> None:
    with serving(folder, scores=2) as client:
        assert [len(each["scores"]) for each in client.post("/predict", json={"inputs": TEXTS}).json()["outputs"]] == [
            2,
            2,
        ]
        tensor = {"name": "inputs", "datatype": "BYTES", "shape": [2, 1], "data": TEXTS}
        reply = client.post("/v2/models/my-bert/infer", json={"inputs": [tensor]}).json()
        assert {each["name"]: each["shape"] for each in reply["outputs"]}["scores"] == [2, 3]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"top_k": 0}, "'top_k' is 0: it must be a whole number of at least 1"),
        ({"top_k": "2"}, "'top_k' is '2'"),
        ({"scores": "some"}, "'scores' is 'some': it must be 'all', 'winner' or a number"),
        ({"scores": "all", "top_k": 2}, "give one of them"),
        ({"best": 2}, "'best' is not known"),
    ],
)
def test_a_wrong_label_count_is_one_sentence(client: DocumentedClient, fields: dict[str, Any], sentence: str) -> None:
    reply = client.post("/predict", json={"inputs": "good", **fields})
    assert (reply.status_code, sentence in reply.json()["error"]) == (400, True), reply.text


def test_the_open_inference_protocol_sends_their_tensor_when_named(client: DocumentedClient, folder: Path) -> None:
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": [2, 1], "data": TEXTS}
    url, asking = "/v2/models/my-bert/infer", {"inputs": [tensor], "outputs": [{"name": "scores"}]}
    (scores,) = client.post(url, json=asking).json()["outputs"]
    assert (scores["shape"], scores["datatype"]) == ([2, 3], "FP32")
    assert scores["data"] == near(np.ravel(probabilities(folder, *TEXTS)).tolist())
    assert "scores" not in [each["name"] for each in client.post(url, json={"inputs": [tensor]}).json()["outputs"]]
    about = client.get("/v2/models/my-bert").json()["outputs"]
    assert {"name": "scores", "datatype": "FP32", "shape": [-1, 3]} in about


def test_grpc_sends_the_same_tensor(folder: Path) -> None:

    contents = {"bytes_contents": [text.encode() for text in TEXTS]}
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": [2, 1], "contents": contents}
    asking = {"model_name": "my-bert", "inputs": [tensor], "outputs": [{"name": "scores"}]}

    async def scene(client: Any) -> Any:
        return await client.ask("ModelInfer", **asking)

    reply = play(scene, model=str(folder), loader=LOADER, slo_ms=60_000)
    (scores,) = (np.frombuffer(raw, "<f4").reshape(2, 3) for raw in reply.raw_output_contents)
    assert scores.tolist() == [near(row) for row in probabilities(folder, *TEXTS)]


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"model": "other", "query": "a", "documents": ["b"]}, 404, "the model 'other' does not exist: this is 'my-b"),
        ({"query": "a", "documents": [1, 2]}, 400, "documents"),
        ({"query": "a", "documents": ["b"] * 5}, 400, "5 inputs in one request: 4 are allowed"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, 400, "top_n = -1"),
        ({"query": "a", "documents": [], "top_n": 1}, 400, "'inputs' is empty"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, 400, "'max_tokens_per_doc' is not"),
        ({"query": "a"}, 400, "documents"),
        ([], 400, "the body"),
    ],
)
def test_a_wrong_request_is_one_sentence(client: DocumentedClient, body: Any, status: int, sentence: str) -> None:
    reply = client.post("/rerank", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], sentence in error["message"]) == (status, status, True), reply.text
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_answers_as_jina_cohere_and_vllm(client: DocumentedClient, folder: Path, path: str) -> None:
    scores = [row[1] for row in probabilities(folder, *([QUERY, text] for text in TEXTS))]
    order = sorted(range(2), key=lambda index: -scores[index])
    reply = client.post(
        path, json={"model": "my-bert", "query": QUERY, "documents": [TEXTS[0], {"text": TEXTS[1]}]}
    ).json()
    assert reply["results"] == [
        {"index": index, "relevance_score": near(scores[index]), "document": {"text": TEXTS[index]}} for index in order
    ]
    best = client.post(path, json={"query": QUERY, "documents": TEXTS, "top_n": 1, "return_documents": False}).json()
    assert best["results"] == [{"index": order[0], "relevance_score": near(scores[order[0]])}]
    assert best["usage"]["total_tokens"] > 10


def test_rerank_needs_a_label_that_means_relevant(folder: Path) -> None:
    with serving(folder) as client:
        reply = client.post("/rerank", json={"query": "a", "documents": ["b"]})
    assert (reply.status_code, "is not a reranker (relevant_label: NAME" in reply.json()["message"]) == (400, True)


def test_a_missed_deadline_is_refused_as_others_do(client: DocumentedClient) -> None:
    body = {"query": "a", "documents": ["b"]}
    reply = client.post("/rerank", json=body, headers={"X-Deadline-Ms": "0.001"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    assert "retry-after" in reply.headers


def test_a_relevant_label_that_there_is_not_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(UserError, match="relevant_label = 'yes': the network's labels are LABEL_0, LABEL_1, LABEL_2"):
        serving(folder, relevant_label="yes")


def test_a_network_with_one_output_is_a_reranker_as_it_is(folder: Path, tmp_path: Path) -> None:
    import transformers

    text = {"vocab_size": 20, "num_labels": 1, "pad_token_id": 1, "max_position_embeddings": 24, **WIDE}
    torch.manual_seed(3)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(num_hidden_layers=2, **text)).eval()
    model.save_pretrained(tmp_path / "ranker")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path / "ranker")
    with torch.inference_mode():
        logits = [float(model(**tokenizer(QUERY, text, return_tensors="pt")).logits) for text in TEXTS]
    with serving(tmp_path / "ranker") as client:
        body = {"query": QUERY, "documents": TEXTS}

        def scores(**fields: Any) -> list[float]:
            results = client.post("/rerank", json=body | fields).json()["results"]
            return [each["relevance_score"] for each in sorted(results, key=lambda each: each["index"])]

        assert scores(use_activation=False) == near(logits)
        assert scores() == near(torch.tensor(logits).sigmoid().tolist())
        answer = client.post("/predict", json={"inputs": [[QUERY, TEXTS[0]]]}).json()["outputs"][0]
        assert answer["score"] == near(scores()[0])
