"""The scripts in examples/ run, and say what they promise."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from isobatch.deployments.models.ramps import policy_at

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_a_network_answers_without_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("predict.py", monkeypatch)
    printed = capsys.readouterr().out
    assert (printed[:3], printed.partition(" (")[2]) == ("8: ", "the last is 7)\n")


def test_a_fleet_is_planned_and_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("fleet.py", monkeypatch, "v100=2,k80=2")
    *placed, _, _, _, _ = lines = capsys.readouterr().out.splitlines()
    assert placed
    gains = {name: float(gain) for gain, _, name in (line.partition(" times ") for line in lines[-3:])}
    assert min(gains.values()) >= 1.0, gains


def test_the_notebook_draws_the_curve_the_exits_and_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: drawn.append(1))
    cells = json.loads((EXAMPLES / "gain.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    exec("".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"), names)
    plt = names["plt"]
    assert len(drawn) == len(plt.get_fignums()) == 3
    plt.close("all")
    planned, *others = names["rates_per_s"].values()
    assert all(mine >= 0.999 * max(theirs) for mine, *theirs in zip(planned, *others, strict=True)), planned


def test_a_policy_of_ones_own_is_taken_by_its_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    assert policy_at("own_policy:odds").__name__ == "odds"


def test_a_client_says_that_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"nobody answers at http://127\.0\.0\.1:1: .*refused"):
        run("client.py", monkeypatch, "http://127.0.0.1:1", "a good film")


def test_a_client_sends_a_text_or_json() -> None:
    value_of = runpy.run_path(str(EXAMPLES / "client.py"))["value_of"]
    assert [value_of("a good film"), value_of("[[0, 255]]")] == ["a good film", [[0, 255]]]
