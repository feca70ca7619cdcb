"""The demo model's inputs, and how it is made (a few steps of training: what it reaches is tested in integration)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from deployments import demo
from deployments.models import load
from deployments.prepare import pipeline, training


def test_inputs_are_digits_and_reproducible() -> None:
    images = demo.demo_inputs(20, seed=3)
    assert images.shape == (20, 8, 8)
    assert images.min() >= 0.0
    assert images.max() <= demo.PIXEL_MAX
    np.testing.assert_array_equal(images, demo.demo_inputs(20, seed=3))
    assert not np.array_equal(images, demo.demo_inputs(20, seed=4))


def test_the_noise_knob_changes_the_noise_and_nothing_else() -> None:
    still, noisy, noisier = (demo.demo_digits(200, noise, seed=1) for noise in (0.0, 0.2, 0.6))
    np.testing.assert_array_equal(still[1], noisier[1])
    assert 0 < np.abs(noisy[0] - still[0]).mean() < np.abs(noisier[0] - still[0]).mean()


def test_no_part_of_the_demo_shares_a_digit() -> None:
    sample = demo._sample()
    origin = np.tile(np.arange(len(sample) // demo.COPIES), demo.COPIES)
    train, calibrate, report = (
        {int(number) for number in origin[part]}
        for part in (sample.parts.train, sample.parts.calibrate, sample.parts.report)
    )
    assert train | calibrate | report == set(origin.tolist())
    assert not train & calibrate
    assert not (train | calibrate) & report


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(demo, "COPIES", 1)
    monkeypatch.setattr(training, "PENALTIES", (1e-2,))
    monkeypatch.setattr(training, "ITERATIONS", 3)
    monkeypatch.setattr(pipeline, "draw_exits", lambda _, path: path.touch())
    return tmp_path / "isobatch"


def test_the_demo_is_made_once_and_always_the_same(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = demo.demo_directory()
    assert first == quick / f"demo-{demo.VERSION}"
    model = load(first)
    assert (model.num_blocks, model.num_labels, model.ramp_blocks) == (8, 10, tuple(range(7)))
    torch.manual_seed(99)
    demo.make_demo(quick / "again")
    for name in ("model.safetensors", "ramps.safetensors", "exits.json"):
        assert (first / name).read_bytes() == (quick / "again" / name).read_bytes()

    def refuse(_: Path) -> None:
        raise AssertionError("the demo was made a second time")

    monkeypatch.setattr(demo, "make_demo", refuse)
    assert demo.demo_directory() == first


def test_an_interrupted_first_use_leaves_nothing(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "draw_exits", interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo.demo_directory()
    assert [path.name for path in quick.iterdir() if path.name.startswith("demo")] == []
    assert torch.get_num_threads() == threads
    assert (demo.demo_directory() / "exits.json").is_file()
