"""The figures of `make bench-backend` have the names that are quoted, and MiniLM's absence is told, not hidden."""

from pathlib import Path

import numpy as np
import pytest

from cluster.bench.real_device import Source
from experiments.backend import exits, minilm, replicas, run, speed
from tests.helpers.tiny_networks import network, random_inputs


def test_a_family_is_compared_on_every_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiny = network("distilbert")  # exporting the true one takes seconds
    monkeypatch.setattr(speed, "SIZES", (1, 2))
    monkeypatch.setattr(speed, "untrained", lambda name, layers: tiny)
    monkeypatch.setattr(speed, "batches", lambda name, length: lambda n: tiny.merge(random_inputs(name, n, seed=0)))
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


def test_all_parts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "of_family", lambda family: {f"onnx_over_torch_{family}": 1.0})
    monkeypatch.setattr(replicas, "compared", lambda: {"best_replicas": 2.0})
    monkeypatch.setattr(exits, "of_demo", lambda: {"demo_constant_over_naive": 1.0})
    monkeypatch.setattr(run, "_minilm", lambda: {"minilm_constant_over_naive": 1.0})
    families = {f"onnx_over_torch_{family}" for family in ("bert", "distilbert", "vit", "resnet")}
    assert set(run.measure()) == families | {"best_replicas", "demo_constant_over_naive", "minilm_constant_over_naive"}


def test_answers_are_judged_over_all_inputs() -> None:
    model, inputs = network("vit", "entropy", [0.8]), random_inputs("vit", 40, seed=5)
    at_once = model.run(model.merge(inputs), model.num_blocks, model.ramp_blocks).exits
    labels = np.where(np.arange(40) % 4 == 0, 99, at_once.labels[np.argsort(at_once.rows)])
    early = exits.judged(model, Source(inputs, labels), model.ramp_blocks)
    assert early.accuracy == 0.75
    assert early.depth == pytest.approx((at_once.blocks + 1).mean() / model.num_blocks)
    assert exits.judged(model, Source(inputs, labels), ()).depth == 1.0
