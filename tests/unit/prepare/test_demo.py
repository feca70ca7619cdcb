"""The demo's inputs, the files that are shipped, and the recipe that made them (in small; at length: `make demo`)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.demo import demo_directory
from deployments.demo.digits import PIXEL_MAX, demo_digits, demo_inputs
from deployments.models import load
from deployments.models.ramps import RampDtype, read_rules
from deployments.prepare import pipeline
from experiments.demos import digits as demo
from experiments.demos.digits import Recipe
from experiments.demos.quality import NOISES, MeanWithError, Quality, quality_of
from profiles.evidence import EVIDENCE, Evidence
from profiles.promise import RULES, agreement_in

KIB = 1024
FILES = {
    "config.json", "model.safetensors", "preprocessor_config.json", "ramps.safetensors", "exits.json", "exits.png",
    "exit_table.npz",
}  # fmt: skip
SMALL = Recipe(num_blocks=3, steps=150, copies=1, rows=200)


def test_inputs_are_digits_and_reproducible() -> None:
    images = demo_inputs(20, seed=3)
    assert images.shape == (20, 8, 8)
    assert images.min() >= 0.0
    assert images.max() <= PIXEL_MAX
    np.testing.assert_array_equal(images, demo_inputs(20, seed=3))
    assert not np.array_equal(images, demo_inputs(20, seed=4))


def test_the_noise_knob_changes_the_noise_and_nothing_else() -> None:
    still, noisy, noisier = (demo_digits(200, noise, seed=1) for noise in (0.0, 0.2, 0.6))
    np.testing.assert_array_equal(still[1], noisier[1])
    assert 0 < np.abs(noisy[0] - still[0]).mean() < np.abs(noisier[0] - still[0]).mean()


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
def test_what_is_shipped_is_what_the_loader_expects(dtype: RampDtype) -> None:
    folder = demo_directory(dtype)
    files = list(folder.iterdir())
    assert {path.name for path in files} == FILES
    assert sum(path.stat().st_size for path in files if path.suffix != ".png") < 200 * KIB
    model, rules = load(folder), read_rules(folder / RULES)
    assert (model.num_blocks, model.num_labels, model.ramp_blocks) == (8, 10, tuple(range(7)))
    assert rules.dtype == dtype
    assert {rule.threshold for rule in rules.ramps} == {demo.THRESHOLD}
    assert model.run(model.encode(list(demo_inputs(3))), model.num_blocks, model.ramp_blocks).survivors is None


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_it_promises_agreement_and_its_table_says_how_much_earlier_inputs_may_leave_within_that(
    dtype: RampDtype,
) -> None:
    folder = demo_directory(dtype)
    evidence, rules = Evidence.read(folder / EVIDENCE), read_rules(folder / RULES)
    assert agreement_in(folder) == 0.99
    own = evidence.nearest({rule.block: rule.threshold for rule in rules.ramps})
    assert evidence.disagreement(own) < 0.002 < evidence.disagreement(evidence.prepared) < 0.01
    assert sum(evidence.survival(evidence.prepared)) < 0.8 * sum(evidence.survival(own))


def test_both_precisions_are_one_network() -> None:
    exact, in_8_bits = (demo_directory(dtype) / "model.safetensors" for dtype in ("float32", "int8"))
    assert exact.read_bytes() == in_8_bits.read_bytes()


def test_the_recipe_gives_a_network_that_learns_and_whose_inputs_leave_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small: three blocks, a tenth of the steps. The bounds are far from what seeds or other arithmetic change."""
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
    found = quality_of(load(made["float32"]), count=1000)
    assert found.accuracy.low > 0.5, "chance is 0.1"
    assert found.lost.low < 0.03
    assert found.survival[-1].high < 1.0


def test_the_first_seed_is_shipped_whose_network_shows_all_that_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(folder: Path, seed: int) -> dict[RampDtype, Path]:
        paths: dict[RampDtype, Path] = {"float32": folder / "float32", "int8": folder / "int8"}
        for path in paths.values():
            path.mkdir()
            (path / "seed").write_text(str(seed))
        return paths

    def shortcomings(folder: Path, dtype: RampDtype) -> list[str]:
        good = {"float32": 1, "int8": 2}[dtype]
        return [] if int((folder / "seed").read_text()) >= good else ["loses too much"]

    monkeypatch.setattr(demo, "make_demo", made)
    monkeypatch.setattr(demo, "shortcomings", shortcomings)
    monkeypatch.setattr(demo, "demo_directory", lambda dtype: tmp_path / f"demo-{dtype}")
    (tmp_path / "demo-int8").mkdir()
    (tmp_path / "demo-int8" / "old").touch()
    demo.main()
    for dtype in ("float32", "int8"):
        assert [(path.name, path.read_text()) for path in (tmp_path / f"demo-{dtype}").iterdir()] == [("seed", "2")]


def quality(**changed: tuple[MeanWithError, ...] | MeanWithError) -> Quality:
    def sure(*means: float) -> tuple[MeanWithError, ...]:
        return tuple(MeanWithError(mean, 0.001) for mean in means)

    good: dict[str, tuple[MeanWithError, ...] | MeanWithError] = {
        "accuracy": MeanWithError(0.97, 0.001),
        "lost": MeanWithError(0.001, 0.001),
        "survival": sure(0.6, 0.5, 0.4, 0.4, 0.3, 0.2, 0.1),
        "leaving": sure(0.4, 0.1, 0.1, 0.0, 0.1, 0.1, 0.1),
        "depths": sure(*(3.0 + position for position in range(len(NOISES)))),
    }
    return Quality(**(good | changed))  # type: ignore[arg-type]


def test_a_network_is_good_only_by_a_margin() -> None:
    assert quality().shortcomings() == []
    assert quality(lost=MeanWithError(0.003, 0.001)).shortcomings() == ["exits lose 0.30%"]
    assert quality(accuracy=MeanWithError(0.952, 0.001)).shortcomings() == ["the full network is right in 95.2%"]
    assert quality(survival=(MeanWithError(0.9, 0.001),) * 7).shortcomings() == ["90.0% enter the second half"]
    assert quality(leaving=(MeanWithError(0.032, 0.001),) * 7).shortcomings() == ["inputs leave at 0 ramps only"]
    depths = tuple(MeanWithError(depth, 0.001) for depth in (3.0, 3.05, 4.0, 5.0))
    assert quality(depths=depths).shortcomings() == ["noise [0.2] moves no exits"]
