"""`isobatch prepare` refuses what it cannot do in one sentence, and replaces nothing unasked."""

import errno
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from isobatch.deployments.prepare import pipeline
from isobatch.deployments.prepare.features import features
from tests.unit.prepare.conftest import Run, reviews

pytestmark = pytest.mark.usefixtures("cache")


def test_a_checkpoint_without_a_tokenizer_stops_before_the_data_is_read(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert run(checkpoint, "--data", tmp_path / "nowhere.csv", "--out", tmp_path / "out") == 2
    assert "has no tokenizer" in capsys.readouterr().err


@pytest.mark.usefixtures("no_picture")
def test_what_appears_meanwhile_is_not_replaced_unasked(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def while_another_writes(*arguments: Any) -> Any:
        out.mkdir()
        (out / "exits.json").write_text("another's")
        return features(*arguments)

    monkeypatch.setattr(pipeline, "features", while_another_writes)
    assert run(checkpoint, "--data", reviews(tmp_path / "a.csv"), "--out", out) == 2
    assert "exists already; --force replaces it" in capsys.readouterr().err
    assert (out / "exits.json").read_text() == "another's"


def test_a_network_whose_weights_are_broken_is_one_sentence(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training that diverged leaves weights that are no numbers."""
    weights = load_file(checkpoint / "model.safetensors")
    weights["classifier.bias"] = weights["classifier.bias"] * float("nan")
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert run(checkpoint, "--data", reviews(tmp_path / "a.csv"), "--out", tmp_path / "out") == 2
    assert "the network's answers are not finite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_metric_that_counts_classes_needs_labels(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = reviews(tmp_path / "a.csv", labelled=False)
    assert run(checkpoint, "--data", data, "--out", tmp_path / "out", "--metric", "macro-f1") == 2
    assert "has no column of labels, which --metric macro-f1 needs" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_picture")
def test_nothing_is_replaced_unasked(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    assert run(checkpoint, "--data", data, "--out", out) == 0
    assert run(checkpoint, "--data", data, "--out", out) == 2
    assert "exists already; --force replaces it" in capsys.readouterr().err
    assert run(checkpoint, "--data", data, "--out", out, "--force") == 0
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").touch()
    assert run(checkpoint, "--data", data, "--out", precious, "--force") == 2
    assert (precious / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--label-column", "lable"), "no column 'lable'; it has: 'text', 'label'"),
        (("--policy", "entropie"), "policy 'isobatch.deployments.exits:entropie' cannot be imported"),
        (("--max-accuracy-loss", "one"), "--max-accuracy-loss one is not a share; write it as 1% or 0.01"),
        (("--policy", "os:getcwd"), "policy 'os:getcwd' failed when tried on two inputs: TypeError"),
        (("--out", "/proc/x/y"), "/proc/x/y: cannot be written: /proc: "),
        (("--out", f"{__file__}/y"), f"{__file__}/y: cannot be written: {__file__}: Not a directory"),
        (("--data", "none.csv"), "none.csv: cannot be read: No such file or directory"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    run: Run,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    assert run(checkpoint, "--data", data, "--out", out, *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert not out.exists()


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "exits.png")

    monkeypatch.setattr(pipeline, "draw_exits", full)
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "made" / "out"
    assert run(checkpoint, "--data", data, "--out", out) == 2
    error = capsys.readouterr().err.strip()
    assert "exits.png: No space left on device" in error
    assert "\n" not in error
    assert list(out.parent.iterdir()) == []


def test_a_directory_that_is_no_checkpoint_and_one_with_pickles_only(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = reviews(tmp_path / "a.csv"), tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", "--data", data, "--out", out) == 2
    (checkpoint / "model.safetensors").unlink()
    assert run(checkpoint, "--data", data, "--out", out) == 2
    message = capsys.readouterr().err
    assert "it has no config.json" in message
    assert "has no *.safetensors weights" in message
