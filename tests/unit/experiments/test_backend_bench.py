"""The figures of `make bench-backend` have the names that are quoted, and MiniLM's absence is told, not hidden."""

from pathlib import Path

import pytest

from experiments.backend import minilm, replicas, run, speed


def test_a_family_is_compared_on_every_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(speed, "SIZES", (1, 2))
    figures = speed.of_family("distilbert", layers=1)
    assert set(figures) == {"onnx_over_torch_distilbert", "int8_over_torch_distilbert", "torch_distilbert_per_s"}
    assert all(figure > 0 for figure in figures.values())


def test_the_best_way_to_share_cores_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {(1, 1): 10.0, (1, 2): 15.0, (2, 1): 19.0, (2, 2): 12.0}
    monkeypatch.setattr(replicas.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(replicas, "rate_per_s", lambda count, threads, seconds: rates[count, threads])
    figures = replicas.compared()
    assert (figures["best_replicas"], figures["best_threads"]) == (2, 1)
    assert figures["replicas_1_threads_2_per_s"] == 15.0


def test_without_minilm_one_line_says_what_is_left_out_and_how_to_give_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ISOBATCH_DATA", str(tmp_path))
    monkeypatch.delenv("ISOBATCH_MINILM", raising=False)
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    assert run._minilm() == {}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("minilm_* left out (")
    assert "need ISOBATCH_MINILM" in line
