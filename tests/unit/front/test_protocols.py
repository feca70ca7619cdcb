"""The probabilities of all labels, and the interfaces of other servers: the same requests get the same answers."""

import json
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.http import create_api
from isobatch.deployments.front.protocols.tei import PredictForm, info
from isobatch.deployments.front.service import Service
from isobatch.profiles.errors import UserError
from tests.helpers.command_lines import material
from tests.helpers.documented import DocumentedClient, ask_examples, check_document, served, tensors
from tests.helpers.serving import in_a_thread
from tests.helpers.tiny_networks import WIDE, hugging_face

TEXTS = ["a good film", "the film was dull"]
QUERY = "was the film good"
LABELS = ["LABEL_0", "LABEL_1", "LABEL_2"]
TENSOR = {"name": "inputs", "datatype": "BYTES", "shape": [2, 1], "data": TEXTS}
LONG = "good " * 40  # the network reads 24 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return material(tmp_path_factory.mktemp("switch")) / "my-bert"


def serving(folder: Path, **fields: Any) -> DocumentedClient:
    return served(model=str(folder), max_inputs=4, **fields)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[DocumentedClient]:
    with serving(folder, relevant_label="LABEL_1") as client:
        yield client


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[DocumentedClient]:
    """As `client`, but no label is named that makes it a reranker, and POST /predict is TEI's."""
    with serving(folder, predict_form="tei") as client:
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


def test_the_document_is_complete_and_its_examples_work(client: DocumentedClient, plain: DocumentedClient) -> None:
    for each in (client, plain):
        check_document(each.app.openapi())
    assert ask_examples(client, name="my-bert", version="1") > 14 + 2 + 2


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
        outputs = client.post("/predict", json={"inputs": TEXTS}).json()["outputs"]
        assert [len(each["scores"]) for each in outputs] == [2, 2]
        assert tensors(client, "my-bert", inputs=[TENSOR])["scores"]["shape"] == [2, 3]


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
    scores = tensors(client, "my-bert", inputs=[TENSOR], outputs=[{"name": "scores"}])["scores"]
    assert (scores["shape"], scores["datatype"]) == ([2, 3], "FP32")
    assert scores["data"] == near(np.ravel(probabilities(folder, *TEXTS)).tolist())
    assert "scores" not in tensors(client, "my-bert", inputs=[TENSOR])
    about = client.get("/v2/models/my-bert").json()["outputs"]
    assert {"name": "scores", "datatype": "FP32", "shape": [-1, 3]} in about


def test_classify_answers_as_vllm_and_sglang(client: DocumentedClient, folder: Path) -> None:
    for path in ("/classify", "/v1/classify"):
        reply = client.post(path, json={"model": "my-bert", "input": TEXTS, "user": "me", "priority": 0}).json()
        assert reply["id"].startswith("classify-")
        assert {name: reply[name] for name in ("object", "model")} == {"object": "list", "model": "my-bert"}
        for index, (each, row) in enumerate(zip(reply["data"], probabilities(folder, *TEXTS), strict=True)):
            best = LABELS[int(np.argmax(row))]
            assert each == {"index": index, "label": best, "probs": near(row), "num_classes": 3}
        tokens = {"prompt_tokens": 11, "total_tokens": 11, "completion_tokens": 0, "prompt_tokens_details": None}
        assert reply["usage"] == tokens
    (one,) = client.post("/classify", json={"input": TEXTS[0], "use_activation": False}).json()["data"]
    assert one["probs"] == near(logits(folder, TEXTS[0])[0].tolist())


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/classify", {"model": "other", "input": "good"}, 404, "the model 'other' does not exist: this is 'my-bert'"),
        ("/classify", {"input": [1, 2]}, 400, "input = [1, 2]: must be a text or a list of texts"),
        ("/classify", {"input": ["a", 2]}, 400, "(value 1 is no text)"),
        ("/classify", {"messages": []}, 400, "'messages' is not accepted; there are: model, "),
        ("/classify", {"input": LONG}, 400, "input 0 has more tokens than the network reads"),
        ("/classify", {"input": ["good"] * 5}, 400, "5 inputs in one request: 4 are allowed"),
        ("/classify", {"text": "good"}, 400, "'text' is not accepted"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, 400, "text_1 has 2 texts and text_2 has 1"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, 400, "top_n = -1"),
        ("/rerank", {"query": "a", "documents": [], "top_n": 1}, 400, "documents = []: "),
        ("/classify", {"input": []}, 400, "input = []: must be a text or at least one text in a list"),
        ("/score", {"text_1": "a", "text_2": []}, 400, "text_2 = []: must be"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, 400, "'max_tokens_per_doc' is not"),
        ("/rerank", {"query": "a"}, 400, "documents"),
        (
            "/rerank",
            {"query": "a", "documents": [{"text": "b", "id": 3}]},
            400,
            "documents = [{'id': 3, 'text': 'b'}]: ",
        ),
        ("/rerank", {"query": "a", "documents": ["b", {"text": 3}]}, 400, "(value 1 is neither)"),
        ("/score", {"text_1": "a"}, 400, "text_2 is missing"),
        ("/rerank", [], 400, "the body"),
    ],
)
def test_what_vllm_or_we_refuse(client: DocumentedClient, path: str, body: Any, status: int, sentence: str) -> None:
    reply = client.post(path, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], sentence in error["message"]) == (status, status, True), reply.text
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]


def test_a_text_that_is_too_long_is_cut_where_the_request_says_so(client: DocumentedClient) -> None:
    reply = client.post("/classify", json={"input": LONG, "truncate_prompt_tokens": -1})
    assert (reply.status_code, reply.json()["usage"]["prompt_tokens"]) == (200, 24)


def test_a_request_may_have_long_texts_cut_where_the_server_refuses_them_otherwise(folder: Path) -> None:
    vllm_asks, tei_asks = {"truncate_prompt_tokens": -1}, {"truncate": True}
    with serving(folder, relevant_label="LABEL_1", too_long="refuse", predict_form="tei") as client:
        for path, body, asks, refused in (
            ("/classify", {"input": LONG}, vllm_asks, 400),
            ("/rerank", {"query": QUERY, "documents": [LONG]}, vllm_asks, 400),
            ("/rerank", {"query": QUERY, "texts": [LONG]}, tei_asks, 422),
            ("/predict", {"inputs": LONG, "raw_scores": True}, tei_asks, 422),
        ):
            statuses = [client.post(path, json=body | more).status_code for more in ({}, asks)]
            assert statuses == [refused, 200], (path, body)


def test_score_answers_as_vllm(client: DocumentedClient, folder: Path) -> None:
    expected = [row[1] for row in probabilities(folder, *([QUERY, text] for text in TEXTS))]
    for names in (("text_1", "text_2"), ("queries", "documents")):
        for path in ("/score", "/v1/score"):
            reply = client.post(path, json=dict(zip(names, (QUERY, TEXTS), strict=True))).json()
            assert [each["score"] for each in reply["data"]] == near(expected)
            assert [(each["index"], each["object"]) for each in reply["data"]] == [(0, "score"), (1, "score")]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_answers_as_jina_cohere_and_vllm(client: DocumentedClient, folder: Path, path: str) -> None:
    scores = [row[1] for row in probabilities(folder, *([QUERY, text] for text in TEXTS))]
    order = sorted(range(2), key=lambda index: -scores[index])
    documents = [TEXTS[0], {"text": TEXTS[1]}]
    reply = client.post(path, json={"model": "my-bert", "query": QUERY, "documents": documents}).json()
    assert reply["results"] == [
        {"index": index, "relevance_score": near(scores[index]), "document": {"text": TEXTS[index]}} for index in order
    ]
    unset = dict.fromkeys(("max_tokens_per_doc", "rank_fields", "return_documents"))  # as LangChain sends them
    with_null = client.post(path, json={"query": QUERY, "documents": documents, **unset}).json()
    assert with_null["results"] == reply["results"]
    best = client.post(path, json={"query": QUERY, "documents": TEXTS, "top_n": 1, "return_documents": False}).json()
    assert best["results"] == [{"index": order[0], "relevance_score": near(scores[order[0]])}]
    assert best["usage"]["total_tokens"] > 10


def test_rerank_with_texts_answers_as_tei(client: DocumentedClient, folder: Path) -> None:
    rows = logits(folder, *([QUERY, text] for text in TEXTS))[:, 1].tolist()
    reply = client.post("/rerank", json={"query": QUERY, "texts": TEXTS, "raw_scores": True, "return_text": True})
    order = sorted(range(2), key=lambda index: -rows[index])
    expected = [{"index": index, "text": TEXTS[index], "score": near(rows[index])} for index in order]
    assert json.loads(reply.content) == expected
    without = json.loads(client.post("/rerank", json={"query": QUERY, "texts": TEXTS}).content)
    assert [set(each) for each in without] == [{"index", "score"}] * 2


def test_predict_answers_as_tei_where_asked(client: DocumentedClient, plain: DocumentedClient, folder: Path) -> None:
    (first, second), pair = probabilities(folder, *TEXTS), probabilities(folder, [QUERY, TEXTS[0]])[0]

    def expected(row: list[float]) -> list[dict[str, Any]]:
        return [{"score": near(row[label]), "label": LABELS[label]} for label in np.argsort(row)[::-1]]

    assert plain.post("/predict", json={"inputs": TEXTS[0]}).json() == expected(first)
    assert plain.post("/predict", json={"inputs": [[each] for each in TEXTS]}).json() == [
        expected(first), expected(second),
    ]  # fmt: skip
    assert plain.post("/predict", json={"inputs": [QUERY, TEXTS[0]]}).json() == expected(pair)
    raw = plain.post("/predict", json={"inputs": [[TEXTS[0]]], "raw_scores": True}).json()
    assert sorted(each["score"] for each in raw[0]) == near(sorted(logits(folder, TEXTS[0])[0].tolist()))
    marked = client.post("/predict", json={"inputs": TEXTS[0], "truncate": True})
    assert marked.json() == expected(first)


def test_predict_answers_the_inference_client_of_hugging_face(folder: Path) -> None:
    from huggingface_hub import InferenceClient

    row, raw = probabilities(folder, TEXTS[0])[0], logits(folder, TEXTS[0])[0]
    best = [LABELS[label] for label in np.argsort(row)[::-1]]
    for form in ("isobatch", "tei"):
        config = AppConfig(model=str(folder), predict_form=form)
        with in_a_thread(create_api(Service(config, time.perf_counter))) as url:
            client = InferenceClient(model=f"{url}/predict")
            answer = client.text_classification(TEXTS[0])
            assert [each.label for each in answer] == best
            assert [each.score for each in answer] == near(sorted(row, reverse=True))
            (first,) = client.text_classification(TEXTS[0], top_k=1, function_to_apply="none")
            assert (first.label, first.score) == (best[0], near(max(raw)))
            with pytest.raises(Exception, match="422"):
                client.text_classification(TEXTS[0], function_to_apply="sigmoid")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "sentence"),
    [
        (
            "/predict",
            {"inputs": ["a"], "parameters": [1]},
            422,
            "tokenizer",
            "parameters = [1]: Input should be an object",
        ),
        (
            "/predict",
            {"inputs": "a", "parameters": {"function_to_apply": "sigmoid"}},
            422,
            "tokenizer",
            "parameters.function_to_apply = 'sigmoid': for this network it must be softmax or none",
        ),
        ("/predict", {"inputs": ["a"], "parameters": {"top_k": 0}}, 422, "tokenizer", "parameters.top_k = 0: "),
        ("/predict", {"inputs": ["a"], "parameters": {"best": 1}}, 422, "tokenizer", "parameters.best = 1: "),
        ("/predict", {"inputs": [["a"]] * 5}, 413, "validation", "batch size 5 > maximum allowed batch size 4"),
        ("/predict", {"inputs": LONG, "truncate": False}, 413, "validation", "more tokens than the network reads"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, 422, "tokenizer", "must be a text, a pair of texts"),
        ("/predict", {"input": "a"}, 422, "tokenizer", "inputs"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 424, "backend", "is not a reranker (relevant_label: NAME"),
        ("/tokenize", {"inputs": ["a"] * 5}, 413, "validation", "batch size 5 > maximum allowed batch size 4"),
        ("/tokenize", {"inputs": 3}, 422, "tokenizer", "must be a text or a list of texts"),
        ("/tokenize", {"inputs": "a " * 2000}, 413, "validation", "a text has 4000 characters"),
    ],
)
def test_tei_refusals(plain: DocumentedClient, path: str, body: Any, status: int, kind: str, sentence: str) -> None:
    reply = plain.post(path, json=body)
    error = reply.json()
    assert (reply.status_code, error["error_type"], sentence in error["error"]) == (status, kind, True), reply.text


@pytest.mark.parametrize(
    ("path", "one", "many"),
    [("/rerank", "query", "documents"), ("/rerank", "query", "texts"), ("/score", "text_1", "text_2")],
)
def test_too_many_documents_are_refused_before_they_are_paired(
    client: DocumentedClient, path: str, one: str, many: str
) -> None:
    """Millions of pairs would take seconds, and a gigabyte."""
    body = json.dumps({one: "a", many: [""] * 400_000})
    tracemalloc.start()
    reply = client.post(path, content=body)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "400000" in reply.text
    assert most_bytes < 20 * len(body)


def test_a_list_of_wrong_values_has_one_error(client: DocumentedClient) -> None:
    """One for each of millions would take gigabytes."""
    body = json.dumps({"query": "a", "texts": [1] * 100_000})
    tracemalloc.start()
    reply = client.post("/rerank", content=body)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "texts.0 = 1: Input should be a valid string" in reply.text
    assert most_bytes < 50 * len(body)


def test_a_missed_deadline_has_each_originals_status(client: DocumentedClient, plain: DocumentedClient) -> None:
    late = {"X-Deadline-Ms": "0.001"}
    assert client.post("/classify", json={"input": "good"}, headers=late).status_code == 503
    for path, body in (("/predict", {"inputs": "good"}), ("/rerank", {"query": QUERY, "texts": TEXTS})):
        reply = plain.post(path, json=body, headers=late)
        expected = 429, "overloaded", True
        assert (reply.status_code, reply.json().get("error_type"), "retry-after" in reply.headers) == expected, path
    refused = (PredictForm.error(RefusedError(status, "late")) for status in (500, 503, 504))
    assert [each["error_type"] for each in refused] == ["backend", "overloaded", "overloaded"]


def test_tokenize_and_info_answer_as_tei(client: DocumentedClient, plain: DocumentedClient) -> None:
    (tokens,) = client.post("/tokenize", json={"inputs": "good film"}).json()
    assert [each["special"] for each in tokens] == [True, False, False, True]
    assert [(each["text"], each["start"], each["stop"]) for each in tokens[1:3]] == [("good", 0, 4), ("film", 5, 9)]
    assert tokens[0] == {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    bare = client.post("/tokenize", json={"inputs": ["good", "a film"], "add_special_tokens": False}).json()
    assert [len(each) for each in bare] == [1, 2]
    assert client.get("/info").json()["model_type"]["reranker"]["id2label"]["2"] == "LABEL_2"
    info = plain.get("/info").json()
    assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == ("my-bert", 24, 4)
    assert info["model_type"]["classifier"]["label2id"] == {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}


def test_info_names_no_largest_batch_where_a_plan_has_one_for_each_split() -> None:
    def largest(**fields: Any) -> int | None:
        service: Any = SimpleNamespace(
            config=AppConfig(model="m", **fields), labels=["no", "yes"], name="m", relevant=None, texts=None
        )
        return info(service).max_batch_requests

    assert (largest(max_batch=48), largest(plan="plan.json", profile="profile.json")) == (48, None)


def test_a_relevant_label_that_there_is_not_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(UserError, match="relevant_label = 'yes': the network's labels are LABEL_0, LABEL_1, LABEL_2"):
        serving(folder, relevant_label="yes")


def test_the_form_of_tei_is_refused_for_a_network_that_classifies_no_texts() -> None:
    with pytest.raises(UserError, match="for networks that classify texts, and this one labels images: leave it out"):
        served(predict_form="tei")


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

        def scores(**options: bool) -> list[float]:
            ranked = client.post("/rerank", json={"query": QUERY, "texts": TEXTS, **options}).json()
            return [each["score"] for each in sorted(ranked, key=lambda each: each["index"])]

        assert scores(raw_scores=True) == near(logits)
        assert scores() == near(torch.tensor(logits).sigmoid().tolist())
        (output,) = client.post("/predict", json={"inputs": [[QUERY, TEXTS[0]]]}).json()["outputs"]
        assert output["score"] == near(scores()[0])
        assert set(client.get("/info").json()["model_type"]) == {"reranker"}
