"""A served network that finds points: they come as transformers has them, over HTTP and as tensors."""

from collections.abc import Iterator

import numpy as np
import pytest

from isobatch.deployments.front.schemas import PREDICTIONS
from tests.helpers.documented import DocumentedClient, check_interface, served, tensors
from tests.helpers.grpc_client import inferred
from tests.helpers.tiny_pixels import png
from tests.helpers.tiny_points import GRID, NAMES, SIDES, point_network, reference, spots

PICTURES = spots(2, seed=9).pictures


@pytest.fixture(scope="module")
def client() -> Iterator[DocumentedClient]:
    with served(model=str(point_network()), name="spots", device="cpu", max_inputs=4) as client:
        yield client


def test_points_are_in_the_pictures_own_coordinates(client: DocumentedClient) -> None:
    maps, points = reference(PICTURES, point_network())
    for options in ({}, {"scores": "all"}):
        reply = client.post("/predict", json={"inputs": PICTURES.tolist()} | options)
        assert reply.status_code == 200, reply.text
        PREDICTIONS["keypoint-detection"].model_validate(reply.json())
        for output, heat, expected in zip(reply.json()["outputs"], maps, points, strict=True):
            assert [each["name"] for each in output["points"]] == list(NAMES)
            result = np.array([(each["x"], each["y"]) for each in output["points"]])
            assert np.abs(result - expected).max() < 1e-3
            surest = heat.max(axis=(1, 2))
            assert [each["score"] for each in output["points"]] == pytest.approx(surest, abs=1e-5)
            if options:
                assert [each["label"] for each in output["scores"]] == np.argsort(-surest).tolist()
    reply = client.post("/predict", content=png(PICTURES[0]), headers={"Content-Type": "image/png"})
    (output,) = reply.json()["outputs"]
    assert np.abs(np.array([(each["x"], each["y"]) for each in output["points"]]) - points[0]).max() < 1e-3


def test_tensors_hold_points_and_heat_maps(client: DocumentedClient) -> None:
    maps, points = reference(PICTURES, point_network())
    pixels = PICTURES.astype(np.float32)
    tensor = {"name": "inputs", "datatype": "FP32", "shape": [2, *SIDES, 3], "data": pixels.ravel().tolist()}
    names = "points", "label", "score", "scores", "exit_block"
    result = tensors(client, "spots", inputs=[tensor], outputs=[{"name": name} for name in names])
    assert result["points"]["shape"] == [2, len(NAMES), 2]
    assert np.abs(np.array(result["points"]["data"]) - points.ravel()).max() < 1e-3
    assert result["score"]["data"] == pytest.approx(maps.max(axis=(2, 3)).ravel(), abs=1e-5)
    assert result["scores"]["shape"] == [2, len(NAMES), *GRID]
    assert result["scores"]["data"] == pytest.approx(maps.ravel(), abs=1e-5)


def test_grpc_says_the_same() -> None:
    _, raw = inferred(point_network(), [2], list(map(png, PICTURES)))
    result, (_, points) = np.frombuffer(raw["points"], "<f4"), reference(PICTURES, point_network())
    assert np.abs(result - points.ravel()).max() < 1e-3


def test_maps_of_pixels_are_not_for_it(client: DocumentedClient) -> None:
    reply = client.post("/predict", json={"inputs": PICTURES[0].tolist(), "map": "png"})
    sentence = "'map' and 'size' are for networks that label pixels: this one labels points"
    assert (reply.status_code, reply.json()["error"]) == (400, sentence)


def test_the_document_describes_points(client: DocumentedClient) -> None:
    check_interface(client, "spots", "PointsOutput", "Point")
