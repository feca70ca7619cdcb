"""`isobatch simulate` without the command line's own parsing: files in, tables and a picture out."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from deployments.config import AppConfig
from experiments.devices import Troubles
from experiments.simulation import Load, draw, run, tables, world
from optimizer.plan import Placement, Plan, Promise, Split
from profiles.errors import UserError
from profiles.exits import ExitProfile
from profiles.files import Profile, save
from tests.unit.experiments.test_simulator import table

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
    path.write_text(f"applications: [{{name: x, import_path: 'deployments.app:build', args: {arguments}}}]\n")
    return path


def cells(rows: object, column: int) -> list[str]:
    return list(rows.columns[column].cells)  # type: ignore[attr-defined]


def test_what_is_served_is_simulated(config: AppConfig, tmp_path: Path) -> None:
    here = world(config, Troubles(), front_s=0.0)
    report = run(here, Load(rate_per_s=200.0, seconds=10.0))
    summary, fills = tables(report, here)
    assert report.good == report.arrived == pytest.approx(2000, rel=0.1)
    found = dict(zip(cells(summary, 0), cells(summary, 1), strict=True))
    assert found["cost"].startswith("$3.60 per hour, $")  # about 5: 3.6 dollars buy an hour of 200 answers a second
    assert cells(fills, 0) == ["0..1", "2..3"]
    first, second = (fill.inputs for fill in report.fills[0].values())
    assert second == pytest.approx(first / 2, rel=0.1)
    draw(report, here.slo_s, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_without_a_plan_there_is_nothing_to_simulate() -> None:
    with pytest.raises(UserError, match="needs plan"):
        world(AppConfig(), Troubles(), front_s=0.0)


def test_the_command_prints_and_draws(serve_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.png"
    arguments = ["simulate", "--config", str(serve_file), "--rate", "100", "--hours", "0.001", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "goodput (within 200 ms)" in result.output
    assert out.exists()


def test_what_the_command_cannot_use_is_one_line(serve_file: Path) -> None:
    arguments = ["simulate", "--config", str(serve_file), "--rate", "100", "--jitter", "-1"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith("jitter = -1")
