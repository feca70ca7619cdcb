"""The controller beside a running application whose load grows: capacity that was given away is taken back at once.

A device of its own time: a launch takes about as long whatever its size, so that large batches sustain many times more.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from isobatch.cluster.controller.application import RunningApplication
from isobatch.cluster.load.generator import LoadGenerator, LoadRecord
from isobatch.cluster.load.workloads import arrivals
from isobatch.deployments.named import LOADER, VIRTUAL
from isobatch.deployments.planning import summary
from isobatch.optimizer import Objective, Plan, optimize
from isobatch.profiles.devices import Device, links_between
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable
from tests.helpers.asking import ask, eventually
from tests.helpers.toy_graph import application
from tests.integration.conftest import Put, Run

pytestmark = [pytest.mark.beside("steered", last=1), pytest.mark.long]
BLOCKS, SLO_S = 4, 1.6
WINDOW_S = 600.0  # so that no other decision is due before the test ends
FLOOD_PER_S = 40.0  # many times what the quick plan sustains, and a fifth of what the other does
SURVIVAL = (1.0, 0.8, 0.5, 0.5)
ROWS = ((0.032,) * BLOCKS, (0.040,) * BLOCKS)  # a block, alone and with 32 inputs
RAMPS, BYTES = ((0.0008,) * (BLOCKS - 1) + (0.0,),) * 2, (100,) * BLOCKS
TABLE = LatencyTable("cpu", (1, 32), ROWS, RAMPS, 0.004, BYTES, BYTES, "made up")
PROFILE = Profile("toy", (TABLE,), ExitProfile(SURVIVAL))
DEVICES = [Device("cpu", 1, 10**9, 1.0)]
GOAL = Objective(slo_s=SLO_S, max_batch=32)


def planned(goal: Objective) -> Plan:
    return optimize(PROFILE, DEVICES, links_between(DEVICES), goal)


MOST, QUICK = planned(GOAL), planned(Objective("latency", slo_s=SLO_S, max_batch=32, goodput_per_s=5.0))


@pytest.fixture
def served(deployed: Put, tmp_path: Path, controller: dict[str, Any]) -> str:
    """The application on the plan of most goodput, and a controller beside it that remembers nothing."""
    folder = tmp_path / "toy"
    folder.mkdir()
    fields = {"backend": VIRTUAL, "slo_ms": 1e3 * SLO_S, "audit_share": 0.0}
    own = application(folder, MOST, LOADER, PROFILE, **fields)
    arguments = controller["args"] | {"memory": str(tmp_path / "memory"), "max_batch": 32, "goal": "latency"}
    base = deployed(own, controller | {"args": arguments | {"replan_every_s": WINDOW_S, "react_every_s": 0.5}})
    eventually(lambda: "plan" in status(base))
    return base


def status(base: str) -> dict[str, Any]:
    code, reply = ask(base, "GET", "/controller/status")
    return dict(reply) if code == 200 else {}


def flooded(run: Run, base: str) -> LoadRecord:
    bodies = [json.dumps({"inputs": [{"exit_block": block}]}).encode() for block in (0, 0, 1, 1, 1, 3, 3, 3, 3, 3)]
    generator = LoadGenerator(f"{base}/predict", bodies)
    return run(generator.at(arrivals("poisson", FLOOD_PER_S, 2.0, seed=1)))


def rolled_out(base: str) -> list[dict[str, Any]]:
    return [event for event in status(base)["events"] if event["what"] == "rolled out"]


def test_a_small_plan_that_refuses_inputs_makes_room_at_once(served: str, run: Run) -> None:
    """Where the goal is latency; the next decision would have been minutes later.

    The flood goes on until the large plan runs, and then until it keeps up: a busy machine may need longer for both.
    """
    run(RunningApplication("toy").roll_out(QUICK))
    assert eventually(lambda: status(served)["plan"]["summary"] == summary(QUICK))
    assert not rolled_out(served)
    assert (flooded(run, served).status == 503).any(), "the small plan has no room for so many"
    (moved, *_) = eventually(lambda: flooded(run, served) and rolled_out(served))
    assert "inputs were refused" in moved["why"], moved
    assert eventually(lambda: (flooded(run, served).status == 200).mean() > 0.9), status(served)["events"]
