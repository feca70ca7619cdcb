"""The order of work on the streams of a GPU, recorded by fake streams."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.models import cuda_graphs as graphs
from deployments.models import streams
from deployments.models.backends import for_threads
from deployments.models.cuda_graphs import GraphModel
from deployments.models.onnx_graphs import OnnxRecorder
from deployments.models.onnx_model import OnnxModel
from deployments.models.served_model import BlockRange
from deployments.models.streams import SideStream, beside_others, finish
from profiles.errors import UserError
from tests.helpers.backend_parity import assert_same, batch_for
from tests.helpers.tiny_networks import network
from tests.helpers.toy_model import Toy

CUDA, HOST = torch.device("cuda:1"), torch.device("cpu")


class Stream:
    def __init__(self, name: str, handle: int, notes: list[str]) -> None:
        self.name, self.cuda_stream, self.device, self._notes = name, handle, CUDA, notes

    def wait_stream(self, other: "Stream") -> None:
        self._notes.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self._notes.append(f"the host waits for {self.name}")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def cuda(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """With one more stream than torch's own."""
    default, other = Stream("torch", 0, notes), Stream("the other", 4711, notes)
    fake_cuda = SimpleNamespace(
        Stream=lambda device: other,
        default_stream=lambda device: default,
        current_stream=lambda device: default,
        stream=lambda stream: nullcontext(notes.append(f"on {stream.name}")),
    )
    monkeypatch.setattr(streams.torch, "cuda", fake_cuda)
    return fake_cuda


def test_a_stream_aside_comes_after_torch_and_before_it(cuda: Any, notes: list[str]) -> None:
    aside = SideStream(CUDA)
    assert aside.handle == 4711, "0, torch's default stream, ONNX Runtime would not take"
    with aside.in_turn():
        notes.append("queued")
    assert notes == ["the other waits for torch", "queued", "torch waits for the other"]


def test_only_what_is_made_on_a_threads_own_stream_is_waited_for(cuda: Any, notes: list[str]) -> None:
    finish(HOST)
    finish(CUDA)
    assert notes == []
    cuda.current_stream = cuda.Stream
    finish(CUDA)
    assert notes == ["the host waits for the other"]


def test_a_thread_computes_on_its_own_stream_with_its_own_threads(cuda: Any, notes: list[str]) -> None:
    counts = []

    def compute() -> None:
        with beside_others(CUDA, threads=2):
            counts.append(torch.get_num_threads())

    before = torch.get_num_threads()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert (counts, notes) == ([2], ["on the other"])
    torch.set_num_threads(before)


def test_threads_share_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = network("vit")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    models, within = for_threads(exact, 3)
    assert models == [exact] * 3, "it keeps nothing between calls"
    assert within.args == (HOST, 6)  # type: ignore[attr-defined]
    assert for_threads(Toy(), 1)[1] is nullcontext
    with pytest.raises(UserError, match="a Toy computes one launch at a time"):
        for_threads(Toy(), 2)


def test_what_replays_has_recordings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches may not be copied into the same buffers."""
    monkeypatch.setattr(graphs, "TorchRecorder", lambda model: f"records {model.backend}")
    exact = network("vit")
    one = GraphModel(exact, graphs.TorchRecorder(exact))
    other = one.twin()
    assert isinstance(other, GraphModel)
    assert other is not one
    assert other.inner is exact
    assert other._recordings is not one._recordings


def test_onnx_runtime_shares_sessions_on_a_host_only(tmp_path: Any) -> None:
    exact = network("vit")
    model = OnnxModel(exact, "vit", cache=tmp_path)
    assert model.twin() is model
    recorded = GraphModel(model, OnnxRecorder(model))
    with pytest.raises(UserError, match="onnx-graphs computes one launch at a time"):
        recorded.twin()
    model.device = CUDA
    twin = model.twin()
    assert isinstance(twin, OnnxModel)
    assert twin.inner is exact
    assert twin.exported is not model.exported
    assert twin.exported.cache == tmp_path


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_threads_that_share_a_network_get_their_own_answers(backend: str, tmp_path: Any) -> None:
    exact = network("bert", "entropy", [0.8])
    model = exact if backend == "torch" else OnnxModel(exact, "bert, shared", cache=tmp_path)
    model.prepare([BlockRange(0, 4, exact.ramp_blocks)], batch_for(exact, "bert"))
    batches = [batch_for(exact, "bert", size, seed) for seed, size in enumerate([1, 3, 5, 8] * 3)]
    expected = [exact.run(batch, 4, exact.ramp_blocks) for batch in batches]
    found: dict[int, Any] = {}

    def compute(first: int) -> None:
        for number in range(first, len(batches), 3):
            found[number] = model.run(batches[number], 4, exact.ramp_blocks)

    threads = [threading.Thread(target=compute, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, launched in enumerate(expected):
        assert_same(launched, found[number])
