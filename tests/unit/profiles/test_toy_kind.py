"""A kind of device that the project has never heard of takes a table and one line: they are in this file."""

from pathlib import Path

import pytest

from isobatch.deployments.planning import device
from isobatch.optimizer import Objective, optimize, read_plan
from isobatch.profiles.devices import CATALOGUE, GB, Device, DeviceKind, fleet, links_between
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, load, save
from isobatch.profiles.latency import LatencyTable

TOY = Device("toy", 3, memory_bytes=2 * GB, price_per_hour=0.25)
SURVIVAL = (1.0, 0.8, 0.5, 0.5)


def table(kind: str, seconds: float) -> LatencyTable:
    """Of four blocks, each of which takes so long for 1 or for 8 inputs."""
    sizes = (100, 200, 300, 400)
    return LatencyTable(kind, (1, 8), ((seconds,) * 4,) * 2, ((0.0,) * 4,) * 2, 0.0005, sizes, sizes, "measured: a toy")


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """As `isobatch profile` writes it for a kind of its own."""
    save(Profile("made up", (table("toy", 0.001), table("v100", 0.004)), ExitProfile(SURVIVAL)), tmp_path / "toy.json")
    return load(tmp_path / "toy.json")


def test_a_plan_uses_a_kind_that_is_in_no_catalogue(profile: Profile, tmp_path: Path) -> None:
    alone = optimize(profile, [TOY], links_between([TOY]), Objective(slo_s=0.2))
    devices = [TOY, *fleet("v100=2")]
    plan = optimize(profile, devices, links_between(devices), Objective(slo_s=0.2))
    assert {each.kind for pipeline in alone.pipelines for each in pipeline.placements} == {"toy"}
    assert "toy" in {each.kind for pipeline in plan.pipelines for each in pipeline.placements}
    assert plan.promise.goodput_per_s >= alone.promise.goodput_per_s > 0
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert read_plan(tmp_path / "plan.json") == plan


def test_an_application_may_name_it() -> None:
    assert (device("toy", 3).kind, device("toy", 3).count) == ("toy", 3)
    assert device("toy", 3).memory_bytes > 0


def test_a_line_in_the_catalogue_gives_it_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = DeviceKind(2 * GB, 0.25, 1e12, 2e12, 100 * GB, 12 * GB, GB)
    monkeypatch.setitem(CATALOGUE, "toy", entry)
    assert fleet("toy=3") == (TOY,)
