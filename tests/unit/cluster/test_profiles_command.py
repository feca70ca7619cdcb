"""isobatch profiles: what is known of devices that nobody measured here."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isobatch.cluster.cli import app
from isobatch.profiles.curves import curve_table
from isobatch.profiles.datasheet import bert_base
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile, save


def said(*arguments: str, columns: int = 200) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["profiles", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("columns", [80, 200])
def test_every_curve_is_listed_with_what_it_was_fitted_to(columns: int) -> None:
    output = said("list", columns=columns)
    for word in ("v100", "tensorrt", "float16", "encoder", "residual", "bert-large"):
        assert word in output
    assert "…" not in output, "nothing is cut off"


def test_batch_times_fit_a_terminal_of_80_columns(tmp_path: Path) -> None:
    """Those of a slow device, and of a table with more sizes than fit."""
    output = said("show", "k80,rtx3090", "--backend", "onnx,tensorrt", "--network", "bert-large", columns=80)
    assert "…" not in output
    assert "estimated" in output
    sizes = tuple(range(1, 17))
    table = curve_table(bert_base(), "rtx3090", backend="tensorrt", dtype="float16", batch_sizes=sizes)
    save(Profile("mine", (replace(table, source="measured: an RTX 3090"),)), path := tmp_path / "profile.json")
    output = said("compare", str(path), columns=80)
    assert "…" not in output
    assert "7 of 16 batch sizes" in output
    assert output.split()[output.split().index("from") + 1 :][:8] == ["1", "3", "6", "9", "11", "13", "16", "knee"]


def test_a_curve_is_shown_beside_what_was_published(tmp_path: Path) -> None:
    picture = tmp_path / "shown.png"
    output = said("show", "a100,h200", "--backend", "tensorrt", "--picture", str(picture))
    assert "published" in output
    assert "estimated" in output  # nobody published of an H200
    assert output.count("at least") == output.count("at most") == 1
    (short, middle, long) = (
        float(line.split()[-1 - knee])
        for line, knee in (
            (next(line for line in output.splitlines() if "at least" in line), 0),
            (next(line for line in output.splitlines() if "estimated" in line), 1),
            (next(line for line in output.splitlines() if "at most" in line), 0),
        )
    )
    assert short < middle < long
    assert "NVIDIA/TensorRT/demo/BERT/README.md @ " in output
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_what_was_measured_is_compared_with_its_curve(tmp_path: Path) -> None:
    path, picture = tmp_path / "profile.json", tmp_path / "compared.png"
    table = curve_table(bert_base(), "l4", backend="onnx", dtype="float16")
    save(Profile("mine", (replace(table, source="measured: an L4", launch_s=0.001),)), path)
    output = said("compare", str(path), "--picture", str(picture))
    assert "measured" in output
    assert "estimated" in output
    assert picture.exists()
    with pytest.raises(UserError, match="has 12 blocks, bert-large has 24: name the network"):
        said("compare", str(path), "--network", "bert-large")
    save(Profile("mine", (table,)), path)
    with pytest.raises(UserError, match="contains no table that was measured on a GPU"):
        said("compare", str(path))


def test_an_unknown_network_is_named() -> None:
    with pytest.raises(UserError, match="unknown network 'gpt': choose among bert-base"):
        said("show", "v100", "--network", "gpt")
