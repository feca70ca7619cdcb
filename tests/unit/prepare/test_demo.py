"""The demo's inputs, the files that are shipped, and the recipe that made them (in small; at length: `make demo`)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.demos import digits as demo
from experiments.demos.digits import Recipe
from experiments.demos.quality import quality_of
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.demo.digits import demo_inputs
from isobatch.deployments.models import load
from isobatch.deployments.models.ramps import RampDtype, read_rules
from isobatch.deployments.prepare import pipeline
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.promise import RULES, agreement_in

KIB = 1024
FILES = {
    "config.json", "model.safetensors", "preprocessor_config.json", "ramps.safetensors", "exits.json", "exits.png",
    "exit_table.npz",
}  # fmt: skip
SMALL = Recipe(num_blocks=2, steps=120, copies=1, rows=200)


def test_no_part_of_the_demo_shares_a_digit() -> None:
    copies = 2
    sample = demo.sample(copies)
    origin = np.tile(np.arange(len(sample) // copies), copies)
    train, calibrate, report = (
        {int(number) for number in origin[part]}
        for part in (sample.parts.train, sample.parts.calibrate, sample.parts.test)
    )
    assert train | calibrate | report == set(origin.tolist())
    assert not train & calibrate
    assert not (train | calibrate) & report


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_is_shipped_is_what_the_loader_expects_and_its_table_shows_what_it_promises(dtype: RampDtype) -> None:
    folder = demo_directory(dtype)
    files = list(folder.iterdir())
    assert {path.name for path in files} == FILES
    assert sum(path.stat().st_size for path in files if path.suffix != ".png") < 200 * KIB
    model, rules = load(folder), read_rules(folder / RULES)
    assert (model.num_blocks, model.num_labels, model.ramp_blocks) == (8, 10, tuple(range(7)))
    assert rules.dtype == dtype
    assert {rule.threshold for rule in rules.ramps} == {demo.THRESHOLD}
    assert model.run(model.encode(list(demo_inputs(3))), model.num_blocks, model.ramp_blocks).survivors is None
    evidence = Evidence.read(folder / EVIDENCE)
    assert agreement_in(folder) == 0.99
    own = evidence.nearest({rule.block: rule.threshold for rule in rules.ramps})
    assert evidence.disagreement(own) < 0.002 < evidence.disagreement(evidence.prepared) < 0.01
    assert sum(evidence.survival(evidence.prepared)) < 0.8 * sum(evidence.survival(own))


def test_both_precisions_are_one_network() -> None:
    exact, in_8_bits = (demo_directory(dtype) / "model.safetensors" for dtype in ("float32", "int8"))
    assert exact.read_bytes() == in_8_bits.read_bytes()


@pytest.mark.long
def test_the_recipe_learns_and_its_inputs_leave_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small: two blocks, a tenth of the steps. The bounds are far from what seeds or other arithmetic change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for each in (pipeline, demo):
        monkeypatch.setattr(each, "draw_exits", lambda _, path: path.touch())
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    made = demo.make_demo(tmp_path, seed=0, recipe=SMALL)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)
    for dtype, folder in made.items():
        assert {path.name for path in folder.iterdir()} == FILES
        assert read_rules(folder / RULES).dtype == dtype
    result = quality_of(load(made["float32"]), count=1000)
    assert result.accuracy.low > 0.5, "chance is 0.1"
    assert result.lost.low < 0.03
    assert result.survival[-1].high < 1.0
