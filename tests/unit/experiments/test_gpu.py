"""What is meant for an accelerator runs here in small form, and needs no Ray."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.bench import compare
from deployments.models.onnx_model import OnnxModel
from experiments.backend.families import NAMES, batches, untrained
from experiments.gpu import measure, systems, tables
from experiments.planner.settings import exits_along
from profiles.files import load

ROOT = Path(__file__).parents[3]
WITHOUT = """
import sys
serving, planning = ["ray", "fastapi", "grpc", "typer"], ["statsmodels", "sklearn", "matplotlib", "onnx", "onnxruntime"]
sys.modules.update(dict.fromkeys(serving + planning))
import experiments.gpu.measure
for name in planning:
    del sys.modules[name]
import optimizer, deployments.front.in_process, deployments.models.onnx_model, cluster.bench.setup
print("imported")
"""


def test_a_trial_on_this_machine_gives_tables_and_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "STEPS", 1)
    monkeypatch.setattr(systems, "DRAWN", 32)
    out = ["--device", "cpu", "--dtype", "float32", "--out", str(tmp_path), "--networks", "distilbert"]
    measure.main([*out, "--small", "--seconds", "0.05"])
    (table,) = load(tmp_path / "distilbert.json").tables
    assert (table.kind, table.length, table.num_blocks, table.backend) == ("cpu", 16, 2, "torch")
    assert table.batch_sizes[0] == 1
    assert table.ramp_s[0][0] >= 0
    assert min(table.memory_bytes) > 7_000_000 * 4, "a layer of DistilBERT has 7 million weights"
    found = json.loads((tmp_path / "results-cpu.json").read_text())
    assert found["trial"]
    of_length = found["distilbert"]["16"]
    assert all(0 < share < 1.5 for share in of_length["roofline_shares"].values())
    assert of_length["hop_ms"]["bytes"] == 4 * (16 * 768 * 4 + 4)
    ((survival, rows),) = of_length["systems"].items()
    assert survival in systems.SURVIVALS
    assert len(rows) == 3
    assert all(row["goodput_per_s"] > 0 for row in rows)


def test_onnx_runtime_is_measured_with_every_piece_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    setting = tables.TableSetting("cpu", "float32", "onnx", lengths=(8,), largest=1, budget_s=0.1, layers=1)
    (table,) = tables.measure("distilbert", setting)
    model = tables.network("distilbert", setting)
    assert (table.backend, table.num_blocks) == ("onnx", 1)
    assert isinstance(model, OnnxModel)
    assert not model.exported.requested, "all were there before the clock ran"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--device", "cuda:77"], "device 'cuda:77' is not on this machine"),
        (["--backend", "graphs"], "cpu does not have"),
        (["--networks", "bert"], "'bert' is none of bert-base"),
    ],
)
def test_what_this_machine_cannot_do_is_one_line(asked: list[str], told: str, tmp_path: Path) -> None:
    small = ["--device", "cpu", "--dtype", "float32", "--small", "--networks", "distilbert", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match=told):
        measure.main([*small, *asked])


@pytest.mark.parametrize("name", NAMES)
def test_every_network_has_its_true_width_and_runs(name: str) -> None:
    model = untrained(name, layers=1)
    exits = model.run(batches(name, 8)(1), model.num_blocks, ()).exits
    assert exits.logits.shape == (1, 2)
    widths = {"bert-large": 2 * 1024, "resnet-50": 256}
    assert model.anatomy.pooled_widths[0] == widths.get(name, 2 * 768)


@pytest.mark.parametrize("name", systems.SURVIVALS)
def test_a_survival_fits_any_depth(name: str) -> None:
    for blocks in (6, 12, 16, 24):
        assert exits_along(systems.SURVIVALS[name], blocks).num_blocks == blocks


def test_roofline_needs_a_device_of_the_catalogue(tmp_path: Path) -> None:
    setting = tables.TableSetting("cpu", "float32", lengths=(8,), largest=1, budget_s=0.1, layers=1)
    (table,) = tables.measure("distilbert", setting)
    assert tables.roofline_shares("distilbert", table, setting)
    assert tables.roofline_shares("distilbert", replace(table, kind="some-other"), setting) == {}


def test_it_needs_what_a_machine_with_an_accelerator_has() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "imported", done.stderr
