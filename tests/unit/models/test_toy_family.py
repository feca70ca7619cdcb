"""A family that the project has never heard of takes one small file."""

from pathlib import Path

import numpy as np
import torch

from isobatch.deployments.models import load
from tests.unit.models.toy_family import FAMILY, ToyConfig, ToyForImageClassification


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
        first = model.run(model.encode(list(images)), cut, ()).survivors
        assert first is not None
        assert np.abs(model.run(first, model.num_blocks, ()).exits.logits - expected).max() < 1e-5
