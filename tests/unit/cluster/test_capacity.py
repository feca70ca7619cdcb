"""What a plan needs is compared with what Ray has, and what is short is named."""

from pathlib import Path
from typing import Any

import pytest

from cluster.serving.capacity import check_capacity
from cluster.serving.serve_file import APPLICATION
from optimizer.plan import Placement, Plan, Split
from profiles.errors import UserError
from profiles.exits import ExitProfile
from profiles.files import Profile, save
from profiles.latency import LatencyTable


def content(folder: Path, kind: str, replicas: int, **more: Any) -> dict[str, Any]:
    table = LatencyTable(kind, (1,), ((0.001,),), ((0.0,),), 0.0, (1,), (1,), "made up")
    save(Profile("toy", (table,), ExitProfile((1.0,))), folder / "profile.json")
    (folder / "plan.json").write_text(Plan((Placement(kind, replicas, (Split(0, 1, 1),)),)).to_json())
    arguments = {"plan": str(folder / "plan.json"), "profile": str(folder / "profile.json"), **more}
    return {
        "applications": [{"name": "a", "import_path": APPLICATION, "args": arguments}, {"import_path": "other:app"}]
    }


def test_enough_is_enough(tmp_path: Path) -> None:
    check_capacity(content(tmp_path, "cpu", 3), {"CPU": 4.0})
    check_capacity(content(tmp_path, "a100", 2), {"CPU": 3.0, "GPU": 2.0, "accelerator_type:A100": 1.0})
    check_capacity(content(tmp_path, "cpu", 3, cpus_per_replica=0), {"CPU": 1.0})  # what the sentence below says helps
    check_capacity(content(tmp_path, "a100", 64, backend="virtual"), {"CPU": 2.0})


@pytest.mark.parametrize(
    ("kind", "has", "sentence"),
    [
        ("cpu", {"CPU": 3.0}, "needs 4 CPUs with the front; this Ray has 3 CPUs, 0 GPUs: plan for fewer .*"),
        ("a100", {"CPU": 4.0}, "runs on a100; this Ray has 4 CPUs, 0 GPUs"),
        ("a100", {"CPU": 4.0, "GPU": 8.0, "accelerator_type:T4": 1.0}, "this Ray has 4 CPUs, 8 GPUs .T4."),
        ("a100", {"CPU": 4.0, "GPU": 2.0, "accelerator_type:A100": 1.0}, "needs 3 GPUs with the front"),
        # Serve gives every replica a CPU that does not say how many it wants.
        ("a100", {"CPU": 3.0, "GPU": 3.0, "accelerator_type:A100": 1.0}, "needs 4 CPUs with the front"),
    ],
)
def test_what_is_short_is_named(tmp_path: Path, kind: str, has: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_capacity(content(tmp_path, kind, 3), has)
