"""Ramps and their rules stand beside a checkpoint and come back as they were."""

from pathlib import Path

import pytest
import torch

from isobatch.deployments.models.ramps import (
    RULES,
    WEIGHTS,
    ExitRules,
    RampRule,
    Ramps,
    make_head,
    policy_at,
    read_ramps,
    save_ramps,
)
from isobatch.profiles.errors import UserError

WIDTHS = (6, 8, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rules = ExitRules(kind="pooler", ramps=(RampRule(block=0, threshold=0.3), RampRule(block=1, threshold=0.5)))
    save_ramps(tmp_path, rules, {block: make_head("pooler", WIDTHS[block], 2) for block in (0, 1)})
    return tmp_path


def test_ramps_come_back_as_they_were(folder: Path) -> None:
    first = read_ramps(folder / RULES, folder / WEIGHTS, WIDTHS, num_labels=2)
    save_ramps(folder, first.rules, first.heads)
    again = read_ramps(folder / RULES, folder / WEIGHTS, WIDTHS, num_labels=2)
    assert again.rules == first.rules
    assert again.blocks == (0, 1)
    pooled = torch.randn(5, 8)
    assert torch.equal(again.logits(1, pooled), first.logits(1, pooled))


def test_logits_are_divided_by_the_temperature(folder: Path) -> None:
    ramps = read_ramps(folder / RULES, folder / WEIGHTS, WIDTHS, num_labels=2)
    text = (folder / RULES).read_text().replace('"temperature": 1.0', '"temperature": 4.0')
    (folder / RULES).write_text(text)
    cooler = read_ramps(folder / RULES, folder / WEIGHTS, WIDTHS, num_labels=2)
    pooled = torch.randn(5, 6)
    assert torch.allclose(cooler.logits(0, pooled) * 4, ramps.logits(0, pooled))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"threshold": 0.3', '"treshold": 0.3', r"exits.json: ramps.0.threshold: this field is missing"),
        ('"version": 2', '"version": 3', r"exits.json: version: Input should be 1 or 2"),
        ("entropy", "entropie", r"policy 'isobatch.deployments.exits:entropie' cannot .* use entropy, conf"),
        ('"block": 1', '"block": 2', r"no ramp can stand after block 2 of 3 blocks"),
        ('"block": 1', '"block": 0', r"ascending blocks, each once, got \[0, 0\]"),
        ('"kind": "pooler"', '"kind": "light"', r"ramp after block 0 does not fit"),
        ('"threshold": 0.3', '"threshold": true', r"exits.json: ramps.0.threshold = true: this must be a number"),
        ("{", "", r"exits.json is not JSON"),
    ],
)
def test_a_wrong_file_says_where(folder: Path, old: str, new: str, message: str) -> None:
    path = folder / RULES
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=message) as caught:
        read_ramps(path, folder / WEIGHTS, WIDTHS, num_labels=2)
    assert "\n" not in str(caught.value)


def test_weights_that_are_none_say_so(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match=r"ramps.safetensors: cannot be read"):
        read_ramps(folder / RULES, folder / WEIGHTS, WIDTHS, num_labels=2)


def test_only_what_is_needed_is_computed() -> None:
    rules = ExitRules(ramps=tuple(RampRule(block=block, threshold=2) for block in (0, 1, 2)))
    heads = {block: make_head("light", 4, 2) for block in (0, 1, 2)}
    independent = Ramps(rules, heads)
    assert independent.observed({1}) == {1}
    dependent = Ramps(rules.model_copy(update={"policy": "isobatch.deployments.exits:patience"}), heads)
    assert dependent.observed({1}) == {0, 1}
    assert dependent.observed(()) == frozenset()


@pytest.mark.parametrize(
    "path", [".exits:entropy", "nowhere:entropy", "isobatch.deployments.exits", "isobatch.deployments.exits:", ":x"]
)
def test_a_policy_that_cannot_be_imported_says_how_to_write_it(path: str) -> None:
    with pytest.raises(UserError, match="write it as module:function"):
        policy_at(path)
