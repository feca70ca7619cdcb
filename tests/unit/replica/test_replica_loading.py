"""A replica loads its network by the configuration with which its application was first deployed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.graph import read_graph
from isobatch.deployments.replica.loading import known_plan, load_front_model, load_model
from isobatch.deployments.replica.virtual import VirtualModel
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.model import SplitModel
from tests.helpers.toy_model import BLOCKS, Toy
from tests.helpers.virtual_device import SURVIVAL, table

LOADER = "tests.helpers.toy_model:load"


@pytest.mark.parametrize(("backend", "kind"), [("torch", Toy), ("virtual", VirtualModel)])
def test_a_replica_that_starts_later_does_not_need_the_file_of_the_plan(
    tmp_path: Path, backend: str, kind: type[SplitModel]
) -> None:
    """Its configuration was parsed while the file existed."""
    save(Profile("toy", (replace(table(), kind="cpu"),), ExitProfile(SURVIVAL)), tmp_path / "profile.json")
    plan = Plan((Placement("cpu", 1, (Split(0, BLOCKS, 1),)),), backend="onnx", dtype="int8")
    (tmp_path / "plan.json").write_text(plan.to_json())
    first = checked(
        AppConfig, {"plan": str(tmp_path / "plan.json"), "profile": str(tmp_path / "profile.json"), "loader": LOADER}
    )
    (tmp_path / "plan.json").unlink()
    assert (first.backend, first.dtype) == ("onnx", "int8"), "as the plan said"
    later = first.model_copy(update={"backend": backend, "dtype": "float32"})
    assert isinstance(load_model(later, "cpu", ""), kind)


def test_a_gpu_gets_ready_for_the_plan_that_is_made_at_the_start(tmp_path: Path) -> None:
    """Where devices are named, it is the same as the deployer's, which makes it from the same facts."""
    save(Profile("toy", (table(),), ExitProfile(SURVIVAL)), tmp_path / "profile.json")
    fields = {"profile": str(tmp_path / "profile.json"), "backend": "torch", "loader": LOADER, "slo_ms": 1000}
    named = checked(AppConfig, {**fields, "devices": {table().kind: 2}})
    assert known_plan(named, table().kind) == read_graph(named).plan
    assert known_plan(named, "cpu") is None
    assert known_plan(checked(AppConfig, {**fields, "devices": "auto"}), table().kind) is None


class Empty(Toy):
    num_blocks = 0

    def __init__(self, directory: str, device: str, dtype: str) -> None:
        super().__init__()


@pytest.mark.parametrize("load", [load_front_model, lambda config, directory: load_model(config, "cpu", directory)])
def test_a_loader_whose_network_has_no_blocks_is_named(load: Callable[[AppConfig, str], SplitModel]) -> None:
    with pytest.raises(UserError, match=r":Empty: its network has 0 blocks: num_blocks must be 1 or more$"):
        load(AppConfig(loader=f"{__name__}:Empty"), "")
