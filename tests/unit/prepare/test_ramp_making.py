"""Training, calibration and folders: the parts that ramps are made with."""

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from isobatch.deployments.folders import STALE_S, check_replaceable, make_room, replacing
from isobatch.deployments.models.ramps import RampKind
from isobatch.deployments.prepare.thresholds import calibration_error, temperature
from isobatch.deployments.prepare.training import Learned, TrainingRows, head_logits, penalised_loss, train
from isobatch.profiles.errors import UserError

ROWS = np.arange(400)


@pytest.fixture
def features() -> tuple[list[np.ndarray], np.ndarray]:
    """Two blocks of unlike width and scale; a linear rule tells the two classes apart."""
    random = np.random.default_rng(0)
    labels = random.integers(2, size=400)
    blocks = [random.normal(5.0, scale, (400, width)).astype(np.float32) for width, scale in ((4, 100.0), (6, 0.01))]
    for block, scale in zip(blocks, (100.0, 0.01), strict=True):
        block[:, 0] += (2 * labels - 1) * scale * 3
    return blocks, np.eye(2, dtype=np.float32)[labels]


@pytest.mark.parametrize("kind", ["light", "pooler"])
def test_ramps_learn_at_any_scale_of_features(kind: RampKind, features: tuple[list[np.ndarray], np.ndarray]) -> None:
    pooled, targets = features
    heads = train(pooled, targets, ROWS[:300], kind)
    logits = head_logits(heads, pooled, ROWS[300:])
    right = (logits.argmax(dim=2).numpy() == targets[300:].argmax(axis=1)).mean(axis=1)
    assert (right > 0.95).all()


@pytest.mark.parametrize("learned", ["labels", "each label"])
def test_a_light_ramps_loss_and_slope_are_those_that_torch_finds(learned: Learned) -> None:
    random = np.random.default_rng(1)
    features, targets = random.normal(size=(20, 4)).astype(np.float32), random.dirichlet(np.ones(3), 20)
    weights = torch.tensor(random.normal(size=(3, 5)), requires_grad=True)
    logits = torch.from_numpy(features).double() @ weights[:, :-1].T + weights[:, -1]
    if learned == "labels":
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets))
    else:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(targets)) * 3
    (loss + 0.1 * weights[:, :-1].square().sum()).backward()
    given = weights.detach().numpy().ravel(), features, targets.astype(np.float32)
    result, slope = penalised_loss(*given, penalty=0.1, learned=learned)
    assert result == pytest.approx(loss.item() + 0.1 * weights[:, :-1].square().sum().item(), rel=1e-5)
    np.testing.assert_allclose(slope, weights.grad.numpy().ravel(), atol=1e-5)


@pytest.mark.parametrize("learned", ["numbers", "distances"])
def test_the_losses_of_scores_and_of_their_distances_are_those_that_torch_finds(learned: Learned) -> None:
    random = np.random.default_rng(1)
    features, targets = random.normal(size=(20, 4)).astype(np.float32), random.random((20, 1)).astype(np.float32)
    head = torch.nn.Linear(4, 1).double()
    loss = TrainingRows(torch.from_numpy(features).double(), torch.from_numpy(targets).double(), learned).loss(head)
    loss.backward()
    weights = torch.cat((head.weight, head.bias[:, None]), dim=1).detach().numpy().ravel()
    result, slope = penalised_loss(weights, features, targets, penalty=0.0, learned=learned)
    assert result == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(slope, [*head.weight.grad.numpy().ravel(), head.bias.grad.item()], atol=1e-5)


@pytest.mark.parametrize("kind", ["light", "pooler"])
def test_ramps_learn_several_labels_at_once(kind: RampKind) -> None:
    random = np.random.default_rng(0)
    pooled = random.normal(size=(500, 12)).astype(np.float32)
    targets = (pooled[:, :3] > 0.4).astype(np.float32)
    (head,) = train([pooled], targets, np.arange(400), kind, learned="each label")
    given = head_logits([head], [pooled], np.arange(400, 500))[0].numpy() > 0
    assert (given == targets[400:]).mean(axis=0).min() > 0.85


def test_rows_kept_for_later_do_not_touch_the_ramps(features: tuple[list[np.ndarray], np.ndarray]) -> None:
    pooled, targets = features
    before = head_logits(train(pooled, targets, ROWS[:300], "light"), pooled, ROWS)
    spoiled = [block.copy() for block in pooled]
    for block in spoiled:
        block[300:] = 1e6
    after = head_logits(train(spoiled, targets, ROWS[:300], "light"), pooled, ROWS)
    assert torch.equal(before, after)


def test_temperature_mends_logits_that_are_too_sure() -> None:
    random = torch.Generator().manual_seed(0)
    honest = torch.randn(4000, 3, generator=random) * 2
    drawn = torch.multinomial(honest.softmax(dim=1), 1, generator=random).squeeze(1)
    truth = torch.eye(3)[drawn]
    result = temperature(honest * 4, truth)
    assert result == pytest.approx(4.0, rel=0.1)
    assert calibration_error(honest * 4 / result, truth) < 0.03 < calibration_error(honest * 4, truth)


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "made"

    def interrupted() -> None:
        with replacing(target) as draft:
            (draft / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    for name in ("first", "second"):
        with replacing(target) as draft:
            (draft / name).touch()
    assert [path.name for path in target.iterdir()] == ["second"]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_folder_behind_a_link_is_replaced_where_it_lies(tmp_path: Path) -> None:
    disk, link = tmp_path / "disk", tmp_path / "made"
    disk.mkdir()
    link.symlink_to(disk / "made")
    for name in ("first", "second"):
        with replacing(link) as draft:
            (draft / name).touch()
    assert link.is_symlink()
    assert [path.name for path in (disk / "made").iterdir()] == ["second"]
    assert {path.name for folder in (disk, tmp_path) for path in folder.iterdir()} == {"disk", "made"}
    mounted = tmp_path / "mounted"
    mounted.symlink_to("/proc")
    with pytest.raises(UserError, match="mounted: is mounted or holds the current folder"):
        check_replaceable(mounted)


@pytest.mark.parametrize("name", [None, "half"])
def test_no_room_for_a_folder_names_what_was_asked_for_and_not_its_draft(tmp_path: Path, name: str | None) -> None:
    def full() -> None:
        with replacing(tmp_path / "made") as draft:
            raise OSError(errno.ENOSPC, "No space left on device", name and str(draft / name))

    with pytest.raises(OSError, match="No space left") as caught:
        full()
    assert caught.value.filename == str(tmp_path / "made" / (name or ""))
    assert list(tmp_path.iterdir()) == []


def test_a_full_cache_loses_what_was_used_longest_ago_and_stale_drafts(tmp_path: Path) -> None:
    now_s = time.time()
    for age, name in enumerate(("new", "old", "oldest", ".killed")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (now_s - age, now_s - age))
    make_room(tmp_path, needed_bytes=50, limit_bytes=300)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "old", ".killed"}
    os.utime(tmp_path / ".killed", (now_s - 2 * STALE_S, now_s - 2 * STALE_S))
    make_room(tmp_path, needed_bytes=50, limit_bytes=300)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "old"}
