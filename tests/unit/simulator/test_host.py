"""What serving costs beside the devices, in the simulator: it delays, it queues, and it is told by a file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isobatch.cluster.simulator.event_loop import HostCosts
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.cluster.simulator.sustained import run
from isobatch.profiles.errors import UserError, read_model
from tests.helpers.simulated_fleet import FAST, SLO_S, TWO, one_by_one

PLAIN = World(TWO, FAST, SLO_S)
HOST = HostCosts(request_s=0.001, launch_s=0.002, request_way_s=0.003, launch_way_s=0.004, turn_s=0.0005)


@pytest.mark.parametrize(("sure_after", "launches"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_a_lone_request_pays_once_and_for_each_of_its_launches(sure_after: int, launches: int) -> None:
    plain, hosted = (one_by_one(world, [sure_after] * 5) for world in (PLAIN, replace(PLAIN, host=HOST)))
    more_s = hosted.tally.quantile_s(0.5) - plain.tally.quantile_s(0.5)
    believed_s = 0.001 * (launches - 1)  # of a hand-over, by the links: what was measured takes its place
    assert more_s == pytest.approx(0.001 + 0.003 + launches * (0.002 + 0.004 + HOST.turn_s) - believed_s, rel=0.05)


def test_a_front_is_a_bottleneck_and_two_are_half_of_one() -> None:
    """A request takes 1 ms of a front: 1,000 a second go through one, whatever the devices could do."""
    host = HostCosts(request_s=0.001)
    inputs = [(np.arange(0, 1, 1 / 1500), np.zeros(1500, np.int64))]
    plain, one, two = (
        simulate(world, inputs, 1.0)
        for world in (PLAIN, replace(PLAIN, host=host), replace(PLAIN, host=host, fronts=2))
    )
    assert plain.good == two.good == 1500
    assert one.good < 1200
    assert one.tally.quantile_s(0.99) > 0.2


@pytest.mark.parametrize("rate", [300.0, 3000.0])
def test_every_input_still_ends_exactly_once(rate: float) -> None:
    """Also where the front cannot even refuse as fast as they come."""
    report = run(replace(PLAIN, host=HOST), rate, 3000, seed=3)
    assert report.arrived == report.answered + report.refused + report.expired
    assert report.answered > (2900 if rate < 1000 else 0)


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.write_text(HOST.model_dump_json())
    assert read_model(path, HostCosts) == HOST
    path.write_text('{"request_ms": 1}')
    with pytest.raises(UserError, match=r"host\.json: request_ms: Extra inputs are not permitted"):
        read_model(path, HostCosts)
    path.write_text('{"request_s": 1e999}')
    with pytest.raises(UserError, match=r"host\.json: request_s: Input should be a finite number"):
        read_model(path, HostCosts)
    with pytest.raises(UserError, match="cannot read"):
        read_model(tmp_path / "nowhere.json", HostCosts)
