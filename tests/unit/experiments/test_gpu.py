"""The measurements for an accelerator run here as a trial, without Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu import answers, measure, page, systems
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


PART = "distilbert 16"


@pytest.mark.long
def test_a_trial_on_this_machine_gives_tables_comparisons_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "STEPS", 1)
    monkeypatch.setattr(systems, "DRAWN", 32)
    small = ["--device", "cpu", "--dtype", "float32", "--networks", "distilbert", "--small", "--seconds", "0.01"]
    (tmp_path / "gpu.md").write_text(page.PAGE.read_text())
    measure.main([*small, "--out", str(tmp_path), "--page", str(tmp_path / "gpu.md")])
    (table,) = load(tmp_path / "distilbert.json").tables
    assert (table.kind, table.length, table.num_blocks, table.backend) == ("cpu", 16, 2, "torch")
    assert table.batch_sizes[0] == 1
    assert table.ramp_s[0][0] >= 0
    assert min(table.memory_bytes) > 7_000_000 * 4, "a layer of DistilBERT has 7 million weights"
    result = json.loads((tmp_path / "results-cpu.json").read_text())
    assert result["trial"]
    assert result["versions"]["torch"]
    (survival,) = (name for name in systems.SURVIVALS if "half" in name)
    systems_part = f"{PART}, {survival}"
    assert list(result["parts"]) == [measure.ANSWERS, PART, measure.DECODER, measure.LINK, systems_part]
    same, of_length, decoder, link, compared = result["parts"].values()
    del same["measuring_s"]
    assert {f"{family}, torch" for family in answers.FAMILIES} <= same.keys()
    assert "bert, onnx" in same
    assert all(difference < 1e-3 for difference in same.values())
    assert all(0 < share < 1.5 for share in of_length["roofline_shares"].values())
    assert of_length["hop_ms"]["bytes"] == 4 * (16 * 768 * 4 + 4)
    assert min(link["hop_ms"] + link["turn_ms"], link["gb_per_s"]) > 0
    rows = compared["systems"]
    assert len(rows) == 3
    assert all(row["goodput_per_s"] > 0 for row in rows)
    assert decoder["tokens_per_s_2"] > 0
    assert f"| {PART}: full batches | {of_length['rate_per_s']:.0f}/s, " in (tmp_path / "gpu.md").read_text()


def test_it_needs_what_a_machine_with_an_accelerator_has() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "imported", done.stderr
