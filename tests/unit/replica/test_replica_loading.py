"""A replica loads its network by the configuration with which its application was first deployed."""

from dataclasses import replace
from pathlib import Path

import pytest

from isobatch.deployments.config import AppConfig, parse
from isobatch.deployments.replica.loading import load_model
from isobatch.deployments.replica.virtual import VirtualModel
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from tests.helpers.toy_model import BLOCKS, Toy
from tests.helpers.virtual_device import SURVIVAL, table

LOADER = "tests.helpers.toy_model:load"


@pytest.fixture
def first(tmp_path: Path) -> AppConfig:
    """A configuration that was parsed while its plan's file existed; the file has been removed since."""
    save(Profile("toy", (replace(table(), kind="cpu"),), ExitProfile(SURVIVAL)), tmp_path / "profile.json")
    plan = Plan((Placement("cpu", 1, (Split(0, BLOCKS, 1),)),), backend="onnx", dtype="int8")
    (tmp_path / "plan.json").write_text(plan.to_json())
    made = parse({"plan": str(tmp_path / "plan.json"), "profile": str(tmp_path / "profile.json"), "loader": LOADER})
    (tmp_path / "plan.json").unlink()
    return made


def test_a_replica_that_starts_later_does_not_need_the_file_of_the_plan(first: AppConfig) -> None:
    assert (first.backend, first.dtype) == ("onnx", "int8"), "as the plan said"
    assert isinstance(load_model(first.model_copy(update={"backend": "torch", "dtype": "float32"}), "cpu", ""), Toy)


def test_a_virtual_replica_does_not_need_the_file_of_the_plan(first: AppConfig) -> None:
    assert isinstance(load_model(first.model_copy(update={"backend": "virtual"}), "cpu", ""), VirtualModel)
