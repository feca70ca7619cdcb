"""Recorded and replayed, a network gives what it gives when it is run. On a host nothing is recorded, only run again:
torch by a fake recorder, ONNX Runtime from and into fixed memory as on a GPU.
"""

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.models import cuda_graphs as graphs
from isobatch.deployments.models.cuda_graphs import GraphModel, Recording
from isobatch.deployments.models.onnx_model import OnnxModel, record_exported
from isobatch.profiles.model import Batch
from tests.helpers.backend_parity import Recorder, assert_same, batch_for, check_cuts
from tests.helpers.tiny_networks import DISTINCT_FAMILIES, network


@pytest.mark.parametrize("name", DISTINCT_FAMILIES)
@settings(max_examples=4)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    cut=st.integers(1, 4),
    active=st.booleans(),
)
def test_after_any_batch_it_equals_torch(name: str, sizes: list[int], seed: int, cut: int, active: bool) -> None:
    exact = network(name, "entropy", [0.8])
    replayed, cut = GraphModel(exact, Recorder(exact)), min(cut, exact.num_blocks - 1)
    ramps = exact.ramp_blocks if active else ()
    for number, size in enumerate(sizes):
        batch = batch_for(exact, name, size, seed + number)
        first = exact.run(batch, cut, ramps)
        assert_same(first, replayed.run(batch, cut, ramps))
        if first.survivors is not None:
            rest = exact.run(first.survivors, exact.num_blocks, ramps)
            assert_same(rest, replayed.run(first.survivors, exact.num_blocks, ramps))


def texts(lengths: list[int]) -> Batch:
    ids = np.arange(sum(lengths)) % 30 + 5
    return Batch(0, {"input_ids": ids}, np.zeros((len(lengths), 0), np.float32), np.array(lengths))


def test_sizes_and_lengths_share_recordings() -> None:
    """Batches of 5 to 8 texts of up to 12 tokens, 33 to 48 together: one recording for each block_range."""
    exact = network("bert")
    recorder = Recorder(exact)
    replayed = GraphModel(exact, recorder)
    for lengths in [[12, 9, 5, 4, 3], [8] * 6, [5] * 7, [2, 4, 6, 8, 10, 2, 1, 3]]:
        replayed.run(replayed.run(texts(lengths), 2, ()).survivors, 4, ())
    assert (recorder.recorded, recorder.replayed) == (2, 8)


def test_what_a_batch_was_given_is_its_own() -> None:
    """The next replay writes over the graph's memory, not over what it gave before."""
    exact = network("vit")
    replayed = GraphModel(exact, Recorder(exact))
    one, other = (replayed.run(batch_for(exact, "vit", 4, seed), 2, ()).survivors for seed in (1, 2))
    assert not torch.equal(one.arrays["hidden"], other.arrays["hidden"])


def test_no_more_positions_are_asked_for_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding 20 tokens up to 32 would be 8 more than the network knows."""
    monkeypatch.setattr(graphs, "LONGEST_MULTIPLE", 32)
    exact = network("bert")
    recorder = Recorder(exact)
    replayed = GraphModel(exact, recorder)
    replayed.encoder = SimpleNamespace(longest=24)
    batch = texts([20, 20, 20])
    assert_same(exact.run(batch, 2, ()), replayed.run(batch, 2, ()))
    assert recorder.replayed == 1


def test_what_cannot_be_recorded_runs_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is memory for buffers needed to say so: there may be none left."""

    def refuse(*_: object) -> Recording:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.RangeInputs, "empty", refuse)
    exact = network("vit")
    replayed, batch = GraphModel(exact, refuse), batch_for(exact, "vit")
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert_same(exact.run(batch, 2, ()), replayed.run(batch, 2, ()))
    assert caplog.text.count("blocks 0-2 run without a CUDA graph") == 1


@pytest.mark.parametrize("name", ["bert", "albert", "deberta-v3", "swin", "resnet"])
def test_from_fixed_memory_onnx_runtime_gives_what_torch_gives(name: str, cache: Path) -> None:
    """A small batch after a large one, another one, and the large one again; with ramps inside."""
    plain, inner = (network(name, "entropy", [0.8]) for _ in range(2))
    onnx = OnnxModel(inner, name, cache=cache, records=True)

    def forbid() -> None:
        inner.through = onnx.through = lambda *_: pytest.fail("it was not recorded")

    check_cuts(GraphModel(onnx, partial(record_exported, onnx)), plain, name, dict(enumerate([9, 2, 7, 9])), forbid)


def test_ramps_are_made_from_what_the_inner_network_gives() -> None:
    exact = network("bert")
    replayed = GraphModel(exact, Recorder(exact))
    batch = batch_for(exact, "bert", 4)
    for one, other in zip(exact.features(batch)[0], replayed.features(batch)[0], strict=True):
        assert torch.equal(one, other)
    assert replayed.exact is exact


def test_the_recording_that_was_used_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 2)
    exact = network("vit")
    recorder = Recorder(exact)
    replayed = GraphModel(exact, recorder)
    recorded = []
    for size in (1, 2, 1, 4, 1, 2):
        replayed.run(batch_for(exact, "vit", size), 2, ())
        recorded.append(recorder.recorded)
    assert recorded == [1, 2, 2, 3, 3, 4]
