"""The plan that is made at the start: for the devices that were named, or that there are; impossible ones say why."""

from pathlib import Path

import pytest

from deployments.config import AppConfig, parse
from deployments.graph import read_graph
from deployments.planning import DeviceCounts, first_plan
from profiles.errors import UserError
from profiles.exits import ExitProfile
from profiles.files import Profile, load, save
from profiles.latency import LatencyTable

BLOCKS = 4


def table(kind: str, block_s: float) -> LatencyTable:
    """A launch takes as long for eight as for one."""
    row, none, sizes = (block_s,) * BLOCKS, (0.0,) * BLOCKS, (100,) * BLOCKS
    return LatencyTable(kind, (1, 8), (row, row), (none, none), 0.001, sizes, sizes, "made up")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    tables = (table("v100", 0.001), table("oddity", 0.002), table("cpu", 0.1))
    save(Profile("toy", tables, ExitProfile((1.0, 0.5, 0.5, 0.25))), tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def plan_for(profile: str, has: DeviceCounts | None = None, **told: object) -> dict[str, int]:
    config = parse({"profile": profile} | told)
    return first_plan(config, load(Path(profile)), lambda: has or {}).devices()


def test_the_devices_that_were_named_are_used(profile: str) -> None:
    assert plan_for(profile, devices={"v100": 3}) == {"v100": 3}


def test_a_kind_that_is_in_no_catalogue_is_as_good_as_any(profile: str) -> None:
    config = AppConfig(profile=profile, devices={"oddity": 2}, backend="virtual")
    assert read_graph(config).plan.devices() == {"oddity": 2}


def test_auto_takes_what_there_is_and_was_profiled(profile: str) -> None:
    assert plan_for(profile, {"v100": 2, "h100": 8, "cpu": 1}, devices="auto", slo_ms=100) == {"v100": 2}
    assert plan_for(profile, {"cpu": 5}, devices="auto", cpus_per_replica=2) == {"cpu": 2}, "one CPU is the front's"
    with pytest.raises(UserError, match=r"this Ray has 8 h100, .* has times of v100, oddity, cpu"):
        plan_for(profile, {"h100": 8, "cpu": 1}, devices="auto")


def test_the_rate_and_the_largest_batch_are_kept(profile: str) -> None:
    made = first_plan(parse({"profile": profile, "devices": {"v100": 3}, "max_batch": 4}), load(Path(profile)))
    assert max(split.batch_size for split in made.splits) <= 4
    with pytest.raises(UserError, match="rate_per_s needs devices"):
        parse({"rate_per_s": 5.0})


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"devices": {"v100": 3}, "slo_ms": 1.0}, "ms"),
        ({"devices": {"k80": 3}}, "no table for device kind 'k80'"),
        ({"devices": {"v100": 0}}, "counts of at least one"),
        ({"devices": {}}, "counts of at least one"),
        ({"devices": {"v100": 1}, "device": "cpu"}, "device cannot be set beside a plan"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(profile: str, told: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        plan_for(profile, **told)
    assert "\n" not in str(error.value)


def test_devices_need_a_profile() -> None:
    with pytest.raises(UserError, match="a plan needs its profile too"):
        parse({"devices": "auto"})
