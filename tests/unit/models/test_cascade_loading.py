"""A cascade on disk: its levels are checkpoints in folders beside cascade.json, and what does not fit is one line."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from isobatch import load
from isobatch.deployments.folders import weights_of
from isobatch.deployments.models import Cascade, checkpoint, load_served
from isobatch.deployments.models import load as load_network
from isobatch.deployments.models.cascade_loading import load_cascade
from isobatch.deployments.models.levels import checkpoints_of
from isobatch.profiles.errors import UserError
from tests.helpers.cascade_directories import cascade_directory, edit

TEXTS = ["the film is good", "dull", "not bad but not great and not dull"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return cascade_directory(tmp_path)


def test_it_is_what_its_networks_say_by_hand(folder: Path) -> None:
    model = load_cascade(folder)
    assert (model.num_blocks, model.edges, model.ramp_blocks) == (7, (4,), (1, 3))
    assert model.labels == ("good", "bad", "so so")
    small, large = (load_network(place) for place in checkpoints_of(folder))
    exits = model.run(model.encode(TEXTS), model.num_blocks, ()).exits
    one, two = (each.run(each.encode(TEXTS), each.num_blocks, ()).exits.logits for each in (small, large))
    p1, p2 = softmax(one[:, [1, 0, 2]] / 1.5), softmax(two / 2.0)
    assert exits.probabilities == pytest.approx(0.7 * p2 + 0.3 * p1, abs=1e-4)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def test_levels_that_read_alike_encode_once(folder: Path) -> None:
    first, second = load_cascade(folder).levels
    assert first.encoder is second.encoder
    batch = load_cascade(folder).encode(TEXTS)
    assert batch.arrays["input_ids"] is batch.ahead.arrays["input_ids"]
    edit(folder / "level-1" / "tokenizer_config.json", model_max_length=7)
    first, second = load_cascade(folder).levels
    assert first.encoder is not second.encoder
    assert load_cascade(folder).encode(TEXTS).truncated == {2}


def test_whatever_answers_takes_either_kind_of_directory(folder: Path) -> None:
    assert isinstance(load(folder), Cascade)
    assert len(load(folder).predict(TEXTS)) == 3
    assert not isinstance(load_served(folder / "level-0"), Cascade)
    assert checkpoint.label_names(folder) == ["good", "bad", "so so"]
    assert not checkpoint.reads_images(folder)


def test_other_weights_at_any_level_are_another_network(folder: Path) -> None:
    before = weights_of(folder)
    assert before
    shutil.copy(folder / "level-1" / "model.safetensors", folder / "level-0" / "model.safetensors")
    assert weights_of(folder) != before


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("cascade.json", {"levels": []}, "levels"),
        ("cascade.json", {"level": 1}, "level"),
        ("cascade.json", {"levels": [{"folder": "../up", "blocks": 2}] * 2}, "folder"),
        ("exits.json", {"ramps": []}, "no ramp after block 3"),
        ("exits.json", {"policy": "isobatch.deployments.exits:patience"}, "remembers earlier ramps"),
        ("level-1/config.json", {"id2label": {"0": "a", "1": "b", "2": "c"}}, "its labels are"),
        ("level-0/config.json", {"problem_type": "regression"}, "problem_type"),
    ],
)
def test_what_does_not_fit_is_one_line(folder: Path, name: str, fields: dict[str, object], message: str) -> None:
    edit(folder / name, **fields)
    with pytest.raises(UserError, match=message) as refused:
        load_cascade(folder)
    assert "\n" not in str(refused.value)


def test_a_level_without_its_tokenizer_and_one_that_is_missing(folder: Path) -> None:
    (folder / "level-0" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        load_cascade(folder)
    shutil.rmtree(folder / "level-0")
    with pytest.raises(UserError, match="level-0"):
        load_cascade(folder)
