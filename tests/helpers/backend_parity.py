"""Runs the same batch on two backends, or records it as CUDA does, to compare the results."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from isobatch.deployments.models import TorchModel
from isobatch.deployments.models.cuda_graphs import RangeInputs, Recording
from isobatch.deployments.models.served_model import BlockRange, RangeOutput
from isobatch.profiles.model import Batch, Exits, Launched
from tests.helpers.tiny_networks import random_inputs, with_memory


def batch_for(model: TorchModel, name: str, count: int = 5, seed: int = 3) -> Batch:
    return with_memory(model.merge(random_inputs(name, count, seed=seed)), model)


def cuts(model: TorchModel) -> list[BlockRange]:
    """The block_ranges that plans of two splits run, with the ramps inside."""
    ends = [(0, cut) for cut in range(1, model.num_blocks + 1)]
    ends += [(cut, model.num_blocks) for cut in range(1, model.num_blocks)]
    return [BlockRange(a, b, tuple(ramp for ramp in model.ramp_blocks if a <= ramp < b)) for a, b in ends]


def run_in_splits(model: TorchModel, batch: Batch, cuts: Iterable[int]) -> Exits:
    """With all ramps closed, so that everybody leaves at the end, in the order of the batch."""
    for cut in cuts:
        batch = model.run(batch, cut, ()).survivors
    exits = model.run(batch, model.num_blocks, ()).exits
    assert exits.rows.tolist() == list(range(len(batch)))
    return exits


def assert_as_alone(
    model: TorchModel,
    batch: Batch,
    inside: Sequence[int],
    alone: Sequence[Exits],
    stops: Iterable[int],
    ramps: Collection[int] | None = None,
) -> None:
    """Every input leaves where it leaves alone, with the same logits. `inside`: the number of each one in the batch;
    `ramps`: those that are open, None: all."""
    rows, seen = np.array(inside), list[int]()
    for stop in stops:
        launched = model.run(batch, stop, model.ramp_blocks if ramps is None else ramps)
        exits = launched.exits
        for row, block, logits in zip(rows[exits.rows], exits.blocks, exits.logits_by_input, strict=True):
            assert block == alone[row].blocks[0]
            near = 1e-5 * max(1.0, np.abs(logits).max(initial=0.0))
            assert np.abs(logits - alone[row].logits).max(initial=0.0) < near
            seen.append(int(row))
        rows = np.delete(rows, exits.rows)
        if launched.survivors is None:
            break
        batch = launched.survivors
    assert sorted(seen) == sorted(inside)


def check_cuts(
    served: TorchModel, exact: TorchModel, name: str, seeds: dict[int, int], prepared: Callable[[], None] = lambda: None
) -> None:
    """Batches get what they get from torch: after every cut of a family whose blocks differ; of the others, whose
    blocks are alike, after one in the middle. `seeds`: of batches, with their sizes; `prepared` is called before."""
    here = range(1, exact.num_blocks) if name == "swin" else [exact.num_blocks // 2]
    halves = [each for each in cuts(exact) if each.start in here or each.stop in here]
    served.prepare(halves, batch_for(exact, name))
    prepared()
    for cut in here:
        for seed, size in seeds.items():
            batch = batch_for(exact, name, size, seed)
            assert_same(exact.run(batch, cut, exact.ramp_blocks), served.run(batch, cut, exact.ramp_blocks))
            middle = exact.run(batch, cut, ()).survivors
            expected = exact.run(middle, exact.num_blocks, exact.ramp_blocks)
            assert_same(expected, served.run(middle, exact.num_blocks, exact.ramp_blocks))


def assert_same(one: Launched, other: Launched, within: float = 1e-4) -> None:
    assert one.exits.rows.tolist() == other.exits.rows.tolist()
    assert one.exits.blocks.tolist() == other.exits.blocks.tolist()
    assert np.abs(one.exits.logits - other.exits.logits).max(initial=0) < within
    assert (one.survivors is None) == (other.survivors is None)
    if one.survivors and other.survivors:
        here, there = one.survivors.arrays["hidden"], other.survivors.arrays["hidden"]
        assert float((here - there).abs().max()) < within
        assert torch.equal(torch.as_tensor(one.survivors.memory), torch.as_tensor(other.survivors.memory))


@dataclass
class Recorder:
    """As CUDA does it: what is recorded reads and writes the same memory each time, whatever is passed."""

    model: TorchModel
    recorded: int = 0
    replayed: int = 0

    def __call__(self, block_range: BlockRange, buffers: Callable[[], RangeInputs]) -> Recording:
        self.recorded += 1
        reads = buffers()
        run = partial(self.model.through, block_range, reads.arrays, reads.spans)
        gives = run()

        def again() -> None:
            self.replayed += 1
            for old, now in zip(tensors(gives), tensors(run()), strict=True):
                old.copy_(now)

        return Recording(reads, gives, again)


def tensors(passed: RangeOutput) -> list[torch.Tensor]:
    return [each for each in (passed.hidden, *passed.ramps.values(), passed.head) if each is not None]
