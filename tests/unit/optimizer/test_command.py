"""isobatch plan, from a profile on disk to tables and JSON."""

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments.planner.networks import distilbert
from isobatch.cluster.simulator.plan_choice import DEFAULT_EFFORT
from isobatch.cluster.simulator.tails import Tails
from isobatch.optimizer import Objective, problem
from isobatch.optimizer.pipelines.baselines import NO_EXITS, baseline, no_later
from isobatch.optimizer.pipelines.batch_gain import BatchGain
from isobatch.optimizer.plan import read_plan
from isobatch.profiles.curves import DTYPES, curve_table
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, load, save
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.lengths import Lengths
from tests.helpers.commands import ran


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    tables = tuple(datasheet_table(distilbert(), kind) for kind in ("v100", "k80"))
    save(Profile("distilbert", tables, ExitProfile((1.0, 0.9, 0.8, 0.4, 0.3, 0.25)), weights="a1b2"), path)
    return path


def run(profile: Path, *options: str) -> str:
    """What it prints of the planner's beliefs; playing is tested where plans are played."""
    return run_played(profile, "--no-simulation", *options)


def run_played(profile: Path, *options: str) -> str:
    return ran("plan", "--profile", profile, "--devices", "v100=2,k80=3", "--slo-ms", "100", *options)


def test_tables_and_a_file(profile: Path, tmp_path: Path) -> None:
    output = run(profile, "--out", str(tmp_path / "plan.json"))
    for word in ("splits", "goodput", "travelling", "no exits", "proved", "estimated"):
        assert word in output
    plan = read_plan(tmp_path / "plan.json")
    assert (plan.num_blocks, plan.model, plan.weights, plan.slo_s) == (6, "distilbert", "a1b2", 0.1)


def test_what_survivors_weigh_is_shown(profile: Path, tmp_path: Path) -> None:
    output = in_one_line(run(profile, "--cut", "3", "--out", str(tmp_path / "plan.json")))
    _, behind = read_plan(tmp_path / "plan.json").pipelines[0].splits
    megabytes = behind.batch_size * load(profile).table("v100").hidden_bytes[2] / 1e6
    assert f"A batch from v100 before block 3 weighs {megabytes:.3g} MB and " in output


@pytest.mark.parametrize(("limit", "advised"), [(("--max-batch", "4"), True), ((), False)])
def test_larger_batches_are_advised_where_the_plan_has_the_largest_that_it_may(
    profile: Path, tmp_path: Path, limit: tuple[str, ...], advised: bool
) -> None:
    """Without a limit, no split has the largest batch."""
    output = in_one_line(run(profile, *limit, "--out", str(tmp_path / "plan.json")))
    assert ("larger ones may answer more: isobatch plan --max-batch 8" in output) == advised
    assert ("larger ones may answer more" in output) == advised


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A question that is played in a moment."""
    hasty = replace(DEFAULT_EFFORT, inputs=200, slos=2, last_inputs=300, last_slos=2, most=600, cell=50)
    monkeypatch.setattr("isobatch.cluster.simulator.plan_choice.DEFAULT_EFFORT", hasty)
    monkeypatch.setattr("isobatch.cluster.commands.plan_search.FEWEST_INPUTS", 300)
    return "--devices", "v100=1", "--slo-ms", "8", "--max-batch", "4"


def test_simulated_latency_is_apart_from_full_launches(profile: Path, tmp_path: Path, small: tuple[str, ...]) -> None:
    path = tmp_path / "plan.json"
    output = in_one_line(run_played(profile, *small, "--out", str(path)))
    plan = read_plan(path)
    assert f"latency, as simulated {plan.promise.simulated}" in output
    assert "gain by estimate; the plan was chosen by simulation" in output
    assert f"full launches all the way {1e3 * plan.promise.latency_s:.1f} ms, to the last block" in output


def test_the_bound_on_dollars_is_in_dollars(profile: Path) -> None:
    output = in_one_line(run(profile, "--goal", "cost", "--rate", "1", "--devices", "v100=2"))
    assert "best possible yes, proved" in output
    several = "--devices", "v100=2@3,k80=3@0.5:24", "--max-batch", "2"
    output = in_one_line(run(profile, "--goal", "cost", "--rate", "1000", *several))
    assert re.search(r"best possible no plan costs less than \$[\d.]+ per hour, proved", output)


def test_that_nothing_was_played_is_said_and_why(profile: Path, small: tuple[str, ...]) -> None:
    limited = "only the most goodput within an SLO is, without another limit"
    for options, why in ((("--no-simulation",), "--no-simulation"), (("--rate", "10"), limited)):
        output = in_one_line(run_played(profile, *small, *options))
        (row,) = re.findall("latency, as simulated (.*?) full launches all the way", output)
        assert row.startswith("not simulated: ")
        assert row.endswith(why)


def test_each_kind_of_device_is_told_what_batches_are_worth_on_it(profile: Path) -> None:
    output = in_one_line(run(profile, "--slo-ms", "50", "--max-batch", "16"))
    gains = json.loads(run(profile, "--slo-ms", "50", "--max-batch", "16", "--json"))["batch_gains"]
    assert [(each["kind"], each["batch"]) for each in gains] == [("v100", 16), ("k80", 16)]
    for each in gains:
        assert str(BatchGain(**each)) in output


def in_one_line(output: str) -> str:
    """Without the frames of tables, in one line."""
    return " ".join(re.sub("[│┃]", " ", output).split())


def test_a_plan_that_leaves_no_slack_is_played_and_not_refused(
    profile: Path, tmp_path: Path, small: tuple[str, ...]
) -> None:
    bold, path = (*small, "--slack", "0.9"), tmp_path / "plan.json"
    with pytest.raises(UserError, match="the fastest plan needs"):
        run(profile, *bold)
    shown = json.loads(run_played(profile, *bold, "--json", "--out", str(path)))["simulated"]
    assert shown["after_per_s"] > 0
    assert {name: shown[name] for name in ("p50_s", "p99_s", "in_time")} == asdict(read_plan(path).promise.simulated)


def test_where_the_longest_texts_take_longer_than_the_slo_that_is_the_reason(
    tmp_path: Path, small: tuple[str, ...]
) -> None:
    exits, table = ExitProfile((1.0,) * 6), datasheet_table(distilbert(), "v100")
    texts = Profile("distilbert", (table,), exits, lengths=Lengths((*(10,) * 9, 2000)), token_exits=exits)
    save(texts, tmp_path / "profile.json")
    with pytest.raises(UserError, match=r"no plan answers 0\.99 of the inputs in time, however few come"):
        run_played(tmp_path / "profile.json", *small, "--devices", "v100=1", "--slo-ms", "3")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--in-time", "1"], "--in-time 1.0 must be between 0 and 1"),
        (
            ["--in-time", "0.9", "--no-simulation"],
            "--in-time is for plans that are simulated: leave it out with --no-simulation",
        ),
        (["--in-time", "0.9", "--rate", "5"], "--in-time is for plans that are simulated: only the most goodput"),
        (["--budget", "0"], "--budget 0 must be above 0"),
        (["--out", "nowhere/plan.json"], "cannot write nowhere/plan.json: No such file or directory"),
        (["--out", "."], "cannot write .: it is a directory: name a file in it"),
        (["--backend", "tourch"], "backend 'tourch' is not known"),
    ],
)
def test_what_would_fail_after_the_search_is_refused_before_it(
    profile: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("isobatch.cluster.commands.plan_search.plan_result", lambda *_: pytest.fail("it searches"))
    with pytest.raises(UserError, match=sentence):
        run(profile, *options)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--in-time", "that are simulated: only the most goodput within an SLO is"),
        ("--slack", "with a deadline: give --slo-ms"),
    ],
)
def test_what_is_for_a_deadline_is_refused_without_one(profile: Path, option: str, sentence: str) -> None:
    options = ("plan", "--profile", profile, "--devices", "v100=1", option, "0.5")
    with pytest.raises(UserError, match=f"{option} is for plans {sentence}"):
        ran(*options)
    with pytest.raises(UserError, match="the fastest plan needs"):
        ran(*options, "--slo-ms", "0.1")


def test_what_is_read_is_not_replaced(profile: Path, tmp_path: Path) -> None:
    link, loop, lost = (tmp_path / name for name in ("link.json", "loop.json", "lost.json"))
    link.symlink_to(profile)
    loop.symlink_to(loop)
    lost.symlink_to(tmp_path / "nowhere" / "plan.json")
    before = profile.read_text()
    for out, reason in (
        (profile, "this command uses that file: name another one"),
        (link, "this command uses that file: name another one"),
        (loop, "Too many levels of symbolic links"),
        (lost, "No such file or directory"),
    ):
        with pytest.raises(UserError, match=f"cannot write {out}: {reason}"):
            run(profile, "--out", str(out))
    assert profile.read_text() == before


def test_a_plan_may_be_written_to_a_pipe(profile: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        run(profile, "--out", f"/dev/fd/{writing}")
        os.close(writing)
        assert json.loads(pipe.read())["model"] == "distilbert"


def test_a_plan_promises_its_score(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = json.loads(run(profile, "--json", "--out", str(path)))
    assert result["plan"]["promise"]["goodput_per_s"] == pytest.approx(result["score"]["goodput_per_s"])
    assert {each["name"] for each in result["baselines"]} >= {"no exits"}
    assert {each["kind"]: each["estimated"] for each in result["tables"]} == {"v100": True, "k80": True}
    assert result["plan"]["beside"], "so that it uses both kinds"


def test_what_errors_of_estimates_do_to_a_promise_is_said(tmp_path: Path, small: tuple[str, ...]) -> None:
    table = curve_table(distilbert(), "k80", backend="onnx", dtype="float16")
    exits = ExitProfile((1.0, 0.9, 0.8, 0.4, 0.3, 0.25))
    options = (*small, "--devices", "k80=1", "--slo-ms", "200", "--max-batch", "2", "--json")

    def promised(table: LatencyTable, *further: str) -> tuple[list[float] | None, float]:
        save(Profile("distilbert", (table,), exits), path := tmp_path / "profile.json")
        result = json.loads(run_played(path, *options, *further))
        return result["between_per_s"], result["plan"]["promise"]["goodput_per_s"]

    assert promised(replace(table, interval=()), "--no-simulation")[0] is None
    for further in ((), ("--no-simulation",)):
        between, per_s = promised(replace(table, interval=((0.5, 2.0),) * len(table.batch_sizes)), *further)
        low, high = between
        assert 0.3 * per_s < low < 0.75 * per_s
        assert 1.3 * per_s < high < 2.5 * per_s


def test_backend_and_precision_choose_the_times_that_a_plan_is_made_of(tmp_path: Path) -> None:
    path, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    ways = [(kind, backend, dtype) for kind in ("v100", "k80") for backend in ("onnx", "torch") for dtype in DTYPES]
    tables = tuple(curve_table(distilbert(), kind, backend=backend, dtype=dtype) for kind, backend, dtype in ways)
    save(Profile("distilbert", tables, ExitProfile((1.0, 0.9, 0.8, 0.4, 0.3, 0.25))), path)

    def score(*options: str) -> float:
        printed = json.loads(run(path, "--json", "--out", str(plan), *options))
        return float(printed["score"]["goodput_per_s"])

    compiled = score("--backend", "onnx", "--dtype", "float16")
    made = read_plan(plan)
    assert (made.backend, made.dtype, made.origin) == ("onnx", "float16", "estimated")  # nobody published of a K80
    assert compiled > score("--backend", "torch", "--dtype", "float16") > score() * 0.99
    output = in_one_line(run(path, "--backend", "onnx", "--dtype", "float16"))
    assert "published" in output
    assert re.search(r"by errors of estimates [\d,]+ to [\d,]+ per second, in four of five cases", output)
    with pytest.raises(UserError, match="on v100 has no times of tensorrt, only of onnx float16"):
        run(path, "--backend", "tensorrt")


def test_the_user_may_choose_cuts(profile: Path) -> None:
    plan = json.loads(run(profile, "--json", "--cut", "4,2"))["plan"]
    for pipeline in (plan, *plan["beside"]):
        starts = [split["start"] for placement in pipeline["placements"] for split in placement["splits"]]
        assert sorted(starts) == [0, 2, 4]


def test_nobody_is_answered_later_than_without_exits_where_that_is_asked(profile: Path) -> None:
    result = json.loads(run(profile, "--json", "--no-simulation", "--no-later"))
    without = result["baselines"][0]
    assert result["score"]["latency_s"] <= without["latency_s"] * (1 + 1e-9)
    assert result["score"]["goodput_per_s"] >= without["goodput_per_s"] * (1 - 1e-9)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--goal", "cost"), "the goal cost needs --rate"),
        (("--goal", "speed"), "goal = 'speed' must be one of cost, goodput, latency, goodput-per-dollar"),
        (("--slo-ms", "0.2"), "0.2 ms SLO: the fastest plan needs"),
        (("--rate", "1e9", "--goal", "cost", "--devices", "k80=2"), "these devices sustain at most"),
        (("--slack", "1.5"), "slack = 1.5"),
        (("--slo-ms", "-5"), "--slo-ms -5 must be above 0"),
        (("--rate", "0"), "--rate 0 must be above 0"),
        (("--cut", "2,x"), "--cut '2,x' must be numbers"),
        (("--cut", "6"), "--cut 6: the network has 6 blocks: cut before 1 to 5"),
        (("--devices", "v100=0"), "holds no device"),
    ],
)
def test_what_cannot_be_is_one_line(profile: Path, options: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        run(profile, *options)
    assert "\n" not in str(error.value)


def test_thresholds_are_tuned_of_a_prepared_model_only(profile: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no exit_table\.npz: 'isobatch prepare' writes a directory with one"):
        ran("tune", tmp_path, "--profile", profile, "--devices", "v100=1", "--out", tmp_path / "tuned")


def test_the_least_slo_counts_slack_where_plans_must_keep_it(profile: Path) -> None:
    for goal, slack in ((("--goal", "cost", "--rate", "1"), True), ((), False)):
        with pytest.raises(UserError) as error:
            run_played(profile, "--slo-ms", "0.2", *goal)
        assert ("slack included" in str(error.value)) == slack


def test_a_simulated_plan_is_no_later_than_without_exits(profile: Path, tmp_path: Path, small: tuple[str, ...]) -> None:
    path, kinds, known = tmp_path / "plan.json", fleet("v100=1"), load(profile)
    facts = problem(known, kinds, links_between(kinds))
    options = (*small, "--max-batch", "32", "--no-later", "--slo-ms", "100", "--out", str(path))
    limited = no_later(facts, Objective(slo_s=0.1, max_batch=32))
    stock = baseline(NO_EXITS, facts, limited).plan
    tails = Tails(facts, stock, limited.slo_s, 1000)
    run(profile, *options)
    assert not tails.kept_by(read_plan(path))
    run_played(profile, *options)
    assert tails.kept_by(read_plan(path))


def test_plans_in_seconds_or_for_any_rate_are_simulated(
    profile: Path, tmp_path: Path, small: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = replace(DEFAULT_EFFORT, inputs=400, slos=4, last_inputs=800, last_slos=4, most=1200, cell=100)
    monkeypatch.setattr("isobatch.cluster.simulator.plan_choice.DEFAULT_EFFORT", more)
    one = json.loads(run_played(profile, *small, "--json", "--seconds", "0.1"))["simulated"]["after_per_s"]
    path = tmp_path / "plan.json"
    words = in_one_line(run_played(profile, *small, "--devices", "v100=4000", "--out", str(path)))
    (devices,) = re.findall(r"in a cell of (\d+) of its 4000 devices, within [\d.]+ %", words)
    assert int(devices) < 4000
    promise = read_plan(path).promise
    assert promise.goodput_per_s == pytest.approx(4000 * one, rel=0.3)
    assert one > 100
