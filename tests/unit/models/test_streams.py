"""The order of work on the streams of a GPU, recorded by fake streams."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.models import onnx_session
from deployments.models.onnx_model import OnnxModel
from deployments.models.onnx_session import SideStream
from deployments.models.served_model import BlockRange
from tests.helpers.backend_parity import assert_same, batch_for
from tests.helpers.tiny_networks import network

CUDA = torch.device("cuda:1")


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
    monkeypatch.setattr(onnx_session.torch, "cuda", fake_cuda)
    return fake_cuda


def test_a_stream_aside_comes_after_torch_and_before_it(cuda: Any, notes: list[str]) -> None:
    aside = SideStream(CUDA)
    assert aside.handle == 4711, "0, torch's default stream, ONNX Runtime would not take"
    with aside.in_turn():
        notes.append("queued")
    assert notes == ["the other waits for torch", "queued", "torch waits for the other"]


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
