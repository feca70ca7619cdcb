"""A host that reads a GPU's memory waits for all work that is queued there. Launches read once a stop, nothing else
does: what would make a host wait is counted on CPU tensors, by the calls of torch that the same code makes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from isobatch.deployments.decoding.sequences import Sampling, TextRequest
from isobatch.deployments.models import attention
from isobatch.deployments.models.cuda_graphs import GraphModel, RangeInputs, Recording
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import select
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport import device_copies
from isobatch.deployments.transport.orders import Order
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.model import Batch
from tests.helpers.backend_parity import batch_for
from tests.helpers.recorded_cuda import GPU, OnGpu, Reads, RecordedCuda
from tests.helpers.tiny_cascades import cascade, inputs_of
from tests.helpers.tiny_decoders import decoder, engine, t5
from tests.helpers.tiny_networks import DISTINCT_FAMILIES, network

LEDGER = "numpy"  # how `to_host` reads the table of who left, on a CPU


def test_reads_are_found() -> None:
    values, mask = torch.arange(3), torch.tensor([True, False, True])
    with Reads() as reads:
        _ = values[mask], values[values], values[0], int(values[1]), values.sum().item(), mask.nonzero(), bool(mask[0])
        values.repeat_interleave(values), values.repeat_interleave(2)
        values[mask] = 1
        values[[0, 1]] = values.new_tensor([1, 2])
    result = ["__getitem__", "__int__", "item", "nonzero", "__bool__", "repeat_interleave", "__setitem__"]
    result += ["new_tensor", "__setitem__"]
    assert reads.found == result


@pytest.mark.parametrize("name", DISTINCT_FAMILIES)
def test_a_launch_of_any_family_reads_once(name: str) -> None:
    model = network(name, "entropy", [0.6])
    batch = batch_for(model, name)
    for ramps, expected in ((model.ramp_blocks, [LEDGER]), ((), [])):
        with Reads() as reads:
            launched = model.run(batch, 2, ramps)
            assert reads.found == expected
            if launched.survivors:
                model.run(launched.survivors, model.num_blocks, ramps)
                assert reads.found == [*expected, LEDGER]


@pytest.mark.parametrize("policy", ["entropy", "confidence", "margin", "patience", "voting"])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_launch_reads_once_a_stop_by_any_rule(policy: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stops, at each of which nobody leaves; survivors stay on the device."""
    monkeypatch.setattr(attention, "varlen", lambda tokens, edges, longest, scaling: tokens[2])
    for module in ("torch_model", "cuda_graphs"):
        monkeypatch.setattr(f"isobatch.deployments.models.{module}.is_fused", lambda device, dtype: True)
    never = {"entropy": 0.0, "confidence": 1.0, "margin": 1.0, "patience": 9, "voting": 9}
    exact = network("distilbert", policy, [never[policy]])
    model = GraphModel(exact, partial(run_again, exact)) if recorded else exact
    order = Order(3, frozenset({0, 1}), (pack(batch_for(exact, "distilbert")),), keep=True)
    with Reads() as reads:
        (stayed,) = SplitReplica(model).run(order)
    assert len(stayed.rows) == 5
    assert reads.found == [LEDGER] * 2, "there is no ramp at the third stop"


@pytest.mark.parametrize("names", [("bert", "distilbert"), ("distilbert", "bert")])
def test_a_cascade_reads_once_a_level_and_what_it_remembers(names: tuple[str, str]) -> None:
    """What earlier levels answered is copied while the level computes, so the host waits for exits alone."""
    model = cascade(names, threshold=1.1, weights=(0.6, 0.6), inner=1.1)
    batch = model.merge(inputs_of(names, 5, seed=3))
    with Reads() as reads:
        while True:
            launched = model.run(batch, model.num_blocks, model.ramp_blocks)
            if launched.survivors is None:
                break
            batch = launched.survivors
    assert set(reads.found) == {LEDGER}
    assert len(reads.found) <= 2 * (len(model.ramp_blocks) + 1)


def test_survivors_inside_a_level_are_chosen_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier levels answered is on the host, hidden states on the device, and texts of later levels on either."""
    cuda = RecordedCuda(monkeypatch)
    hidden, memory = torch.rand(5, 3), np.arange(6, dtype=np.float32).reshape(2, 3)
    ahead = Batch(4, {"input_ids": np.arange(3)}, np.zeros((2, 0), np.float32), np.array([1, 2]))
    batch = Batch(2, {"hidden": hidden.as_subclass(OnGpu)}, memory, np.array([2, 3]), ahead=ahead)
    chosen = select(batch, np.array([1]))
    assert torch.equal(torch.as_tensor(chosen.arrays["hidden"]).as_subclass(torch.Tensor), hidden[2:])
    assert np.asarray(chosen.memory).tolist() == [[3.0, 4.0, 5.0]]
    assert np.asarray(chosen.ahead.arrays["input_ids"]).tolist() == [1, 2]
    assert cuda.calls == ["copy to the device on launches"]


SAMPLED = Sampling(0.8, top_p=0.9, top_k=7, min_p=0.1)
CHANGED = Sampling(bias=((3, 1.0),), presence=1.0, repetition=1.5)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, CHANGED])
@pytest.mark.parametrize("reads_source", [False, True])
def test_a_decoders_launch_reads_once(sampling: Sampling, reads_source: bool) -> None:
    """The tokens and whether they are sure. What requests ask for comes in copies that the host does not wait for."""
    model = t5() if reads_source else decoder()
    requests = [TextRequest((0,) if reads_source else (1, 2), 4, sampling=sampling, min_tokens=4)] * 2
    if reads_source:
        requests = [replace(each, source=(3, 4, 5)[: 2 + row]) for row, each in enumerate(requests)]
    running = engine(model, {1: 1.1})
    with Reads() as reads:
        running.write_all(requests)
    masks = ["__bool__"] * 2 * reads_source  # Hugging Face's encoder reads once of new sources whether any is padded
    assert set(reads.found) == {"tolist", *masks}
    assert reads.found.count("__bool__") <= len(masks)


def run_again(model: Any, block_range: BlockRange, buffers: "Callable[[], RangeInputs]") -> Recording:
    made = buffers()
    return Recording(made, model.through(block_range, made.arrays, made.spans), lambda: None)


arrays_of_launches = st.lists(
    st.sampled_from([np.int64, np.int32, np.bool_]).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5))
    ),
    min_size=1,
    max_size=6,
)


@given(arrays_of_launches)
def test_all_arrays_of_a_stop_come_to_a_gpu_in_one_copy_from_pinned_memory(arrays: list[NDArray[Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cuda = RecordedCuda(patch)
        there = device_copies.to_device(arrays, GPU)
    assert cuda.calls == ["copy to the device on launches"]
    for array, tensor in zip(arrays, there, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)


def test_the_ledger_is_read_after_an_event_that_follows_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the event alone, not for work that is queued after it."""
    cuda, ledger = RecordedCuda(monkeypatch), torch.rand(2, 3)
    wait = device_copies.to_host(ledger.as_subclass(OnGpu))
    queued = ["copy to the host on launches", "event on launches"]
    assert cuda.calls == queued
    assert np.array_equal(wait(), ledger.numpy())
    assert cuda.calls == [*queued, "host waits for an event"]
