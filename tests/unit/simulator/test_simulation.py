"""`isobatch simulate` without the command line's own parsing: files in, tables and a picture out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobatch.cluster.commands.simulate import ClassifierSimulationOptions
from isobatch.cluster.commands.simulate_run import controlled_world, rehearse_inputs, run, world_of
from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.serving import serve_file as serve_files
from isobatch.cluster.simulator.report import draw, tables
from isobatch.deployments.config import AppConfig
from isobatch.optimizer.plan import Placement, Plan, Promise, Split
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.lengths import Lengths
from tests.helpers.commands import ran
from tests.helpers.simulated_fleet import table

PLAN = Plan(
    (Placement("v100", 2, (Split(0, 2, 8, (1,)), Split(2, 4, 8))),),
    Promise(goodput_per_s=1000.0, latency_s=0.1, cost_per_hour=3.6, gap=0.0),
)


@pytest.fixture
def config(tmp_path: Path) -> AppConfig:
    save(Profile("toy", (table("v100"),), ExitProfile((1.0, 1.0, 0.5, 0.5))), tmp_path / "profile.json")
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    return AppConfig(plan=str(tmp_path / "plan.json"), profile=str(tmp_path / "profile.json"), slo_ms=200.0)


@pytest.fixture
def serve_file(config: AppConfig, tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    arguments = f"{{plan: {config.plan}, profile: {config.profile}, backend: virtual, slo_ms: 200}}"
    path.write_text(f"applications: [{{name: x, import_path: 'isobatch.deployments.app:build', args: {arguments}}}]\n")
    return path


def load(rate: float, seconds: float, **more: Any) -> ClassifierSimulationOptions:
    return ClassifierSimulationOptions(config=Path(), rate=rate, hours=seconds / 3600, **more)


def cells(rows: object, column: int) -> list[str]:
    return list(rows.columns[column].cells)  # type: ignore[attr-defined]


def test_where_nothing_is_answered_there_is_no_latency(config: AppConfig) -> None:
    here = world_of(config.model_copy(update={"slo_ms": 0.1}))
    report = run(here, load(200.0, 1.0))
    summary = tables(report, here.slo_s)[0]
    assert report.answered == 0
    assert dict(zip(cells(summary, 0), cells(summary, 1), strict=True))["latency p50"] == "-"


def test_what_is_served_is_simulated(config: AppConfig, tmp_path: Path) -> None:
    here = world_of(config)
    report = run(here, load(200.0, 10.0))
    summary, fills = tables(report, here.slo_s)
    assert report.good == report.arrived == pytest.approx(2000, rel=0.1)
    result = dict(zip(cells(summary, 0), cells(summary, 1), strict=True))
    assert result["cost"].startswith("$3.60 per hour, $")  # about 5: 3.6 dollars buy an hour of 200 answers a second
    assert cells(fills, 0) == ["0-1", "2-3"]
    first, second = (fill.inputs for fill in report.fills[0].values())
    assert second == pytest.approx(first / 2, rel=0.1)
    draw(report, here.slo_s, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_pipelines_of_one_lane_are_one_row_for_each_split(config: AppConfig, tmp_path: Path) -> None:
    (placement,) = PLAN.placements
    beside = Plan((replace(placement, replicas=1),))
    (tmp_path / "plan.json").write_text(replace(PLAN, beside=(beside,)).to_json())
    fills = tables(run(world_of(config), load(4000.0, 1.0)), 0.2)[1]
    assert cells(fills, 0) == ["0-1", "2-3"]
    assert cells(fills, 1) == ["3 v100"] * 2
    shares = [float(cell.rstrip("%")) for cell in cells(fills, 5)]
    assert 80 < sum(shares) <= 120, "of the time of three devices; some launches end after the last arrival"


def test_without_a_plan_or_tokens_there_is_nothing_to_simulate(config: AppConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the demo has no plan to be simulated: 'isobatch serve"):
        world_of(AppConfig())
    with pytest.raises(UserError, match="the plan counts inputs, not tokens"):
        run(world_of(config), load(200.0, 2.0, lengths=tmp_path / "lengths.txt"))


@pytest.mark.parametrize("pinned", [True, False])
def test_a_plan_that_a_controller_would_keep_is_named(
    serve_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pinned: bool
) -> None:
    content = serve_files.serve_file(serve_file, {"replan": not pinned})
    rehearse_inputs(load(100.0, 3.6, replan=True, out=tmp_path / "s.png"), content["applications"][0], content)
    assert ("a plan without replan: true" in capsys.readouterr().out) == pinned


def test_an_application_is_rehearsed_with_its_own_controller(serve_file: Path, tmp_path: Path) -> None:
    path, content = "isobatch.cluster.controller.app:build", serve_files.serve_file(serve_file, {})
    other = {"application": "y", "goal": "cost", "grow_to": {"a100": 1}}  # of which this profile has no table
    for arguments in (other, {"application": "x"}):
        content["applications"].append({"name": arguments["application"], "import_path": path, "args": arguments})
    rehearse_inputs(load(100.0, 3.6, replan=True, out=tmp_path / "s.png"), content["applications"][0], content)
    assert (tmp_path / "s.png").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--jitter", "-1"], "jitter = -1"),
        (["--jitter", "nan"], "jitter = nan must be 0 or more and finite"),
        (["--mix", "0=1"], "must look like SECONDS:SHARE"),
        (["--mix", "0:0.8,0:0.2"], "seconds of a mix must ascend"),
        (["--mix", "0:1.5"], "'0:1.5': the shares of a mix must be from 0 to 1"),
        (["--arrivals", "gamma", "--cv", "nan"], "cv = nan must be 0.001 to 100"),
        (["--arrivals", "gamma", "--cv", "1e-200"], "cv = 1e-200 must be 0.001 to 100"),
        (["--out", "nowhere/x.png"], "cannot write nowhere/x.png"),
        (["--out", "x.json"], "cannot draw x.json: a picture's name ends in .png"),
        (["--mix", "nan:0.5"], "must look like SECONDS:SHARE"),
        (["--trace-each-s", "60"], "--trace-each-s is for --trace: name the trace"),
        (["--cv", "2"], "--cv is for --arrivals gamma"),
        (["--hours", "1e-9"], "nothing comes in so short a time: give more --hours, or a higher --rate"),
    ],
)
def test_what_is_wished_wrongly_is_one_line(serve_file: Path, options: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        ran("simulate", "--config", serve_file, "--rate", "100", *options)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_one_of_several_applications_must_be_named(tmp_path: Path) -> None:
    shop = "{name: shop, import_path: 'isobatch.deployments.app:build'}"
    decoder = "import_path: 'isobatch.deployments.decoding.app:build', args: {model: llm-demo}"
    several = f"{shop}, {{name: texts, route_prefix: /texts, {decoder}}}"
    for applications, names in ((several, "shop, texts"), ("{import_path: 'theirs:app'}", "none of isobatch")):
        (file := tmp_path / "serve.yaml").write_text(f"applications: [{applications}]")
        with pytest.raises(UserError, match=f"the Serve file has {names}: --application names the one to simulate"):
            ran("simulate", "--config", file, "--rate", "5")


def test_a_trace_brings_its_own_rate(serve_file: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("minute,count\n0,600\n")
    out = ["--hours", "0.01", "--out", str(tmp_path / "s.png")]
    with pytest.raises(UserError, match="give --rate, or --trace"):
        ran("simulate", "--config", serve_file, *out)
    options = ["simulate", "--config", serve_file, "--trace", tmp_path / "trace.csv", *out]
    with pytest.raises(UserError, match="a workload needs a rate and a time above 0, got 0 per second"):
        ran(*options, "--rate", 0)
    output = ran(*options)
    assert "per second)" in output
    assert "goodput (within 200 ms)" in output
    assert (tmp_path / "s.png").exists()
    assert "trace.csv: 1 counts, each of 60 s; 10.0 arrivals a second" in output
    assert "each of 120 s; 5.0 arrivals a second" in ran(*options, "--trace-each-s", "120")


def test_inputs_may_be_mixed(config: AppConfig) -> None:
    shifting = run(world_of(config), load(100.0, 10.0, mix="0:1,5:0"))
    assert shifting.answered == shifting.arrived
    first, second = (fill.inputs for fill in shifting.fills[0].values())
    assert second / first == pytest.approx(0.5, rel=0.15), "nobody who is easy gets there, then all do"


def test_lengths_come_from_a_file_or_from_the_profile(tmp_path: Path) -> None:
    texts = replace(table("v100"), length=20)
    profile = Profile("toy", (texts,), ExitProfile((1.0, 1.0, 0.5, 0.5)), lengths=Lengths((10, 30)))
    save(profile, tmp_path / "profile.json")
    (tmp_path / "plan.json").write_text(replace(PLAN, length=20).to_json())
    (tmp_path / "lengths.txt").write_text("40\n80\n")
    config = AppConfig(plan=str(tmp_path / "plan.json"), profile=str(tmp_path / "profile.json"), slo_ms=200.0)
    world = world_of(config)
    drawn = run(world, load(200.0, 2.0)).tally
    assert drawn.arrived_weight / drawn.arrived.sum() == pytest.approx(20, abs=2)  # four standard errors
    assert controlled_world(config, ControllerConfig(), world)[0].facts.lengths == profile.lengths
    result = run(world, load(200.0, 2.0, lengths=tmp_path / "lengths.txt"))
    assert result.tally.arrived_weight / result.arrived == pytest.approx(60, abs=0.1)
    assert any("60.0 a text (planned: 20)" in cell for cell in cells(tables(result, 0.2)[0], 1))


def test_audits_run_as_they_are_served_and_change_no_answer_where_they_cost_nothing(config: AppConfig) -> None:
    options, here = load(200.0, 20.0), world_of(config)
    report = run(here, options)
    assert sum(report.tally.audited) == pytest.approx(0.02 * 0.5 * report.arrived, rel=0.4)
    free = replace(here, limits=replace(here.limits, audit_cost=0.0))
    without = run(replace(here, limits=replace(here.limits, audit_share=0.0)), options)
    assert run(free, options).good == without.good == report.good
