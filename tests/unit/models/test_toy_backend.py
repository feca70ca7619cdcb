"""A backend and a family that the project has never heard of take one small file each."""

from pathlib import Path

import numpy as np
import pytest
import torch

from isobatch.deployments import named
from isobatch.deployments.config import AppConfig
from isobatch.deployments.models import load
from isobatch.deployments.models.backends import backend_of, block_ranges, make_ready, on_backend
from isobatch.deployments.models.interface import backend_named
from isobatch.profiles.errors import UserError
from tests.helpers.backend_parity import assert_same, batch_for, cuts, run_in_splits
from tests.helpers.tiny_networks import network
from tests.helpers.toy_backend import TOY, ToyModel
from tests.unit.models.toy_family import FAMILY, ToyConfig, ToyForImageClassification

PATH = "tests.helpers.toy_backend:TOY"


def test_a_toy_backend_is_chosen_by_its_path_and_answers_as_torch_does() -> None:
    exact = network("bert", "entropy", [0.5, 0.5, 0.5])
    chosen = AppConfig(backend=PATH).backend
    model = on_backend(exact, "nowhere", chosen)
    assert (backend_of(model), model.exact) == ("toy", exact)
    make_ready(model, "nowhere", [*block_ranges(model, 0, 4, (1,))])
    batch = batch_for(exact, "bert")
    for block_range in cuts(exact):
        if block_range.start == 0:
            assert_same(
                model.run(batch, block_range.stop, block_range.ramps),
                exact.run(batch, block_range.stop, block_range.ramps),
            )
    assert isinstance(model, ToyModel)
    assert model.computed > 0


def test_a_line_gives_it_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="'toy' is not known; known are: auto, torch, graphs, onnx, onnx-graphs"):
        on_backend(network("bert"), "nowhere", "toy")
    monkeypatch.setitem(named.BACKENDS, "toy", PATH)
    assert backend_of(on_backend(network("bert"), "nowhere", "toy")) == "toy"
    assert AppConfig(backend="toy").backend == "toy"
    assert backend_named("toy") is TOY


def test_what_a_toy_cannot_run_is_one_line() -> None:
    with pytest.raises(UserError, match="a toy runs no network of 3 blocks"):
        on_backend(network("roberta"), "nowhere", PATH)
    with pytest.raises(UserError, match="cannot be imported"):
        on_backend(network("bert"), "nowhere", "no_such_module:TOY")


@torch.inference_mode()
def test_a_toy_family_is_cut_like_any_other(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    toy = ToyForImageClassification(ToyConfig(num_labels=5)).eval()
    toy.save_pretrained(tmp_path)
    ViTImageProcessor(do_resize=False, do_rescale=False, do_normalize=False).save_pretrained(tmp_path)

    model = load(tmp_path, family=FAMILY)
    images = np.random.default_rng(0).normal(size=(6, 8, 8)).astype(np.float32)
    expected = toy(torch.from_numpy(images)[:, None]).logits.numpy()
    for cut in range(1, model.num_blocks):
        assert np.abs(run_in_splits(model, model.encode(list(images)), [cut]).logits - expected).max() < 1e-5
