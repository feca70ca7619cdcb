"""The Open Inference Protocol: the same answers as /predict, as JSON and as bytes."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.bodies import Sizes
from isobatch.deployments.front.examples import example_of
from isobatch.deployments.front.open_inference.protocol import metadata, model_of
from isobatch.deployments.front.open_inference.tensors import JSON_BYTES_HEADER, TensorRequest, read, write
from isobatch.deployments.front.service import Service
from tests.helpers.documented import TOY, TOY_OF_TEXTS, served

INFER = "/v2/models/toy/infer"
SIZES = Sizes(max_inputs=256, max_bytes=2**24)
BEST_TWO = ["0.690568:7:7", "0.034381:0:0", "0.690568:3:3", "0.034381:0:0"]  # of inputs with the labels 7 and 3


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served() as client:
        yield client


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "inputs", "shape": [2, 2], "datatype": "INT64", "data": [[4, 7], [0, 3]], **changes}


def classified(count: Any, output: str = "scores", **parameters: Any) -> dict[str, Any]:
    wanted = {"name": output, "parameters": {"classification": count, **parameters}}
    return {"inputs": [tensor()], "outputs": [wanted]}


def test_json_in_json_out(client: TestClient) -> None:
    reply = client.post(INFER, json={"id": "7", "inputs": [tensor()]}).json()
    assert (reply["model_name"], reply["id"]) == ("toy", "7")
    result = {each["name"]: each for each in reply["outputs"]}
    assert result["label"] == {"name": "label", "shape": [2], "datatype": "INT64", "data": [7, 3]}
    assert result["exit_block"]["data"] == [3, 0]
    assert result["name"] == {"name": "name", "shape": [2], "datatype": "BYTES", "data": ["7", "3"]}


def test_statistics_of_all_models_are_those_of_the_one(client: TestClient) -> None:
    every, one = (client.get(f"/v2/models/{path}").json() for path in ("stats", "toy/stats"))
    assert every == one
    assert every["model_stats"][0]["name"] == "toy"


def test_bytes_in_bytes_out(client: TestClient) -> None:
    raw = np.array([[4, 7], [0, 3]], "<i4").tobytes()
    about = tensor(datatype="INT32", parameters={"binary_data_size": len(raw)})
    del about["data"]
    outputs = [{"name": "label", "parameters": {"binary_data": True}}, {"name": "exit_block"}]
    text = json.dumps({"inputs": [about], "outputs": outputs}).encode()
    reply = client.post(INFER, content=text + raw, headers={JSON_BYTES_HEADER: str(len(text))})
    end = int(reply.headers[JSON_BYTES_HEADER])
    label, exit_block = json.loads(reply.content[:end])["outputs"]
    assert label["parameters"] == {"binary_data_size": 16}
    assert np.frombuffer(reply.content[end:], "<i8").tolist() == [7, 3]
    assert exit_block["data"] == [3, 0]


def test_the_best_labels_of_each_input_are_texts(client: TestClient) -> None:
    reply = client.post(INFER, json=classified(2)).json()
    assert reply["outputs"] == [{"name": "scores", "shape": [2, 2], "datatype": "BYTES", "data": BEST_TWO}]
    reply = client.post(INFER, json=classified(2, binary_data=True))
    end, raw = int(reply.headers[JSON_BYTES_HEADER]), b"".join(b"\x0c\0\0\0" + each.encode() for each in BEST_TWO)
    (scores,) = json.loads(reply.content[:end])["outputs"]
    assert scores == {
        "name": "scores", "shape": [2, 2], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}
    }  # fmt: skip
    assert reply.content[end:] == raw


@pytest.mark.parametrize("count", [10, 11, 2**70])
def test_more_labels_than_there_are_mean_all(client: TestClient, count: int) -> None:
    (scores,) = client.post(INFER, json=classified(count)).json()["outputs"]
    others = [f"0.034381:{label}:{label}" for label in range(10)]
    assert scores["shape"] == [2, 10]
    assert scores["data"] == [BEST_TWO[0], *others[:7], *others[8:], BEST_TWO[2], *others[:3], *others[4:]]


def test_health_and_metadata(client: TestClient) -> None:
    assert client.get("/v2/models/toy").json()["properties"] == {"promise": "nothing is promised about losses by exits"}
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/toy/ready", "/v2/models/toy/versions/1/ready"):
        assert client.get(path).status_code == client.head(path).status_code == 200, path
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models/toy/ready").json() == {"name": "toy", "ready": True}
    extensions = ["classification", "binary_tensor_data", "model_configuration", "statistics"]
    assert client.get("/v2").json()["extensions"] == extensions
    about = client.get("/v2/models/toy").json()
    assert [output["name"] for output in about["outputs"]] == ["label", "score", "exit_block", "name", "scores"]
    assert client.get("/v2/models/toy/config").json()["max_batch_size"] == 256
    assert "no model 'other'" in client.get("/v2/models/other").json()["error"]


@pytest.mark.parametrize(("own", "binary"), [({}, True), ({"parameters": {"binary_data": False}}, False)])
def test_an_output_is_binary_as_its_own_parameter_or_else_the_request_tells(own: dict[str, Any], binary: bool) -> None:
    outputs, about = [{"name": "label", **own}], {"binary_data_output": True}
    request = read(json.dumps({"inputs": [tensor()], "outputs": outputs, "parameters": about}).encode(), None, SIZES)
    assert request.outputs == {"label": binary}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "one tensor"),
        ({"inputs": [tensor(), tensor()]}, "one tensor"),
        ({"inputs": [tensor(datatype="INT7")]}, "'INT7' is not known"),
        ({"inputs": [tensor(shape=[2, 3])]}, "does not hold INT64 of shape [2, 3]"),
        ({"inputs": [tensor(shape=[-1])]}, "must be a list of sizes"),
        ({"inputs": [tensor(data=[["a", 1], [2, 3]])]}, "does not hold INT64"),
        ({"inputs": [tensor(data=[["7", 1], [2, 3]])]}, "its data are not numbers of INT64"),
        ({"inputs": [tensor(datatype="BYTES", data=["a", 1, "b", "c"])]}, "value 1 of its data is no text"),
        ({"inputs": [tensor(data=[[1.9, 1], [2, 3]])]}, "1.9 is not of type INT64"),
        ({"inputs": [tensor(datatype="UINT8", data=[[1, 300], [2, 3]])]}, "300 is not of type UINT8"),
        ({"inputs": [tensor(parameters={"binary_data_size": 5})]}, "binary_data_size is 5, but 0 bytes follow"),
        ({"inputs": [tensor()], "outputs": [{"name": "logits"}]}, "no output 'logits'; there are: label"),
        (classified(3, "label"), "'label': this output has no score for each label; outputs that have: scores"),
        (classified(0), "classification = 0 of output 'scores': the number must be 1 or more"),
        (classified(-1), "classification = -1 of output 'scores': the number must be 1 or more"),
        (classified("3"), "outputs.0.parameters.classification = '3': Input should be a valid integer"),
        (classified(True), "outputs.0.parameters.classification = True: Input should be a valid integer"),
        (classified(1.5), "outputs.0.parameters.classification = 1.5: Input should be a valid integer"),
        (classified(3, "logits"), "no output 'logits'; there are: label"),
    ],
)
def test_errors_name_the_wrong_value(client: TestClient, body: dict[str, Any], sentence: str) -> None:
    reply = client.post(INFER, json=body)
    assert (reply.status_code, sentence in reply.json()["error"]) == (400, True), reply.text


@given(st.lists(st.text(), min_size=1))
def test_texts_travel_as_bytes_and_come_back(texts: list[str]) -> None:
    raw = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
    about = tensor(shape=[len(texts), 1], datatype="BYTES", parameters={"binary_data_size": len(raw)})
    del about["data"]
    text = json.dumps({"inputs": [about]}).encode()
    assert read(text + raw, str(len(text)), SIZES).values == texts
    body, end = write(TensorRequest([], None, {"name": True}, False), "toy", {"name": texts})
    assert body[end:] == raw


@given(st.binary(max_size=60), st.none() | st.integers(0, 70).map(str))
def test_no_body_breaks_the_reader(body: bytes, header: str | None) -> None:
    with pytest.raises(RefusedError):
        read(body, header, SIZES)


def test_a_text_that_was_cut_is_marked_in_its_own_output() -> None:
    with served(**TOY_OF_TEXTS) as client:
        outputs = client.get("/v2/models/toy").json()["outputs"]
        assert outputs[-1] == {"name": "truncated", "datatype": "BOOL", "shape": [-1]}
        assert client.get("/v2/models/toy/config").json()["output"][-1] == {"name": "truncated"}
        fields = {"name": "inputs", "shape": [2], "datatype": "BYTES", "data": ["0 3", "0 4 and more"]}
        answer = client.post(INFER, json={"inputs": [fields]}).json()["outputs"][-1]
        assert answer == {"name": "truncated", "shape": [2], "datatype": "BOOL", "data": [False, True]}


@pytest.mark.parametrize(
    ("files", "shape"),
    [
        ({}, [-1, -1, -1]),
        ({"config.json": {"num_channels": 3, "image_size": 32}}, [-1, 32, 32, 3]),
        ({"config.json": {"num_channels": 1, "image_size": [16, 24]}}, [-1, 16, 24]),
        ({"config.json": {"num_channels": 3}}, [-1, 224, 224, 3]),
        (
            {"config.json": {"num_channels": 3}, "preprocessor_config.json": {"size": {"shortest_edge": 48}}},
            [-1, 48, 48, 3],
        ),
        ({"config.json": {"num_channels": 3, "image_size": 32, "backbone_config": None}}, [-1, 32, 32, 3]),
        (
            {
                "cascade.json": {"levels": [{"folder": f"level-{n}", "blocks": 2} for n in (0, 1)]},
                "level-0/config.json": {"num_channels": 3, "image_size": 40},
            },
            [-1, 40, 40, 3],
        ),
    ],
)
def test_the_size_of_images_is_described(tmp_path: Path, files: dict[str, Any], shape: list[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    config = AppConfig.model_validate(TOY | {"model": str(tmp_path)})
    about = metadata(model_of(Service(config, time.perf_counter)))
    assert about["inputs"] == [{"name": "inputs", "datatype": "FP32", "shape": shape}]
    example = example_of(tmp_path).value
    assert example is None or np.shape(example) == tuple(shape[1:])
