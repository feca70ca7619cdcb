"""Two applications of a fleet and its arbiter, live on virtual devices: a flood of one moves a device, and back."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from experiments.serve.fleet import profile
from isobatch.cluster.cli import app
from isobatch.cluster.load.generator import LoadGenerator, LoadRecord
from isobatch.cluster.load.workloads import arrivals
from isobatch.profiles.files import save
from tests.helpers.asking import ask, eventually
from tests.integration.conftest import Put, Run

KIND, DEVICES = "v100", 4
PASS_S, SLO_S = 0.3, 5.0  # a device sustains about 35 inputs per second
LEAST_PER_S, CALM_PER_S, FLOOD_PER_S = 30.0, 12.0, 100.0
HASTY = {"replan_every_s": 8.0, "look_every_s": 1.0, "react_every_s": 0.5, "enough_inputs": 20}


@pytest.fixture
def base(deployed: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The Serve file that `isobatch plan` writes, with shorter windows."""
    monkeypatch.chdir(tmp_path)
    save(profile(PASS_S), tmp_path / "virtual.json")
    virtual = {"backend": "virtual", "cpus_per_replica": 0.1, "audit_share": 0.0}
    entry = {"profile": "virtual.json", "slo_ms": 1e3 * SLO_S, "rate_per_s": 60.0, "args": virtual}
    applications = [entry | {"name": "calm", "least_per_s": LEAST_PER_S}, entry | {"name": "flooded"}]
    fleet = {"devices": {KIND: DEVICES}, "goal": "fairness", "applications": applications}
    Path("fleet.yaml").write_text(yaml.safe_dump(fleet))
    options = ("plan", "fleet.yaml", "--believed", "--gap", "0.02", "--out", "serve.yaml")
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    served = yaml.safe_load(Path("serve.yaml").read_text())["applications"]
    for each in served:
        if each["name"].endswith("-controller"):
            each["args"] |= HASTY | {"memory": str(tmp_path / each["name"])}
        elif each["name"] == "fleet":
            each["args"] |= {"replan_every_s": 8.0, "look_every_s": 1.0}
        else:
            each["deployments"] = [{"name": "front", "ray_actor_options": {"num_cpus": 0.1}}]
    base = deployed(*served)
    assert eventually(lambda: budgets(base) == {"calm": {KIND: 2}, "flooded": {KIND: 2}})
    return base


def status(base: str, name: str) -> dict[str, Any]:
    code, reply = ask(base, "GET", f"/{name}/status")
    return dict(reply) if code == 200 else {}


def budgets(base: str) -> dict[str, dict[str, int]]:
    return dict(status(base, "fleet").get("budgets", {}))


def uses(base: str, name: str) -> int:
    return int(status(base, f"{name}-controller")["plan"]["devices"].get(KIND, 0))


def load(base: str, name: str, per_s: float, seconds: float) -> LoadRecord:
    bodies = [json.dumps({"inputs": [{"exit_block": block}]}).encode() for block in (3, 7)]
    generator = LoadGenerator(f"{base}/{name}/predict", bodies)
    return asyncio.run(generator.at(arrivals("poisson", per_s, seconds, seed=1), patience_s=2 * SLO_S))


@pytest.fixture
def calm(base: str) -> Iterator[list[LoadRecord]]:
    """The calm application is asked all the while."""
    records = list[LoadRecord]()
    thread = threading.Thread(target=lambda: records.append(load(base, "calm", CALM_PER_S, 45.0)))
    thread.start()
    yield records
    thread.join()


def test_a_flood_moves_a_device_and_costs_the_other_application_nothing(
    base: str, calm: list[LoadRecord], run: Run
) -> None:
    flood = load(base, "flooded", FLOOD_PER_S, 25.0)
    decisions = status(base, "fleet")["decisions"]
    given = next(each for each in status(base, "calm-controller")["events"] if each["what"] == "granted")
    moved = next(each for each in status(base, "flooded-controller")["events"] if each["what"] == "granted")
    (rolled, *_) = [
        each
        for each in status(base, "flooded-controller")["events"]
        if each["what"] == "rolled out" and each["at_s"] >= moved["at_s"]
    ]
    print("decisions", json.dumps(decisions, indent=1))
    print("given", given, "moved", moved, "rolled", rolled)
    print("flood", np.unique(flood.status, return_counts=True))
