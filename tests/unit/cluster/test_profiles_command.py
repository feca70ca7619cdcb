"""isobatch profiles: what is known of devices that nobody measured here."""

import pytest
from typer.testing import CliRunner

from isobatch.cluster.cli import app
from isobatch.profiles.errors import UserError


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


def test_batch_times_of_a_slow_device_fit_a_terminal_of_80_columns() -> None:
    output = said("show", "k80,rtx3090", "--backend", "onnx,tensorrt", "--network", "bert-large", columns=80)
    assert "…" not in output
    assert "estimated" in output


def test_a_curve_is_shown_beside_what_was_published() -> None:
    output = said("show", "a100,h200", "--backend", "tensorrt")
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


def test_an_unknown_network_is_named() -> None:
    with pytest.raises(UserError, match="unknown network 'gpt': choose among bert-base"):
        said("show", "v100", "--network", "gpt")
