"""E3's figures: what is measured is kept, and the page is made of it; every system has a plan for what it is asked."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.e3 import measuring, page, run
from experiments.e3.measuring import ALL_RAMPS, EARLY, OURS, SERIAL, E3Setting, planned
from experiments.e3.suite import FIGURES
from experiments.planner.settings import DISTILBERT
from optimizer.model.evaluate import evaluate
from optimizer.pipelines.oracle import oracle_per_s

SMALL = E3Setting(DISTILBERT, "v100=2", 4)
SMALL_BOUND_PER_S = oracle_per_s(SMALL.facts("torch"), SMALL.slo_s, SMALL.batch)


def made_up(figure: Any, x: str, setting: Any, backend: str, system: str) -> dict[str, Any]:
    value = 20.0 if system == OURS else 40.0 if figure.less_is_better else 10.0
    return {"x": x, "backend": backend, "system": system, "value": value, "share": value / 20.5}


def test_a_figure_is_measured_once_and_its_page_is_made_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "DOCS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "e3.md")
    monkeypatch.setattr(page, "TABLES", tmp_path / "tables.md")
    monkeypatch.setattr(run, "_row", made_up)
    some = FIGURES[:1] + tuple(figure for figure in FIGURES if figure.less_is_better)[:1]
    monkeypatch.setattr(run, "FIGURES", some)
    monkeypatch.setattr(page, "FIGURES", some)
    figures = run.measure()
    assert figures["fig07_onnx_over_early_exit"] == figures["fig14_torch_over_no_exits"] == 2.0
    assert figures["fig07_torch_share_of_bound"] == pytest.approx(20 / 20.5)
    monkeypatch.setattr(run, "_row", None)  # nothing is measured again
    monkeypatch.setattr(run, "FIGURES", tuple(replace(figure, differs="Because it is so.") for figure in some))
    assert run.measure() == figures
    text = (tmp_path / "e3.md").read_text()
    assert "Eager PyTorch: 2.00 over early exit" in text
    assert "Because it is so." in text
    assert "| torch | 1 | 20 | 10 | 10 |" in (tmp_path / "tables.md").read_text()
    for figure in some:
        assert (tmp_path / f"e3-{figure.name}.png").exists()
        assert figure.paper in " ".join(text.split())
    assert "Not measured yet" not in text
    assert "older code" not in text
    kept = tmp_path / "fig07.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "mark": "of another code"}))
    with pytest.raises(TypeError):
        run.measure(only="fig07")
    assert run.measure(only="kept") == figures
    text = " ".join((tmp_path / "e3.md").read_text().split())
    assert "Measured by older code or settings: figures 7." in text
    kept.unlink()
    assert run.measure(only="kept").keys() == {name for name in figures if not name.startswith("fig07")}
    assert "Not measured yet, by `make experiments`: 7." in (tmp_path / "e3.md").read_text()


def test_where_much_is_lost_the_page_says_to_what() -> None:
    figure = replace(FIGURES[0], settings=(("4", SMALL),))
    lost = page._lost(figure, {"x": "4", "backend": "torch", "share": 0.7, "value": 0.7 * SMALL_BOUND_PER_S})
    assert "launches" in lost
    assert "ramps" in lost
    assert sum(float(part.rpartition(" ")[2].rstrip("%")) for part in lost.split(", ")) == pytest.approx(30, abs=2)
    assert not page._lost(figure, {"x": "4", "backend": "torch", "share": 0.96, "value": 1.0})


def test_every_system_has_a_plan_on_few_devices() -> None:
    facts = SMALL.facts("onnx")
    for system in (*SMALL.systems, SERIAL, ALL_RAMPS):
        assert planned(SMALL, facts, "onnx", system) is not None


def test_without_control_every_useful_ramp_is_open_and_costs_something() -> None:
    facts = SMALL.facts("torch")
    ours, opened = (planned(SMALL, facts, "torch", system) for system in (OURS, ALL_RAMPS))
    assert ours is not None
    assert opened is not None
    assert set(opened.ramps) == set(range(5)) > set(ours.ramps)
    assert evaluate(opened, facts).goodput_per_s < evaluate(ours, facts).goodput_per_s


def test_a_plan_for_leavers_that_do_not_come_is_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "INPUTS", 1_000)
    monkeypatch.setattr(measuring, "SLOS", 5)
    nobody = replace(DISTILBERT, survivors=((0.0, 1.0), (1.0, 1.0)))
    wrong = replace(SMALL, expected=nobody)
    right, misled = (measuring.goodput(each, "torch", OURS).value for each in (SMALL, wrong))
    assert 0 < misled < right


def test_the_cheapest_plan_sustains_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "INPUTS", 1_000)
    monkeypatch.setattr(measuring, "SLOS", 5)
    asked = replace(SMALL, devices="v100=8", asked_per_s=1_000.0)
    ours, early = (measuring.dollars(asked, "torch", system).value for system in (OURS, EARLY))
    assert 0 < ours <= early
    assert measuring.dollars(replace(asked, asked_per_s=1e6), "torch", OURS).value == 0


def test_latencies_of_all_systems_are_of_one_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "INPUTS", 1_000)
    monkeypatch.setattr(measuring, "SLOS", 5)
    quartile, median = (measuring.latency(replace(SMALL, quantile=share), "torch", OURS).value for share in (0.25, 0.5))
    assert 0 < quartile < median < 1e3 * SMALL.slo_s
