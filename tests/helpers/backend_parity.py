"""Runs the same batch on two backends, to compare their results."""

import numpy as np
import torch

from isobatch.deployments.models import TorchModel
from isobatch.deployments.models.served_model import BlockRange
from isobatch.profiles.model import Batch, Launched
from tests.helpers.tiny_networks import random_inputs, with_memory


def batch_for(model: TorchModel, name: str, count: int = 5, seed: int = 3) -> Batch:
    return with_memory(model.merge(random_inputs(name, count, seed=seed)), model)


def cuts(model: TorchModel) -> list[BlockRange]:
    """The block_ranges that plans of two splits run, with the ramps inside."""
    ends = [(0, cut) for cut in range(1, model.num_blocks + 1)]
    ends += [(cut, model.num_blocks) for cut in range(1, model.num_blocks)]
    return [BlockRange(a, b, tuple(ramp for ramp in model.ramp_blocks if a <= ramp < b)) for a, b in ends]


def assert_same(one: Launched, other: Launched, within: float = 1e-4) -> None:
    assert one.exits.rows.tolist() == other.exits.rows.tolist()
    assert one.exits.blocks.tolist() == other.exits.blocks.tolist()
    assert np.abs(one.exits.logits - other.exits.logits).max(initial=0) < within
    assert (one.survivors is None) == (other.survivors is None)
    if one.survivors and other.survivors:
        here, there = one.survivors.arrays["hidden"], other.survivors.arrays["hidden"]
        assert float((here - there).abs().max()) < within
        assert torch.equal(torch.as_tensor(one.survivors.memory), torch.as_tensor(other.survivors.memory))
