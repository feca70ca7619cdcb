"""A served network that labels pixels: maps in every form and at any size are those of transformers."""

import base64
import time
from collections.abc import Iterator
from io import BytesIO
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from grpc.aio import AioRpcError
from PIL import Image

from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.load import LongWork
from isobatch.deployments.front.predict import OwnForm
from isobatch.deployments.front.schemas import PREDICTIONS
from isobatch.deployments.front.service import Service
from tests.helpers.documented import DocumentedClient, check_interface, served, tensors
from tests.helpers.grpc_client import LOADER, inferred
from tests.helpers.grpc_client import asked as asked_over_grpc
from tests.helpers.tiny_pixels import GRID, NAMES, drawn, pixel_network, png, reference_logits

PICTURES = drawn(2, seed=9).pictures


@pytest.fixture(scope="module")
def client() -> Iterator[DocumentedClient]:
    with served(model=str(pixel_network()), name="scenes", device="cpu", max_inputs=4) as client:
        yield client


def maps(size: tuple[int, int] = (GRID, GRID)) -> np.ndarray:
    grown = torch.nn.functional.interpolate(reference_logits(PICTURES), size, mode="bilinear", align_corners=False)
    labels: np.ndarray = grown.argmax(dim=1).numpy()
    return labels


def asked(client: DocumentedClient, **options: Any) -> list[dict[str, Any]]:
    reply = client.post(
        "/predict", json={"inputs": [base64.b64encode(png(each)).decode() for each in PICTURES]} | options
    )
    assert reply.status_code == 200, reply.text
    PREDICTIONS["semantic-segmentation"].model_validate(reply.json())
    outputs: list[dict[str, Any]] = reply.json()["outputs"]
    return outputs


def test_a_map_comes_as_runs_of_the_networks_own_size(client: DocumentedClient) -> None:
    for output, expected in zip(asked(client), maps(), strict=True):
        assert (output["height"], output["width"]) == (GRID, GRID)
        labels, lengths = zip(*output["runs"], strict=True)
        assert np.repeat(labels, lengths).tolist() == expected.ravel().tolist()
        shares = {each["name"]: each["share"] for each in output["labels"]}
        assert shares == {NAMES[label]: (expected == label).mean() for label in np.unique(expected)}
        assert list(shares.values()) == sorted(shares.values(), reverse=True)
        assert output["exit_block"] == 5
    probabilities = reference_logits(PICTURES).softmax(dim=1)
    for output, each in zip(asked(client, scores="all"), probabilities, strict=True):
        assert output["score"] == pytest.approx(float(each.amax(dim=0).mean()), abs=1e-5)
        by_label = {score["label"]: score["score"] for score in output["scores"]}
        assert [by_label[label] for label in range(len(NAMES))] == pytest.approx(each.mean(dim=(1, 2)), abs=1e-5)


@pytest.mark.parametrize("form", ["runs", "png", "array"])
def test_a_client_chooses_form_and_size(client: DocumentedClient, form: str) -> None:
    for output, expected in zip(asked(client, map=form, size=[48, 30]), maps((48, 30)), strict=True):
        assert (output["height"], output["width"]) == (48, 30)
        if form == "png":
            result = np.asarray(Image.open(BytesIO(base64.b64decode(output["png"]))))
        elif form == "array":
            result = np.array(output["array"])
        else:
            labels, lengths = zip(*output["runs"], strict=True)
            result = np.repeat(labels, lengths).reshape(48, 30)
        assert (result == expected).mean() > 0.999  # a pixel between two labels may fall to either side
        assert {"runs", "png", "array"} & output.keys() == {form}


def test_pictures_come_as_bytes_and_in_forms(client: DocumentedClient) -> None:
    content = png(PICTURES[0])
    (output,) = client.post("/predict", content=content, headers={"Content-Type": "image/png"}).json()["outputs"]
    assert output["runs"] == asked(client)[0]["runs"]
    form = {"file": ("a.png", content, "image/png")}
    (output,) = client.post("/predict", files=form, data={"map": "array", "size": "[4, 6]"}).json()["outputs"]
    assert output["array"] == maps((4, 6))[0].tolist()


def test_tensors_hold_maps(client: DocumentedClient) -> None:
    pixels = PICTURES[..., None].astype(np.float32)
    tensor = {"name": "inputs", "datatype": "FP32", "shape": list(pixels.shape), "data": pixels.ravel().tolist()}
    names = "label", "score", "scores", "exit_block"
    result = tensors(client, "scenes", inputs=[tensor], outputs=[{"name": name} for name in names])
    assert result["label"]["shape"] == [2, GRID, GRID]
    assert result["label"]["data"] == maps().ravel().tolist()
    expected = reference_logits(PICTURES).softmax(dim=1).permute(0, 2, 3, 1)
    assert result["scores"]["shape"] == list(expected.shape)
    assert result["scores"]["data"] == pytest.approx(expected.ravel().tolist(), abs=1e-5)
    assert result["score"]["data"] == pytest.approx(expected.amax(dim=3).ravel().tolist(), abs=1e-5)


def test_maps_have_no_best_labels(client: DocumentedClient) -> None:
    pixels = PICTURES[..., None].astype(np.float32)
    tensor = {"name": "inputs", "datatype": "FP32", "shape": list(pixels.shape), "data": pixels.ravel().tolist()}
    outputs = [{"name": "scores", "parameters": {"classification": 2}}]
    reply = client.post("/v2/models/scenes/infer", json={"inputs": [tensor], "outputs": outputs})
    reason = "this output has no score for each label; outputs that have: none"
    assert (reply.status_code, reply.json()["error"]) == (400, f"classification = 2 of output 'scores': {reason}")
    assert "classification" not in client.get("/v2").json()["extensions"]


def test_grpc_says_the_same() -> None:
    _, raw = inferred(pixel_network(), [2], list(map(png, PICTURES)))
    assert np.frombuffer(raw["label"], "<i8").tolist() == maps().ravel().tolist()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"map": "jpeg"}, "'map' is 'jpeg': it must be one of runs, png, array"),
        ({"size": [0, 4]}, "'size' is [0, 4]: it must be [height, width], 4194304 pixels at most"),
        ({"size": [4096, 4096]}, "'size' is [4096, 4096]: it must be [height, width], 4194304 pixels at most"),
        ({"size": 32}, "'size' is 32: it must be [height, width], 4194304 pixels at most"),
    ],
)
def test_wrong_forms_and_sizes_are_refused(client: DocumentedClient, options: dict[str, Any], sentence: str) -> None:
    reply = client.post("/predict", json={"inputs": PICTURES[0].tolist()} | options)
    assert (reply.status_code, reply.json()["error"]) == (400, sentence)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("map", "", "'map' is '': it must be one of runs, png, array"),
        ("size", "480x640", "'size' is '480x640': it must be [height, width], 4194304 pixels at most"),
    ],
)
def test_a_wrong_field_of_a_form_is_named(client: DocumentedClient, field: str, value: str, sentence: str) -> None:
    form = {"file": ("a.png", png(PICTURES[0]), "image/png")}
    reply = client.post("/predict", files=form, data={field: value})
    assert (reply.status_code, reply.json()["error"]) == (400, sentence)


def test_the_maps_of_a_request_have_a_limit_together(client: DocumentedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.deployments.front.predict.MOST_TOGETHER", 2 * 48 * 30)
    inputs = [each.tolist() for each in PICTURES]
    for size, status in (([48, 30], 200), ([48, 31], 422)):
        reply = client.post("/predict", json={"inputs": inputs, "size": size})
        assert reply.status_code == status, reply.text
    assert reply.json()["error"] == "the maps have 2976 pixels together: 2880 are allowed"


def test_the_values_between_which_maps_are_chosen_have_a_limit(
    client: DocumentedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiniest pictures may ask for the largest maps."""
    labels = len(NAMES)
    monkeypatch.setattr("isobatch.deployments.front.predict.MOST_COMPARED", 2 * 48 * 30 * labels)
    inputs = [each.tolist() for each in PICTURES]
    for size, status in (([48, 30], 200), ([48, 31], 422)):
        reply = client.post("/predict", json={"inputs": inputs, "size": size})
        assert reply.status_code == status, reply.text
    sentence = f"the maps have 2976 pixels together, of {labels} labels: {2976 * labels} values"
    assert reply.json()["error"] == f"{sentence}, and {2880 * labels} are allowed"


async def test_maps_are_not_written_once_their_client_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    latest, run = list[float](), LongWork.run

    async def noted(self: LongWork, work: Any, latest_s: float = inf, *arguments: Any) -> Any:
        latest.append(latest_s)
        return await run(self, work, latest_s, *arguments)

    monkeypatch.setattr(LongWork, "run", noted)
    service = Service(AppConfig(model=str(pixel_network()), device="cpu", slo_ms=60_000), time.perf_counter)
    await service.open()
    form, began_s = OwnForm(service), time.perf_counter()
    await service.answer(service.register("predict", 0, {}), lambda: form.read({"inputs": PICTURES[0].tolist()}))
    await service.close()
    assert began_s < latest[-1] <= began_s + 61


@pytest.mark.parametrize("spare", [0, -1])
async def test_the_scores_of_maps_are_no_more_values_than_a_body_may_have_bytes(spare: int) -> None:
    values = 2 * GRID * GRID * len(NAMES)
    fields = {"model": str(pixel_network()), "name": "scenes", "device": "cpu", "max_body_bytes": values + spare}
    sent = [png(np.zeros_like(PICTURES[0]))] * 2  # small bodies
    sentence = f"output 'scores' has {values} values: {values - 1} are allowed; leave it out"
    tensor: dict[str, Any] = {"name": "inputs", "datatype": "BYTES", "shape": [2]}
    with served(**fields) as client:
        for name, refused in (("scores", bool(spare)), ("label", False)):
            data = [base64.b64encode(each).decode() for each in sent]
            body = {"inputs": [tensor | {"data": data}], "outputs": [{"name": name}]}
            reply = client.post("/v2/models/scenes/infer", json=body)
            assert (reply.status_code, reply.json().get("error")) == ((422, sentence) if refused else (200, None))
    async with asked_over_grpc(**fields, loader=LOADER) as grpc:
        tensor["contents"] = {"bytes_contents": sent}
        request = {"model_name": "scenes", "inputs": [tensor], "outputs": [{"name": "scores"}]}
        if spare:
            with pytest.raises(AioRpcError, match=sentence):
                await grpc.ask("ModelInfer", **request)
        else:
            await grpc.ask("ModelInfer", **request)


def test_the_document_describes_maps(client: DocumentedClient) -> None:
    check_interface(client, "scenes", "MapOutput", "LabelShare")
