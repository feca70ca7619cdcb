"""The best plan so far is shown, and kept at Ctrl-C."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.planner.networks import distilbert
from isobatch.cluster.commands import plan_search
from isobatch.cluster.commands.plan import ClassifierPlanOptions, plan_classifier
from isobatch.cluster.commands.plan_search import CHOOSING, SEARCHING, LivePlan
from isobatch.cluster.commands.tune import tuned_with
from isobatch.cluster.simulator import plan_choice
from isobatch.cluster.simulator.candidates import Find
from isobatch.deployments.own_cores import usable_cores
from isobatch.optimizer import Objective, Placement, Plan, Problem, Split
from isobatch.optimizer.effort import Effort
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.files import Profile, save
from tests.helpers.clock import Clock
from tests.helpers.exit_tables import exit_table
from tests.helpers.simulated_fleet import facts

PLAN = Plan((Placement("v100", 2, (Split(0, 6, 8), Split(6, 12, 4))),))


def test_the_search_the_choice_and_the_promise_each_get_a_share_of_the_seconds() -> None:
    clock = Clock(100.0)
    live = LivePlan(10.0, clock)
    clock.now_s += 10.0 * SEARCHING - 0.01
    assert not live.is_over()
    clock.now_s += 0.02
    assert live.is_over()
    assert live.left_s == pytest.approx(10.0 * (1 - SEARCHING), abs=0.02)
    assert live.text == "planning: looking for a first plan; confirming it with other inputs"
    live.allow(CHOOSING)
    assert not live.is_over()
    assert live.text == "planning: looking for a first plan; Ctrl-C keeps it"
    clock.now_s += 10.0 * (CHOOSING - SEARCHING)
    assert live.is_over()
    forever = LivePlan(None, clock)
    clock.now_s += 1e6
    assert not forever.is_over()


def test_as_many_inputs_fit_as_the_cores_were_seen_to_simulate_in_the_time_that_is_left() -> None:
    clock = Clock(100.0)
    live = LivePlan(10.0, clock)

    def simulate() -> float:
        clock.now_s += 8.0
        return 5.0

    assert live.timed(4_000, simulate) == 5.0
    fit = 2.0 * min(usable_cores(), 3) * 500
    assert live.fits(0.99 * fit)
    assert not live.fits(1.01 * fit)
    live.stopped = True
    assert live.fits(1.49 * fit)
    assert LivePlan(None, clock).fits(1e12)


def test_the_first_ctrl_c_keeps_the_best_plan_and_the_second_ends() -> None:
    before = signal.getsignal(signal.SIGINT)
    with LivePlan(40.0) as live:
        assert not live.is_over()
        signal.raise_signal(signal.SIGINT)
        assert live.is_over()
        assert live.left_s == 0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_without_a_terminal_lines_come_also_while_the_search_asks_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = ""
    with LivePlan() as live:
        live.estimated(PLAN, 1234.0)
        live.better(PLAN, 2345.0, 7)
        until_s = time.monotonic() + 10.0
        while not printed and time.monotonic() < until_s:
            time.sleep(0.02)
            printed = capsys.readouterr().err
    best = "2,345 per second, as simulated: batches of 8 > 4; 7 other plans tried"
    assert printed == f"planning: {best}; Ctrl-C keeps it: 2 s so far\n"


def test_a_search_that_ctrl_c_ended_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*given: Any, **more: Any) -> Plan | None:
        signal.raise_signal(signal.SIGINT)
        return side_by_side(*given, **more)

    save(Profile("distilbert", (datasheet_table(distilbert(), "v100"),)), tmp_path / "profile.json")
    options = ClassifierPlanOptions(
        profile=tmp_path / "profile.json", devices="v100=1", slo_ms=100.0, no_simulation=True
    )
    assert not plan_classifier(options).hurried
    monkeypatch.setattr(plan_search, "side_by_side", search)
    assert plan_classifier(options).hurried


def test_ctrl_c_ends_searches_of_tune_and_simulated_candidates_need_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps, ended = list[float](), list[bool]()

    def search(facts: Problem, objective: Objective, gap: float, effort: Effort) -> Plan | None:
        gaps.append(gap)
        ended.append(effort.out_of_time())
        if len(ended) == 1:
            signal.raise_signal(signal.SIGINT)
        return side_by_side(facts, objective, gap, effort=effort)

    def simulated(plan: Plan, facts: Problem, objective: Objective, find: Find, effort: Any) -> Any:
        assert find(facts, objective)
        return plan_choice.SimulatedChoice(plan, 1.0, 1.0, tried=1)

    monkeypatch.setattr(plan_search, "side_by_side", search)
    monkeypatch.setattr(plan_choice, "best_simulated", simulated)
    fleet = facts(v100=2)
    tables = (exit_table(seed, fleet.num_blocks - 1, count=2000) for seed in (1, 2))
    options = ClassifierPlanOptions(slo_ms=1000.0, goal="goodput", max_batch=8, gap=0.01)
    tuned_with(options, fleet, Evidence(*tables, "accuracy", 0.03, 0.95))
    assert ended == [False, *[True] * (len(ended) - 1)]
    assert {*gaps} == {0.01, plan_choice.CANDIDATE_GAP}
    assert gaps.count(plan_choice.CANDIDATE_GAP) == 3, "the plan before, one set of ramps, and that with its thresholds"


@pytest.mark.parametrize(("tried", "words"), [(1, "1 other plan"), (2, "2 other plans")])
def test_one_other_plan_is_named_in_the_singular(tried: int, words: str) -> None:
    assert plan_choice.SimulatedChoice(PLAN, 1.0, 1.0, tried).comparison == f"+0.0% after {words}"
    live = LivePlan()
    live.better(PLAN, 2345.0, tried)
    assert f"; {words} tried; " in live.text
