"""Survivors come to a GPU and leave it while it computes other launches: by streams of their own, from and into pinned
memory. What is called is noted by a double; what is copied is compared bit for bit."""

import os
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from isobatch.deployments.config import AppConfig
from isobatch.deployments.models.onnx_session import in_torchs_memory
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.replica import serve_replica
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.holdings import Claim, Share
from isobatch.deployments.transport.orders import Order, Stayed
from isobatch.deployments.transport.packed import Packed, join, pack
from isobatch.profiles.model import NOBODY, Batch, Exits, Launched
from tests.helpers.recorded_cuda import GPU, OnGpu, RecordedCuda
from tests.helpers.travelling_batches import DTYPES, make, same

NOBODY_LEFT = Exits(NOBODY, NOBODY, np.zeros((0, 2), np.float32))
BEGUN = ["out follows launches", "memory is kept for out", "copy to the host on out", "event on out"]


class OnOneGpu:
    """A network through which all go as they are, on a GPU."""

    device, backend, exports, dtype = GPU, "torch", False, torch.float32
    labels, num_blocks, num_labels, ramp_blocks, reads_text = ("no", "yes"), 9, 2, (), True
    ramps = exact = None

    def __init__(self, cuda: RecordedCuda) -> None:
        self._cuda = cuda

    def encode(self, inputs: object) -> Batch:
        raise NotImplementedError

    def prepare(self, block_ranges: Collection[BlockRange], example: Batch) -> None:
        raise NotImplementedError

    def merge(self, batches: Collection[Batch]) -> Batch:
        raise NotImplementedError

    def select(self, batch: Batch, rows: Any) -> Batch:
        raise NotImplementedError

    def run(self, batch: Batch, stop: int, ramps: Collection[int]) -> Launched:
        self._cuda.calls.append(f"blocks to {stop}")
        arrays = {name: torch.as_tensor(array).as_subclass(OnGpu) for name, array in batch.arrays.items()}
        memory = torch.as_tensor(batch.memory).as_subclass(OnGpu)
        return Launched(NOBODY_LEFT, replace(batch, cursor=stop, arrays=arrays, memory=memory))


def hop(replica: SplitReplica, batch: Batch, by_value_bytes: int) -> Packed | Claim:
    (stayed,) = replica.run(Order(4, frozenset(), (pack(batch),), by_value_bytes=by_value_bytes))
    assert isinstance(stayed, Stayed)
    assert stayed.survivors is not None
    return stayed.survivors


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_launch_waits_for_no_survivors_that_are_held(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch's blocks are queued behind the last one's, without a wait between them. Who fetches waits."""
    cuda, batch = RecordedCuda(monkeypatch, "out"), make([2, 3], 2, dtype, 0)
    replica = SplitReplica(OnOneGpu(cuda))
    first, second = (hop(replica, batch, by_value_bytes=0) for _ in range(2))
    assert isinstance(first, Claim)
    assert isinstance(second, Claim)
    assert cuda.calls == ["blocks to 4", *BEGUN, *BEGUN] * 2
    assert first.size_bytes == batch.size_bytes
    cuda.calls.clear()
    fetched = replica.holdings.packed(first.key, np.arange(2))
    assert cuda.calls == ["host waits for an event"] * 2
    assert same(fetched, pack(replace(batch, cursor=4)))
    replica.holdings.packed(first.key, np.array([1]))
    assert len(cuda.calls) == 2, "what has arrived is not waited for again"


def test_survivors_by_value_wait_for_their_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, batch = RecordedCuda(monkeypatch, "out"), make([2, 3], 2, torch.bfloat16, 0)
    sent = hop(SplitReplica(OnOneGpu(cuda)), batch, by_value_bytes=10_000)
    assert isinstance(sent, Packed)
    assert same(sent, pack(replace(batch, cursor=4)))
    assert cuda.calls == ["blocks to 4", *BEGUN, *BEGUN, *["host waits for an event"] * 2]


def test_ones_own_survivors_that_are_under_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a plan that has changed runs the next split here."""
    cuda, batch = RecordedCuda(monkeypatch, "out"), make([2, 3], 2, torch.float16, 0)
    replica = SplitReplica(OnOneGpu(cuda))
    claim = hop(replica, batch, by_value_bytes=0)
    assert isinstance(claim, Claim)
    (stayed,) = replica.run(Order(6, frozenset(), (Share(claim, np.array([1])),), keep=True))
    kept = replica.holdings.get(stayed.survivors.key)
    assert torch.equal(torch.as_tensor(kept.arrays["hidden"]), torch.as_tensor(batch.arrays["hidden"])[2:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_come_to_the_gpu_while_it_computes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours in one copy; survivors that are there already stay where they are."""
    cuda, batches = RecordedCuda(monkeypatch, "in"), [make([2, 3], 2, dtype, seed) for seed in range(3)]
    replica = SplitReplica(OnOneGpu(cuda))
    here = Share(replica.holdings.hold(batches[1], 9.0), np.array([0]))
    order, keys = replica.uploaded(Order(4, frozenset(), (pack(batches[0]), pack(batches[2]), here, pack(batches[1]))))
    copied = ["copy to the device on in", "memory is kept for launches", "host waits for in"]
    assert cuda.calls == copied * 2
    first, middle, last = order.parts
    assert middle is here
    for part, sources in ((first, (batches[0], batches[2])), (last, (batches[1],))):
        assert isinstance(part, Share)
        assert part.is_complete
        there, expected = replica.holdings.get(part.claim.key), join([pack(source) for source in sources])
        assert isinstance(there, Batch)
        assert isinstance(there.arrays["hidden"], OnGpu)
        assert same(pack(on_host(there)), expected)
    replica.holdings.drop(keys)
    assert len(replica.holdings) == 1


def test_of_an_order_that_cannot_be_brought_to_the_gpu_nothing_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, batches = RecordedCuda(monkeypatch, "in"), [make([2, 3], 2, torch.float32, seed) for seed in range(2)]
    replica = SplitReplica(OnOneGpu(cuda))
    here = Share(replica.holdings.hold(batches[1], 9.0), np.array([0]))
    broken = msgspec.structs.replace(pack(batches[0]), bfloat16=frozenset({"an array that it does not have"}))
    with pytest.raises(KeyError):
        replica.uploaded(Order(4, frozenset(), (pack(batches[0]), here, broken)))
    assert len(replica.holdings) == 1


def test_where_onnx_runtime_records_no_other_thread_calls_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, batch = RecordedCuda(monkeypatch, "out"), make([2, 3], 2, torch.float32, 0)
    network = OnOneGpu(cuda)
    network.backend = "onnx-graphs"  # type: ignore[misc]
    replica = SplitReplica(network)
    assert replica.gpu is None
    hop(replica, batch, by_value_bytes=0)
    assert cuda.calls[-1] == "host waits for an event", "the thread that computes waits"


def test_what_onnx_runtime_gives_on_a_gpu_is_copied_into_memory_that_streams_keep() -> None:
    """`record_stream` does nothing for memory that is not torch's, and ONNX Runtime uses freed memory at once."""
    output = torch.rand(2, 3)
    on_gpu = output.as_subclass(OnGpu)
    assert in_torchs_memory(output) is output
    assert in_torchs_memory(on_gpu).data_ptr() != output.data_ptr()
    assert torch.equal(in_torchs_memory(on_gpu), on_gpu)


async def test_a_replica_brings_parts_before_their_launch_and_frees_them_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = RecordedCuda(monkeypatch, "in", "out")
    monkeypatch.setattr("isobatch.deployments.ray_facts.node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(serve_replica, "replica_name", lambda: "it")
    monkeypatch.setattr(serve_replica, "load_model", lambda *_: OnOneGpu(cuda))
    monkeypatch.setattr(serve_replica, "weights_in", lambda *_: "")
    replica = serve_replica.ServeReplica(AppConfig(loader="tests.helpers.toy_model:load"), "cpu", "")
    await replica.whereabouts()
    order = Order(4, frozenset(), (pack(make([2], 1, torch.float32, 0)),))
    (stayed,) = [each async for each in replica.run(order)]
    assert isinstance(stayed, Stayed)
    assert not len(replica._holdings)
    assert cuda.calls.index("copy to the device on in") < cuda.calls.index("blocks to 4")
    await replica._workers.close()
    replica._orders.close()
    replica._exchange.close()


class Breaks(OnOneGpu):
    def run(self, batch: Batch, stop: int, ramps: Collection[int]) -> Launched:
        raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize(("where", "gpu_fails"), [("launch", True), ("upload", True), ("launch", False)])
async def test_a_replica_whose_gpu_has_failed_ends_so_that_another_starts(
    where: str, gpu_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    cuda, ended = RecordedCuda(monkeypatch, "in"), list[int]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail if gpu_fails else lambda: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(serve_replica, "load_model", lambda *_: Breaks(cuda))
    monkeypatch.setattr(serve_replica, "weights_in", lambda *_: "")
    monkeypatch.setattr("isobatch.deployments.ray_facts.node_address", lambda: "127.0.0.1")
    if where == "upload":
        monkeypatch.setattr(SplitReplica, "uploaded", fail)
    replica = serve_replica.ServeReplica(AppConfig(loader="tests.helpers.toy_model:load"), "cpu", "")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _ = [each async for each in replica.run(Order(4, frozenset(), (pack(make([2], 1, torch.float32, 0)),)))]
    assert ended == [1] * gpu_fails
    await replica._workers.close()


def on_host(batch: Batch) -> Batch:
    arrays = {name: array.as_subclass(torch.Tensor) for name, array in batch.arrays.items()}
    return replace(batch, arrays=arrays, memory=batch.memory.as_subclass(torch.Tensor))
