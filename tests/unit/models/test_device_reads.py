"""A host that reads a GPU's memory waits for all work that is queued there. Launches read once a stop, nothing else
does: what would make a host wait is counted on CPU tensors, by the calls of torch that the same code makes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isobatch.deployments.models import attention
from isobatch.deployments.models.cuda_graphs import GraphModel, RangeInputs, Recording
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport import device_copies
from isobatch.deployments.transport.orders import Order
from isobatch.deployments.transport.packed import pack
from tests.helpers.backend_parity import batch_for
from tests.helpers.recorded_cuda import GPU, OnGpu, RecordedCuda
from tests.helpers.tiny_networks import DISTINCT_FAMILIES, network

OF_VALUES = {"numpy", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose"}
OF_SIZES = {"nonzero", "masked_select", "unique", "argwhere", "unique_consecutive", "bincount"}
LEDGER = "numpy"  # how `to_host` reads the table of who left, on a CPU


class Reads(TorchFunctionMode):
    """Notes the calls for which a host must know a value of a tensor, or a size that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, given = function.__name__, kwargs or {}
        by_mask = name in ("__getitem__", "__setitem__") and any(each.dtype == torch.bool for each in tensors(args[1]))
        by_counts = name == "repeat_interleave" and bool(tensors(args[1:])) and "output_size" not in given
        if name in OF_VALUES | OF_SIZES or by_mask or by_counts:
            self.found.append(name)
        return function(*args, **given)


def tensors(values: Any) -> Iterable[Tensor]:
    return [each for each in (values if isinstance(values, tuple | list) else [values]) if isinstance(each, Tensor)]


def test_reads_are_found() -> None:
    values, mask = torch.arange(3), torch.tensor([True, False, True])
    with Reads() as reads:
        _ = values[mask], values[values], values[0], int(values[1]), values.sum().item(), mask.nonzero(), bool(mask[0])
        values.repeat_interleave(values), values.repeat_interleave(2)
        values[mask] = 1
    found = ["__getitem__", "__int__", "item", "nonzero", "__bool__", "repeat_interleave", "__setitem__"]
    assert reads.found == found


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
