"""The command on a tiny network, without a clock's worth of waiting."""

from pathlib import Path
from shutil import copy

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.profiling import report, texts
from deployments.models import load
from profiles.errors import UserError
from profiles.files import load as load_profile
from tests.networks import hugging_face

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertTokenizer

    folder = tmp_path_factory.mktemp("tiny")
    hugging_face("bert").save_pretrained(folder)
    vocabulary = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "the", "film"]
    BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary)}).save_pretrained(folder)
    (folder / "inputs.jsonl").write_text('{"text": "the film"}\n' * 5)
    return folder


def profiled(checkpoint: Path, out: Path, *more: str) -> str:
    command = ["profile", str(checkpoint), "--out", str(out), "--device", "cpu", "--budget", "0.2", "--largest", "4"]
    result = RUNNER.invoke(app, [*command, *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def measured(checkpoint: Path) -> tuple[Path, str]:
    out = checkpoint / "profile" / "profile.json"
    out.parent.mkdir()
    return out, profiled(checkpoint, out, "--lengths", "6,12", "--data", str(checkpoint / "inputs.jsonl"))


def test_profile_writes_a_table_per_length_a_picture_and_says_how_steady_it_was(measured: tuple[Path, str]) -> None:
    out, output = measured
    profile = load_profile(out)
    assert [(table.kind, table.length) for table in profile.tables] == [("cpu", 6), ("cpu", 12)]
    assert all(table.batch_sizes[0] == 1 and table.batch_sizes[-1] <= 4 for table in profile.tables)
    assert profile.exits is not None
    assert set(profile.exits.survival) == {1.0}  # a network without ramps
    assert profile.tables[0].memory_bytes[0] > profile.tables[0].memory_bytes[1] > 0  # the embedding is in block 0
    assert out.with_suffix(".png").exists()
    assert "rounds spread by" in output
    assert len(profile.notes) == 2
    assert report(profile).row_count == sum(len(table.batch_sizes) for table in profile.tables)


def test_another_device_is_added_to_the_same_file(checkpoint: Path, measured: tuple[Path, str], tmp_path: Path) -> None:
    out = Path(copy(measured[0], tmp_path))
    profiled(checkpoint, out, "--lengths", "6", "--kind", "slow-cpu")
    assert load_profile(out).kinds == ("cpu", "slow-cpu")


def test_a_file_without_inputs_is_found_before_anything_is_timed(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no inputs"):
        profiled(checkpoint, tmp_path / "profile.json", "--data", str(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize("lengths", ["0", "many", "32,,64"])
def test_lengths_that_are_no_lengths_are_refused(checkpoint: Path, lengths: str) -> None:
    with pytest.raises(UserError, match="must be numbers of tokens"):
        RUNNER.invoke(app, ["profile", str(checkpoint), "--lengths", lengths], catch_exceptions=False)


def test_invented_texts_have_the_length_that_was_asked_for(checkpoint: Path) -> None:
    model = load(checkpoint, device="cpu")
    for inputs in texts(model, [5, 9]):
        batch = inputs.batch(3)
        assert batch.lengths is not None
        np.testing.assert_array_equal(batch.lengths, [inputs.length] * 3)
