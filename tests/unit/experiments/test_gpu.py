"""What is meant for an accelerator runs here in small form, and needs no Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu import measure, systems
from isobatch.cluster.bench import compare
from isobatch.profiles.files import load

ROOT = Path(__file__).parents[3]
WITHOUT = """
import sys
serving, planning = ["ray", "fastapi", "grpc", "typer"], ["statsmodels", "sklearn", "matplotlib", "onnx", "onnxruntime"]
sys.modules.update(dict.fromkeys(serving + planning))
import experiments.gpu.measure
for name in planning:
    del sys.modules[name]
import isobatch.optimizer, isobatch.deployments.front.in_process
import isobatch.deployments.models.onnx_model, isobatch.cluster.bench.setup
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


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--device", "cuda:77"], "device = 'cuda:77': this machine has"),
        (["--backend", "graphs"], "cpu does not have"),
        (["--networks", "bert"], "'bert' is none of bert-base"),
    ],
)
def test_what_this_machine_cannot_do_is_one_line(asked: list[str], told: str, tmp_path: Path) -> None:
    small = ["--device", "cpu", "--dtype", "float32", "--small", "--networks", "distilbert", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match=told):
        measure.main([*small, *asked])


def test_it_needs_what_a_machine_with_an_accelerator_has() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "imported", done.stderr
