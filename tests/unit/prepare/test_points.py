"""Networks that find points get bridges: what is read of files, and what is promised is the share of near points."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobatch import load
from isobatch.deployments.exits import five_best
from isobatch.deployments.map_tasks import Keypoints
from isobatch.deployments.points import points_of
from isobatch.deployments.prepare.bridges import PointSample
from isobatch.deployments.prepare.data import rows
from isobatch.deployments.prepare.sample import LabelNames, draw, labels_of
from isobatch.profiles.errors import UserError
from tests.helpers.made_once import made_once
from tests.helpers.preparing import check_exits, command, prepare_network
from tests.helpers.tiny_points import GRID, NAMES, READS, SIDES, point_network, spots

TASK, SCENES = Keypoints(GRID, READS), spots(200, seed=3)
NEAR = 0.05 * max(GRID)  # as `prepare` has it if the user says nothing


@made_once
def prepared_points(folder: Path) -> None:
    np.savez(folder / "a.npz", images=SCENES.pictures, labels=SCENES.points)
    prepare_network(folder, point_network(), folder / "a.npz", "10%", "--metric", "agreement")


@pytest.fixture
def prepared() -> Path:
    return prepared_points() / "out"


def places(answers: list[Any]) -> np.ndarray:
    return TASK.on_maps(np.array([each.label for each in answers]))


def near(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    close: np.ndarray = np.linalg.norm(first - second, axis=-1) <= NEAR
    return close


def test_what_is_promised_and_measured_is_what_the_network_answers(prepared: Path) -> None:
    model, data = load(prepared), prepared.parent / "a.npz"
    sample = draw(rows(data, channels=3), data, LabelNames(NAMES), 20_000, task=TASK)
    pictures, right = [sample.values[row] for row in sample.parts.test], sample.labels[sample.parts.test]
    exits, full = (model.predict(pictures, early) for early in (True, False))
    rules, same = check_exits(prepared, exits, 4), near(places(exits), places(full))
    assert (rules["kind"], rules["policy"], rules["tolerance"]) == ("bridge", f"{five_best.__module__}:five_best", NEAR)
    assert {(ramp["temperature"], ramp["ece_after"]) for ramp in rules["ramps"]} == {(1.0, None)}
    assert rules["promise"]["metric"] == "agreement"
    assert rules["promise"]["lost"] == pytest.approx(1 - same.mean(), abs=1e-6)
    assert rules["exit_accuracy"] == pytest.approx(near(places(exits), right).mean(), abs=1e-6)
    assert rules["full_accuracy"] == pytest.approx(near(places(full), right).mean(), abs=1e-6)
    assert rules["full_accuracy"] > 0.8


def test_a_picture_leaves_where_few_of_its_points_are_not_sure(prepared: Path) -> None:
    model = load(prepared)
    batch = model.encode(list(SCENES.pictures[:64]))
    pooled, _ = model.features(batch)
    with torch.inference_mode():
        best = model.ramps.logits(1, pooled[1]).topk(5, dim=1).values.mean(dim=1).reshape(64, -1)
    threshold, most = float(best.median()), model.ramps.rules.most_unsure
    leaving = ((best < threshold).sum(dim=1) <= most).nonzero().ravel().tolist()
    assert 0 < len(leaving) < 64
    assert model.run(batch, 2, {1: threshold}).exits.rows.tolist() == leaving


def test_evaluate_compares_points(prepared: Path, tmp_path: Path) -> None:
    fresh = spots(40, seed=5)
    labels = np.concatenate((fresh.points, np.full((40, len(NAMES), 1), 2)), axis=2)
    labels[:, 1, 2] = labels[0, :, 2] = 0  # points that are not there
    np.savez(tmp_path / "b.npz", images=fresh.pictures, labels=labels)
    evaluation = json.loads(command("evaluate", prepared, "--data", tmp_path / "b.npz", "--json").stdout)
    exits, full = (places(load(prepared).predict(list(fresh.pictures), early)) for early in (True, False))
    truth = read(tmp_path / "b.npz")
    assert evaluation["agreement"]["mean"] == pytest.approx(near(exits, full).mean())
    assert evaluation["accuracy"]["mean"] == pytest.approx(near(exits, truth)[1:, ::2].mean())
    assert evaluation["full_accuracy"]["mean"] == pytest.approx(near(full, truth)[1:, ::2].mean())


def test_predict_writes_points(prepared: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", images=SCENES.pictures[:3])
    command("predict", tmp_path / "b.npz", "--model", prepared, "--out", tmp_path / "b.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    answers = load(prepared).predict(list(SCENES.pictures[:3]))
    assert [TASK.parsed(line, NAMES) for line in lines] == [(each.label, NAMES, each.score) for each in answers]


def read(path: Path) -> np.ndarray:
    return labels_of(list(rows(path, channels=3)), path, LabelNames(NAMES), TASK)


def test_points_are_read_as_pairs_and_as_coco_has_them(tmp_path: Path) -> None:
    red, green, blue = [30, 20], [0, 0], [12.5, 40]
    labelled = [{"label": [red, green, blue]}, {"keypoints": [*red, 2, *green, 0, *blue, 1]}]
    result = []
    for number, label in enumerate(labelled):
        row = {"image": np.zeros((*SIDES, 3)).tolist(), **label}
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row) + "\n")
        result.append(read(tmp_path / f"{number}.jsonl")[0])
    assert np.isnan(result[1][1]).all()
    assert result[0][[0, 2]].tolist() == result[1][[0, 2]].tolist()
    cell = np.round(result[0][0]).astype(int)
    maps = np.zeros((1, *GRID), np.float32)
    maps[0, cell[1], cell[0]] = 1.0
    assert points_of(maps, SIDES, READS)[0] == pytest.approx(red, abs=2.0)


@pytest.mark.parametrize("label", [[1, 2], [[1, 2], [3, 4]], "left", [[1, 2, 3, 4]] * 3, [["a", "b"]] * 3])
def test_wrong_points_are_refused(tmp_path: Path, label: object) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"image": np.zeros((*SIDES, 3)).tolist(), "label": label}) + "\n")
    with pytest.raises(UserError, match="row 1: its label must be 3 points, each x and y, or x, y and 0"):
        read(tmp_path / "a.jsonl")


def test_without_labels_bridges_learn_the_full_networks_maps() -> None:
    model, pictures = load(point_network()), list(SCENES.pictures[:3])
    (seen,) = PointSample(model, pictures, None, TASK, 1.0).seen(np.array([2, 0]))
    assert torch.equal(seen.targets, seen.head)
    best = seen.head.argmax(dim=1)
    assert seen.truth.gather(1, best[:, None]).min() == 1
    assert 3 <= float(seen.truth.sum(dim=1).min()) <= float(seen.truth.sum(dim=1).max()) == 5  # a cell and those beside
