"""Promises of `isobatch prepare`, and other thresholds for a prepared network."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isobatch.deployments.folders import ramps_of
from isobatch.deployments.models import load
from isobatch.deployments.models.ramps import read_rules
from isobatch.deployments.prepare import pipeline
from isobatch.deployments.prepare.data import rows
from isobatch.deployments.prepare.sample import LabelNames, draw
from isobatch.optimizer.plan import read_plan
from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.files import load as load_profile
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.lengths import Lengths
from isobatch.profiles.promise import promise_in
from tests.helpers.commands import done
from tests.helpers.exit_tables import exit_table
from tests.helpers.preparing import check_exits
from tests.helpers.simulated_fleet import HASTIER
from tests.unit.prepare.conftest import Run, printed, rules_in

pytestmark = pytest.mark.usefixtures("cache", "no_picture")


@pytest.mark.parametrize("metric", ["accuracy", "agreement"])
def test_what_is_promised_is_written_said_and_tested_on_rows_of_its_own(
    run: Run, asked: tuple[object, ...], out: Path, metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*asked, "--max-accuracy-loss", "40%", "--confidence", 0.9, "--metric", metric) == 0
    rules = rules_in(out)
    promise = rules["promise"]
    assert (promise["metric"], promise["max_loss"], promise["confidence"], promise["rows"]) == (metric, 0.4, 0.9, 42)
    lost = rules["full_accuracy"] - rules["exit_accuracy"] if metric == "accuracy" else 1 - rules["agreement"]
    assert promise["lost"] == pytest.approx(lost)
    assert promise["lost"] < promise["bound"] <= 0.4
    assert promise_in(out) == read_rules(out / "exits.json").promise is not None
    output = printed(capsys)
    moved = "lost" if lost >= 0 else "gained"
    assert f"at most 40 % of {metric} lost, 90 % sure (42 inputs {moved}" in output
    assert "at least 5 inputs must be tested" in output


def test_a_promise_may_be_about_the_class_that_loses_most(
    run: Run, asked: tuple[object, ...], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*asked, "--max-accuracy-loss", "60%", "--confidence", 0.9, "--metric", "worst-class") == 0
    rules = rules_in(out)
    promise, classes = rules["promise"], rules["classes"]
    assert promise["counted"] == min(each["inputs"] for each in classes)
    assert promise["lost"] == pytest.approx(max(each["full_recall"] - each["recall"] for each in classes))
    assert promise["lost"] < promise["bound"] <= 0.6
    output = printed(capsys)
    assert "at most 60 % of any class's recall lost, 90 % sure (42 inputs lost" in output
    assert "inputs of each class must be tested" in output


def test_too_few_rows_promise_nothing_and_let_nobody_leave(
    run: Run, asked: tuple[object, ...], out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*asked, "--max-accuracy-loss", "1%") == 0
    output = printed(capsys)
    assert "no input leaves early: 42 inputs to test it on are too few to promise 1 %; give 855 rows or more" in output
    assert "promised of other inputs" not in output, "a bound of 0 % beside too few inputs"
    assert run(*asked, "--out", tmp_path / "none", "--max-accuracy-loss", "0") == 0
    output = printed(capsys)
    assert "that nothing at all is lost can hardly be shown" in output
    assert "must be tested" not in output
    assert {each.exit_block for each in load(out).predict(["a good film", "dull"])} == {3}


def test_other_thresholds_are_served_as_they_were_measured(
    run: Run, asked: tuple[object, ...], out: Path, tmp_path: Path
) -> None:
    data, tuned = tmp_path / "a.csv", tmp_path / "tuned"
    assert run(*asked, "--max-accuracy-loss", "60%", "--metric", "agreement") == 0
    evidence = Evidence.read(out / EVIDENCE)
    np.testing.assert_allclose(
        evidence.test.candidates[evidence.prepared], [ramp["threshold"] for ramp in rules_in(out)["ramps"]]
    )
    pipeline.tune(out, tuned, evidence, evidence.proven_candidates([1], evidence.test.costs))
    model = load(tuned)
    sample = draw(rows(data), data, LabelNames(model.labels), 20_000)
    answers = model.predict([sample.values[row] for row in sample.parts.test])
    assert {each.exit_block for each in answers} == {1, 3}
    assert check_exits(tuned, answers, 4)["promise"]["max_loss"] == 0.6
    of_accuracy = evidence.for_metric("accuracy")
    pipeline.tune(out, tmp_path / "of-accuracy", of_accuracy, of_accuracy.prepared)
    assert Evidence.read(tmp_path / "of-accuracy" / EVIDENCE).metric == "accuracy"


@pytest.mark.long
def test_a_plan_and_thresholds_are_chosen_together(
    run: Run, asked: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.cluster.simulator.plan_choice.DEFAULT_EFFORT", HASTIER)
    monkeypatch.setattr("isobatch.optimizer.tuning.REHEARSED", 1)
    prepared, out = tmp_path / "prepared", tmp_path / "tuned"
    assert run(*asked, "--out", prepared) == 0
    Evidence(exit_table(1, count=2000), exit_table(2, count=2000), "accuracy", 0.03, 0.95).save(prepared / EVIDENCE)
    times = tuple((0.0005 + 0.001 * batch,) * 4 for batch in (1, 8))
    table = LatencyTable("cpu", (1, 8), times, ((1e-5,) * 4,) * 2, 0.001, (64,) * 4, (64,) * 4, "made up", length=6)
    table = replace(table, backend="onnx", dtype="float32")
    measured = Profile("network", (table,), lengths=Lengths((6,)), token_exits=ExitProfile((1.0, 0.9, 0.9, 0.9)))
    save(measured, tmp_path / "profile.json")

    def tune(*more: str) -> str:
        files = ("--profile", tmp_path / "profile.json", "--out", out)
        limits = ("--devices", "cpu=2", "--max-batch", 8, "--slo-ms", 1_000, "--gap", 0.05)
        return done("tune", prepared, *files, *limits, *more).output

    assert "with the previous thresholds" in tune()
    plan, profile, promise = read_plan(out / "plan.json"), load_profile(out / "profile.json"), promise_in(out)
    assert promise.max_loss == 0.03
    assert plan.length == profile.length == 6
    assert (plan.slo_s, plan.backend, plan.dtype) == (1.0, "onnx", "float32")
    assert profile.token_exits is None, "they were those of other thresholds"
    assert profile.ramps == ramps_of(out)
    assert np.flatnonzero(np.diff(profile.exits.survival)).tolist() == list(plan.ramps)
    shut = [ramp["block"] for ramp in rules_in(out)["ramps"] if ramp["threshold"] == 0.0]
    assert sorted([*shut, *plan.ramps]) == [0, 1, 2]
    load(out)
    with monkeypatch.context() as patched:
        patched.setattr("isobatch.optimizer.tuning.tuned", lambda *_: pytest.fail("it searches"))
        with pytest.raises(UserError, match="exists already; --force replaces it"):
            tune()
        with pytest.raises(UserError, match="which is replaced: move it, or name another directory"):
            tune("--force", "--profile", str(out / "profile.json"))
        with pytest.raises(UserError, match="--goal cost is for 'isobatch plan': give goodput, latency or"):
            tune("--force", "--goal", "cost")
        save(replace(measured, weights="0" * 16), tmp_path / "profile.json")
        with pytest.raises(UserError, match=r"is of network, whose weights are others: profile .*prepared first"):
            tune("--force")
    save(measured, tmp_path / "profile.json")
    tune("--force", "--no-simulation")
