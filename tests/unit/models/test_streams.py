"""Threads that share a network get their own answers."""

import threading
from typing import Any

import pytest

from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.served_model import BlockRange
from tests.helpers.backend_parity import assert_same, batch_for
from tests.helpers.tiny_networks import network


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
