"""E3's figures: what is measured is kept, and the page is made of it; every system has a plan for what it is asked."""

from dataclasses import replace

import pytest

from experiments.e3 import measuring
from experiments.e3.measuring import ALL_RAMPS, EARLY, OURS, SERIAL, E3Setting, planned
from experiments.planner.settings import DISTILBERT
from optimizer.model.evaluate import evaluate

SMALL = E3Setting(DISTILBERT, "v100=2", 4)


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
