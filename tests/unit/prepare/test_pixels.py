"""Networks that label pixels get bridges: what is read of files, where bridges begin, and what is promised is kept."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.shared.scenes import scene_network
from isobatch import load
from isobatch.cluster.commands.shared_options import label_names
from isobatch.deployments.map_tasks import PixelClassification
from isobatch.deployments.prepare.bridges import PixelSample
from isobatch.deployments.prepare.data import Row, rows
from isobatch.deployments.prepare.sample import LabelNames, draw, labels_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exit_table import outcome
from isobatch.profiles.losses import MEAN_IOU, picture_iou
from tests.helpers.made_once import made_once
from tests.helpers.preparing import check_exits, command, prepare_network
from tests.helpers.tiny_pixels import GRID, NAMES, drawn, on_grid, pixel_network, reference_logits, rows_of

TASK = PixelClassification((GRID, GRID))
SCENES = drawn(100, seed=3)


@made_once
def prepared_pixels(folder: Path) -> None:
    np.savez(folder / "a.npz", images=SCENES.pictures, labels=SCENES.labels)
    prepare_network(folder, pixel_network(), folder / "a.npz", "10%")


@pytest.fixture
def prepared() -> Path:
    return prepared_pixels() / "out"


def maps(answers: list[Any]) -> np.ndarray:
    return np.array([each.label for each in answers])


@pytest.mark.long
def test_what_is_promised_and_measured_is_what_the_network_answers(prepared: Path) -> None:
    rules, model = json.loads((prepared / "exits.json").read_text()), load(prepared)
    data = prepared.parent / "a.npz"
    sample = draw(rows(data, channels=1), data, LabelNames(NAMES), 20_000, task=TASK)
    pictures = [sample.values[row] for row in sample.parts.test]
    truth = on_grid(SCENES.labels, GRID)
    assert sorted(map(tuple, sample.labels.tolist())) == sorted(map(tuple, truth.tolist()))
    exits, full = (model.predict(pictures, early) for early in (True, False))
    rules, same = check_exits(prepared, exits, 6), maps(exits) == maps(full)
    assert (rules["kind"], rules["promise"]["metric"]) == ("bridge", "agreement")
    assert rules["promise"]["lost"] == pytest.approx(1 - same.mean(), abs=1e-6)
    assert rules["agreement"] == pytest.approx(same.mean(), abs=1e-6)
    right = sample.labels[sample.parts.test]
    assert rules["exit_accuracy"] == pytest.approx((maps(exits) == right).mean(), abs=1e-6)
    assert rules["full_accuracy"] == pytest.approx((maps(full) == right).mean(), abs=1e-6)
    evidence = Evidence.read(prepared / EVIDENCE)
    chosen = evidence.nearest({each["block"]: each["threshold"] for each in rules["ramps"]})
    before, after = (picture_iou(right, maps(answers), len(NAMES)).mean() for answers in (full, exits))
    by_iou = outcome(evidence.for_metric(MEAN_IOU).test, chosen, MEAN_IOU)
    assert by_iou.lost.mean == pytest.approx(before - after, abs=1e-6)


def test_a_picture_leaves_where_few_of_its_pixels_are_not_sure(prepared: Path) -> None:
    model = load(prepared)
    first, most = model.ramps.rules.ramps[0], model.ramps.rules.most_unsure
    batch = model.encode(list(SCENES.pictures[:64]))
    pooled, _ = model.features(batch)
    with torch.inference_mode():
        logits = model.ramps.logits(0, pooled[0])
    unsure = ~model.ramps.decide(0, logits, torch.zeros(64, 0)).leaves.reshape(64, -1)
    leaving = (unsure.sum(dim=1) <= most).nonzero().ravel().tolist()
    assert model.run(batch, 1, [0]).exits.rows.tolist() == leaving
    assert first.block == 0


def test_a_bridge_begins_as_the_networks_own_first_blocks_and_head(tmp_path: Path) -> None:
    scene_network(tmp_path, steps=2, depths=(1, 1, 1))  # the first block of each region is the whole network
    model = load(tmp_path)
    pooled, logits = model.features(model.encode(list(SCENES.pictures[:3])))
    for block in range(2):
        with torch.inference_mode():
            assert torch.allclose(model.anatomy.bridge(block).eval()(pooled[block]), logits, atol=1e-5)


def test_evaluate_compares_maps(prepared: Path, tmp_path: Path) -> None:
    fresh = drawn(40, seed=5)
    labels = fresh.labels.copy()
    labels[:, :, :9] = 255  # pixels without a label
    np.savez(tmp_path / "b.npz", images=fresh.pictures, labels=labels)
    result = command("evaluate", prepared, "--data", tmp_path / "b.npz", "--json").stdout
    evaluation, model = json.loads(result), load(prepared)
    exits, full = (maps(model.predict(list(fresh.pictures), early)) for early in (True, False))
    truth = on_grid(labels, GRID)
    assert evaluation["agreement"]["mean"] == pytest.approx((exits == full).mean())
    assert evaluation["accuracy"]["mean"] == pytest.approx((exits == truth)[truth < 255].mean())
    before, after = (picture_iou(np.where(truth < 255, truth, -1), each, len(NAMES)).mean() for each in (full, exits))
    assert evaluation["scores"]["mean-iou"]["lost"]["mean"] == pytest.approx(before - after)
    assert evaluation["full_accuracy"]["mean"] == pytest.approx((full == truth)[truth < 255].mean())


def test_predict_writes_runs(prepared: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", images=SCENES.pictures[:3])
    arguments = ("predict", tmp_path / "b.npz", "--model", prepared, "--out")
    command(*arguments, tmp_path / "b.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    answers = load(prepared).predict(list(SCENES.pictures[:3]))
    assert [TASK.parsed(line, NAMES)[0] for line in lines] == [each.label for each in answers]
    with pytest.raises(UserError, match=r"gives many labels to each row: write .jsonl or .parquet"):
        command(*arguments, tmp_path / "b.csv")


AS_2_X_2 = LabelNames(NAMES), PixelClassification((2, 2))


def read(path: Path) -> list[list[int]] | None:
    labels = labels_of(list(rows(path, channels=1)), path, *AS_2_X_2)
    return None if labels is None else labels.tolist()


def test_maps_are_read_from_pictures_and_arrays(tmp_path: Path) -> None:
    labels = np.array([[1, 1, 5, 5], [1, 1, 5, 255]], np.uint8)
    Image.fromarray(labels).save(tmp_path / "map.png")
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "picture.png")
    (tmp_path / "a.csv").write_text("image,label\npicture.png,map.png\n")
    expected = [[1, 5, 1, -1]]
    assert read(tmp_path / "a.csv") == expected
    label = labels_of([Row(1, None, {"bytes": (tmp_path / "map.png").read_bytes()})], tmp_path / "a", *AS_2_X_2)
    assert label.tolist() == expected
    nested = json.dumps({"image": np.zeros((4, 4)).tolist(), "label": labels.tolist()})
    (tmp_path / "a.jsonl").write_text(nested + "\n")
    assert read(tmp_path / "a.jsonl") == expected
    np.savez(tmp_path / "a.npz", images=np.zeros((1, 4, 4)), labels=labels[None])
    assert read(tmp_path / "a.npz") == expected
    np.savez(tmp_path / "b.npz", images=np.zeros((1, 4, 4)))
    assert read(tmp_path / "b.npz") is None


def test_maps_count_from_one_where_the_preprocessor_takes_zero_for_no_label(tmp_path: Path) -> None:
    """As those of ADE20K, in which SegFormer and BEiT were trained."""
    processor = tmp_path / "preprocessor_config.json"
    shutil.copyfile(pixel_network() / "config.json", tmp_path / "config.json")
    for settings, expected in (({"do_reduce_labels": True}, [[-1, 0], [4, -1]]), ({}, [[0, 1], [5, -1]])):
        processor.write_text(json.dumps(settings))
        names, label = label_names(tmp_path, None), np.array([[0, 1], [5, 255]])
        result = labels_of([Row(1, np.zeros((4, 4)), label)], tmp_path / "a", names, AS_2_X_2[1])
        assert result.tolist() == [np.ravel(expected).tolist()]
    processor.write_text(json.dumps({"reduce_labels": True}))
    most = len(NAMES)
    with pytest.raises(UserError, match=f"label {most + 1} of a pixel does not fit the head"):
        labels_of([Row(1, None, np.array([[most, most + 1]]))], tmp_path / "a", label_names(tmp_path, None), TASK)


def test_maps_of_turned_photos_are_refused(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # its top is on the right
    Image.fromarray(np.zeros((2, 4), np.uint8)).save(tmp_path / "photo.png", exif=turned)
    Image.fromarray(np.zeros((2, 4), np.uint8)).save(tmp_path / "map.png")
    Image.fromarray(np.zeros((4, 2), np.uint8)).save(tmp_path / "upright.png")
    (tmp_path / "a.csv").write_text("image,label\nphoto.png,upright.png\n")
    assert read(tmp_path / "a.csv") == [[0, 0, 0, 0]]
    (tmp_path / "a.csv").write_text("image,label\nphoto.png,map.png\n")
    with pytest.raises(UserError, match=r"row 1: its labels are 2 x 4, its picture is 4 x 2 upright: turn the labels"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (np.full((1, 2, 2), 11), "row 1: label 11 of a pixel does not fit the head; it knows background, 0, 1"),
        (np.full((1, 2, 2), 0.5), "row 1: its labels must be a map of height x width whole numbers"),
        (np.zeros(1, int), "row 1: its labels must be a map of height x width whole numbers"),
    ],
)
def test_wrong_maps_are_refused(tmp_path: Path, labels: np.ndarray, sentence: str) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((1, 4, 4)), labels=labels)
    with pytest.raises(UserError) as error:
        read(tmp_path / "a.npz")
    assert sentence in str(error.value)


def test_without_labels_bridges_learn_the_full_networks_map() -> None:
    model, pictures, rows = load(pixel_network()), list(SCENES.pictures[:3]), np.array([2, 0])
    (alone,) = PixelSample(model, pictures, None).seen(rows)
    expected = rows_of(reference_logits(SCENES.pictures[[2, 0]]))
    assert np.allclose(alone.targets, expected.softmax(dim=1), atol=1e-5)
    assert alone.truth.argmax(dim=1).tolist() == expected.argmax(dim=1).tolist()
    labels = np.full((3, GRID * GRID), -1)
    labels[2, 5], labels[0, 0] = 4, 1
    (labelled,) = PixelSample(model, pictures, labels).seen(rows)
    places = [5, GRID * GRID]
    assert labelled.truth.nonzero().tolist() == labelled.targets.nonzero().tolist() == [[places[0], 4], [places[1], 1]]


def test_a_promise_of_mean_iou_holds_of_the_tested_pictures(prepared: Path) -> None:
    evidence = Evidence.read(prepared / EVIDENCE).for_metric(MEAN_IOU)
    leaving = outcome(evidence.test, evidence.prepared, MEAN_IOU)
    assert leaving.cost < 1
    assert evidence.shows(leaving.lost)
    assert float(evidence.test.losses(MEAN_IOU)[leaving.places, np.arange(evidence.test.num_inputs)].mean()) == (
        pytest.approx(leaving.lost.mean)
    )
    without = replace(evidence, test=replace(evidence.test, iou=None))
    with pytest.raises(UserError, match="--metric mean-iou is for networks that label pixels"):
        without.for_metric(MEAN_IOU)
