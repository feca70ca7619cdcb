"""A ViTPose that finds points, cut anywhere: its heat maps and points are those of transformers."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from isobatch.deployments.models import TorchModel, load
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.ramps import ExitRules, RampRule, Ramps
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.points import on_maps, points_of
from isobatch.deployments.transport.packed import pack
from tests.helpers.backend_parity import assert_same, run_in_splits
from tests.helpers.tiny_points import GRID, NAMES, READS, SIDES, point_network, random_network, reference, spots

PICTURES = spots(5, seed=9).pictures


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return load(point_network())


@pytest.mark.parametrize("kind", ["simple", "classic", "experts", "early"])
def test_every_cut_equals_the_uncut_network(kind: str) -> None:
    folder = point_network() if kind == "simple" else random_network(kind)
    model, (expected, _) = load(folder), reference(PICTURES, folder)
    assert model.num_blocks == (3 if kind == "early" else 4)
    for count in (0, 1, 2):
        for cuts in combinations(range(1, model.num_blocks), count):
            exits = run_in_splits(model, model.encode(list(PICTURES)), cuts)
            assert exits.counts.tolist() == [len(NAMES)] * len(PICTURES)
            assert np.abs(exits.logits.reshape(expected.shape) - expected).max() < 1e-5


def test_points_are_in_the_pictures_own_coordinates(model: TorchModel) -> None:
    maps, points = reference(PICTURES, point_network())
    for answer, picture_maps, expected in zip(model.predict(list(PICTURES)), maps, points, strict=True):
        assert (answer.exit_block, answer.name, answer.words) == (3, NAMES, SIDES)
        output = model.task.output(answer, NAMES)["points"]
        assert np.abs(np.array([(each["x"], each["y"]) for each in output]) - expected).max() < 1e-3
        assert [each["score"] for each in output] == pytest.approx(picture_maps.max(axis=(1, 2)), abs=1e-5)
        assert [each["cell"] for each in output] == picture_maps.reshape(len(NAMES), -1).argmax(axis=1).tolist()


def test_a_place_in_a_picture_is_where_its_heat_map_is_largest() -> None:
    places = np.array([[20.0, 12.0], [44.0, 50.0]], np.float32)
    x, y = on_maps(places, SIDES, READS, GRID).T
    lines, columns = np.mgrid[: GRID[0], : GRID[1]]
    maps = np.exp(-((columns - x[:, None, None]) ** 2 + (lines - y[:, None, None]) ** 2) / 8).astype(np.float32)
    assert points_of(maps, SIDES, READS) == pytest.approx(places, abs=0.1)


def test_a_bridge_begins_as_the_networks_own_head(model: TorchModel) -> None:
    pooled, _ = model.features(model.encode(list(PICTURES)))
    with torch.inference_mode():
        for block, tokens in enumerate(pooled):
            assert torch.equal(model.anatomy.bridge(block).eval()(tokens), model.anatomy.head(tokens))


def test_audits_compare_places_not_numbers_of_cells(model: TorchModel) -> None:
    exits = model.run(model.encode(list(PICTURES)), 4, ()).exits
    for cells, points in zip((label for label, _ in exits.answers()), exits.comparable, strict=True):
        assert isinstance(cells, tuple)
        assert points == tuple(complex(*divmod(cell, GRID[1])) for cell in cells)


def test_onnx_runtime_gives_the_same_maps_and_bridges(model: TorchModel, cache: Path) -> None:
    heads = {block: model.anatomy.bridge(block).eval() for block in (0, 2)}
    rules = [RampRule(block=block, threshold=0.3) for block in heads]
    policy = "isobatch.deployments.exits:five_best"
    exact = model.with_ramps(Ramps(ExitRules(kind="bridge", policy=policy, ramps=tuple(rules), most_unsure=1), heads))
    batch = exact.encode(list(PICTURES))
    served = OnnxModel(exact, "spots", cache=cache)
    served.prepare([BlockRange(0, 3, (0, 2)), BlockRange(0, 3), BlockRange(3, 4), BlockRange(0, 4)], batch)
    for stop, ramps in ((4, ()), (3, (0, 2))):
        assert_same(exact.run(batch, stop, ramps), served.run(batch, stop, ramps))


def test_the_sides_of_a_picture_stay_where_it_was_encoded(model: TorchModel) -> None:
    assert pack(model.encode(list(PICTURES))).words == (SIDES,) * len(PICTURES)
