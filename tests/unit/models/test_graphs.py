"""Recorded and replayed, a network gives what it gives when it is run. A fake recorder replays on the host."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.models import graphs
from deployments.models.graphs import Again, GraphModel
from deployments.models.stretch import Passed
from profiles.model import Batch
from tests.networks import FAMILIES, network
from tests.unit.models.test_onnx import assert_same, batch_for


@pytest.fixture(autouse=True, scope="module")
def few_tokens() -> Iterator[None]:
    """The tiny networks know 24 positions, and their texts have 11 tokens at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "TOKENS", 12)
        yield


@dataclass
class Recorder:
    """As CUDA does it: what is recorded reads and writes the same memory each time, whatever is passed."""

    recorded: int = 0
    replayed: int = 0

    def __call__(self, run: Callable[[], Passed]) -> tuple[Passed, Again]:
        self.recorded += 1
        gives = run()

        def again() -> None:
            self.replayed += 1
            new = run()
            for old, now in zip(tensors(gives), tensors(new), strict=True):
                old.copy_(now)

        return gives, again


def tensors(passed: Passed) -> list[torch.Tensor]:
    return [each for each in (passed.hidden, *passed.ramps.values(), passed.head) if each is not None]


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    cut=st.integers(1, 4),
    active=st.booleans(),
)
def test_whatever_came_before_a_batch_gets_what_torch_gives(
    name: str, sizes: list[int], seed: int, cut: int, active: bool
) -> None:
    exact = network(name, "entropy", [0.8])
    replayed, cut = GraphModel(exact, Recorder()), min(cut, exact.num_blocks - 1)
    ramps = exact.ramp_blocks if active else ()
    for number, size in enumerate(sizes):
        batch = batch_for(exact, name, size, seed + number)
        first = exact.run(batch, cut, ramps)
        assert_same(first, replayed.run(batch, cut, ramps))
        if first.survivors is not None:
            rest = exact.run(first.survivors, exact.num_blocks, ramps)
            assert_same(rest, replayed.run(first.survivors, exact.num_blocks, ramps))


def test_sizes_and_lengths_share_recordings() -> None:
    """Batches of 5 to 8 inputs of up to 12 tokens: one recording for each stretch."""
    recorder, exact = Recorder(), network("bert")
    replayed = GraphModel(exact, recorder)
    for seed, size in enumerate([5, 6, 7, 8]):
        batch = batch_for(exact, "bert", size, seed)
        middle = replayed.run(batch, 2, ()).survivors
        assert middle is not None
        replayed.run(middle, 4, ())
    assert (recorder.recorded, recorder.replayed) == (2, 8)


def test_what_a_batch_was_given_is_its_own() -> None:
    """The next replay writes over the graph's memory, not over what it gave before."""
    exact = network("vit")
    replayed = GraphModel(exact, Recorder())
    one, other = (replayed.run(batch_for(exact, "vit", 4, seed), 2, ()).survivors for seed in (1, 2))
    assert one is not None
    assert other is not None
    assert not torch.equal(one.arrays["hidden"], other.arrays["hidden"])


def test_no_more_positions_are_asked_for_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding 20 tokens up to 32 would be 8 more than the network knows."""
    monkeypatch.setattr(graphs, "TOKENS", 32)
    recorder, exact = Recorder(), network("bert")
    replayed = GraphModel(exact, recorder)
    replayed.encoder = SimpleNamespace(longest=24)  # type: ignore[assignment]
    batch = Batch(0, {"input_ids": np.full((3, 20), 5)}, np.zeros((3, 0), np.float32), np.full(3, 20))
    assert_same(exact.run(batch, 2, ()), replayed.run(batch, 2, ()))
    assert recorder.replayed == 1


def test_what_cannot_be_recorded_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(run: object) -> tuple[Passed, Again]:
        raise RuntimeError("operation not permitted when stream is capturing")

    exact = network("vit")
    replayed, batch = GraphModel(exact, refuse), batch_for(exact, "vit")
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert_same(exact.run(batch, 2, ()), replayed.run(batch, 2, ()))
    assert caplog.text.count("blocks 0-2 run without a CUDA graph") == 1


def test_few_graphs_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    recorder, exact = Recorder(), network("vit")
    replayed, batch = GraphModel(exact, recorder), batch_for(exact, "vit", 1)
    for stop in (1, 2, 3, 3, 1):
        replayed.run(batch, stop, ())
    assert recorder.recorded == 4, "the first was dropped for the third, and recorded again"
