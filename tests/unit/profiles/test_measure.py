import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isobatch.profiles.measure import Measured, Sweep, count_exits, facts_of, stopwatch_for
from isobatch.profiles.model import NOBODY, Batch, Exits, Launched
from isobatch.profiles.sweep import NetworkFacts, knee, whole_s
from tests.helpers.tiny_networks import network, random_inputs

LAUNCH_S = 0.002
RAMP_S = 0.0005
HIDDEN_BYTES = 4 * 16


class FakeModel:
    """Block k takes (k + 1) ms, and from `floor` inputs on time in proportion. Half of the inputs leave at ramp 1."""

    num_blocks, num_labels, ramp_blocks = 3, 2, (1,)

    def __init__(self, floor: int = 8, noise: Callable[[], float] = lambda: 1.0) -> None:
        self.now_s = 0.0
        self.calls = 0
        self._floor, self._noise = floor, noise

    def block_s(self, block: int, size: int) -> float:
        return 0.001 * (block + 1) * max(1.0, size / self._floor)

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        self.calls += 1
        active = [ramp for ramp in ramps if batch.cursor <= ramp < stop]
        blocks_s = sum(self.block_s(block, len(batch)) for block in range(batch.cursor, stop))
        self.now_s += (LAUNCH_S + blocks_s + RAMP_S * len(active)) * self._noise()
        leaves = np.arange(len(batch)) % 2 == 0 if active else np.zeros(len(batch), bool)
        blocks = np.where(leaves, active[0] if active else 0, stop - 1)
        if stop == self.num_blocks:
            leaves[:] = True
        rows = np.flatnonzero(leaves)
        exits = Exits(rows, blocks[rows], np.zeros((len(rows), self.num_labels), np.float32))
        leaves[kept] = stop == self.num_blocks
        return Launched(
            exits, None if leaves.all() else self.select(batch_at(stop, len(batch)), np.flatnonzero(~leaves))
        )

    def encode(self, inputs: Sequence[Any]) -> Batch:
        return batch_at(0, len(inputs))

    def merge(self, batches: Sequence[Batch]) -> Batch:
        return batch_at(batches[0].cursor, sum(map(len, batches)))

    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        return batch_at(batch.cursor, len(rows))

    def clock(self) -> float:
        return self.now_s

    def stopwatch(self, call: Callable[[], Launched]) -> tuple[Launched, float]:
        start = self.now_s
        launched = call()
        return launched, self.now_s - start


def batch_at(cursor: int, size: int) -> Batch:
    return Batch(cursor, {"hidden": np.zeros((size, 16), np.float32)}, np.zeros((size, 0), np.float32))


def facts(model: FakeModel) -> NetworkFacts:
    return facts_of(model, batch_at(0, 1), "cpu", None, "measured: a fake", "cpu")


def measured(model: FakeModel, budget_s: float = 60.0, largest: int | None = 64) -> Measured:
    known = facts(model)
    sweep = Sweep(
        model,
        lambda size: batch_at(0, size),
        model.stopwatch,
        budget_s=budget_s,
        largest=largest,
        clock=model.clock,
    )
    return sweep.run(known)


def test_known_times_come_out_of_the_measurement() -> None:
    model = FakeModel()
    result = measured(model)
    table = result.table
    assert (table.batch_sizes[0], table.batch_sizes[-1]) == (1, 64)
    assert table.launch_s == pytest.approx(LAUNCH_S, rel=0.01)
    for size in (1, 5, 8, 20, 64):
        expected = [model.block_s(block, size) for block in range(3)]
        np.testing.assert_allclose(table.block_times_s(size), expected, rtol=0.06)
    np.testing.assert_allclose(table.ramp_times_s(10), [0, RAMP_S, 0], rtol=0.01)
    assert result.warnings == ()
    assert (result.spread, result.drift) == pytest.approx((0, 0))


class ChangedSize(FakeModel):
    """A block runs slower the first time behind one with more inputs, the slower the more there were."""

    ramp_blocks = (0, 1)
    SLOWER_S, _before = 0.0002, 0

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        self.now_s += self.SLOWER_S * self._before * (len(batch) < self._before)
        self._before = len(batch)
        return super().run(batch, stop, ramps, kept)


def test_a_stop_costs_a_launch_and_what_it_makes_of_the_next_block() -> None:
    assert measured(FakeModel()).table.stop_s == pytest.approx(LAUNCH_S, rel=0.01)
    table = measured(ChangedSize()).table
    assert table.stop_s == pytest.approx(LAUNCH_S, rel=0.05)
    for size in (8, 20, 64):
        at_ramps_s = table.ramp_times_s(size)[:2]
        assert at_ramps_s == pytest.approx(np.full(2, RAMP_S + ChangedSize.SLOWER_S * size), rel=0.05)


class Texts(FakeModel):
    """Its blocks take as long as the texts have tokens."""

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        assert batch.lengths is not None
        launched = super().run(batch_at(batch.cursor, int(batch.lengths.sum())), stop, ramps, kept)
        return replace(launched, survivors=launched.survivors and replace(batch, cursor=stop))

    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        if batch.lengths is None:
            return super().select(batch, rows)
        return replace(batch, memory=batch.memory[rows], lengths=batch.lengths[rows])


def text_batch(cursor: int, size: int) -> Batch:
    return replace(batch_at(cursor, size), lengths=np.linspace(1, 31, size).astype(np.int64))


def test_stops_are_timed_with_texts_of_all_lengths() -> None:
    """Batches hold texts in the order of their lengths."""
    model = Texts(floor=16)
    sweep = Sweep(model, lambda size: text_batch(0, int(size)), model.stopwatch, budget_s=60.0, clock=model.clock)
    table = sweep.run(facts(FakeModel())).table
    assert table.stop_s < 2 * LAUNCH_S
    assert table.ramp_times_s(64)[1] == pytest.approx(RAMP_S, abs=1e-4)


def test_it_spends_its_sizes_where_the_curve_bends() -> None:
    bent = measured(FakeModel(floor=8)).table.batch_sizes
    assert len([size for size in bent if 4 <= size <= 20]) >= 4
    straight = measured(FakeModel(floor=1)).table.batch_sizes
    assert len(straight) < len(bent)


def test_neighbouring_sizes_are_at_most_twice_apart_also_on_a_straight_curve() -> None:
    sizes = measured(FakeModel(floor=1), largest=32).table.batch_sizes
    assert all(high <= 2 * low for low, high in pairwise(sizes)), sizes


@pytest.mark.parametrize(("floor", "expected"), [(1, 64), (16, 128), (100, 256), (1000, 256)])
def test_batches_are_doubled_while_that_answers_more(floor: int, expected: int) -> None:
    assert measured(FakeModel(floor), largest=None).table.largest == expected


class SmallMemory(FakeModel):
    """A device that has memory for 100 inputs."""

    error: Exception = torch.OutOfMemoryError("no memory")

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        if len(batch) > 100:
            raise self.error
        return super().run(batch, stop, ramps, kept)


def test_batches_are_not_doubled_beyond_the_memory_the_budget_or_the_limit() -> None:
    small, of_another_library = SmallMemory(floor=1000), SmallMemory(floor=1000)
    of_another_library.error = Exception("failed to allocate")
    assert [measured(model, largest=None).table.largest for model in (small, of_another_library)] == [64, 64]
    assert measured(FakeModel(floor=1000), largest=64).table.largest == 64
    hasty, limited = (measured(FakeModel(floor=48), budget_s=1.0, largest=largest).table for largest in (None, 64))
    assert hasty.batch_sizes == limited.batch_sizes


def test_larger_batches_take_no_time_from_the_usual_ones() -> None:
    """The same sizes are timed, and the usual ones as often."""
    usual, larger = FakeModel(floor=16), FakeModel(floor=16)
    sizes, more = (
        measured(model, largest=largest).table.batch_sizes for model, largest in ((usual, 64), (larger, None))
    )
    assert more == (*sizes, 128)
    assert larger.now_s > usual.now_s


def test_it_keeps_to_its_budget_by_measuring_fewer_and_smaller_batches() -> None:
    model = FakeModel(floor=1)
    table = measured(model, budget_s=5.0).table
    assert model.now_s < 5.0 * 1.2
    assert table.batch_sizes[-1] < 64


def test_one_bad_round_in_five_moves_nothing() -> None:
    rng = np.random.default_rng(0)
    model = FakeModel(noise=lambda: 10.0 if rng.random() < 0.03 else 1.0)
    table = measured(model).table
    np.testing.assert_allclose(whole_s(table)[0], LAUNCH_S + 0.006, rtol=0.02)


def test_a_noisy_machine_is_reported() -> None:
    rng = np.random.default_rng(0)
    result = measured(FakeModel(noise=lambda: float(rng.uniform(0.5, 1.5))))
    assert result.spread > 0.1
    assert "too busy to trust" in result.warnings[0]


def test_a_machine_that_slows_down_is_reported() -> None:
    model = FakeModel()
    model._noise = lambda: 1.0 + model.now_s / 20
    assert any("not steady" in warning for warning in measured(model).warnings)


def test_ctrl_c_keeps_what_is_measured() -> None:
    model = FakeModel()

    def interrupt() -> float:
        if model.calls > 300:
            raise KeyboardInterrupt
        return 1.0

    model._noise = interrupt
    result = measured(model)
    assert result.interrupted
    assert 1 <= len(result.table.batch_sizes) < 4
    assert "interrupted: only batch sizes 1" in result.warnings[-1]


def test_facts_are_bytes_per_input_and_per_block() -> None:
    known = facts(FakeModel())
    assert known.hidden_bytes == (HIDDEN_BYTES, HIDDEN_BYTES, 2 * 4)
    assert known.memory_bytes == (0, 0, 0)
    assert known.activation_bytes == ()


def test_weights_that_blocks_share_are_known_to_be_the_same() -> None:
    """ALBERT's: four blocks, two layers, which run twice each."""
    model = network("albert", "entropy", [0.5])
    known = facts_of(model, random_inputs("albert", 1, seed=0)[0], "cpu", None, "measured: here", "cpu")
    assert known.repeated_bytes[0] == known.repeated_bytes[2] == 0
    ramp = sum(each.nbytes for each in model.ramps.heads[0].state_dict().values())
    head = known.memory_bytes[3] - known.memory_bytes[2] + ramp
    assert known.repeated_bytes[1] == known.repeated_bytes[3] == known.memory_bytes[3] - head
    assert facts_of(network("bert"), random_inputs("bert", 1, seed=0)[0], "cpu", None, "", "cpu").repeated_bytes == ()


def test_exits_are_counted_over_all_batches() -> None:
    counted = count_exits(FakeModel(), [batch_at(0, 6), batch_at(0, 4)])
    assert counted.exits.survival == (1.0, 1.0, 0.5)
    assert (counted.inputs, counted.interrupted) == (10, False)


class LeavesByNumber(FakeModel):
    """The inputs that leave at the first ramp are the even ones, and at the second ramp the first half."""

    ramp_blocks = (0, 1)

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
        (ramp,) = ramps
        rows = np.arange(0, len(batch), 2) if ramp == 0 else np.arange(len(batch) // 2)
        exits = Exits(rows, np.full(len(rows), ramp), np.zeros((len(rows), self.num_labels), np.float32))
        return Launched(exits, self.select(batch_at(stop, len(batch)), np.arange(len(batch))))


def test_inputs_that_would_leave_at_a_closed_ramp_are_counted_at_those_behind_it() -> None:
    """In this network, inputs that leave at the first ramp do not all leave at the second one."""
    counted = count_exits(LeavesByNumber(), [batch_at(0, 4), batch_at(0, 4)])
    assert counted.exits.survival == (1.0, 0.5, 0.25)
    assert dict(counted.exits.sure) == {(0, 1): 0.25, (0,): 0.25, (1,): 0.25, (): 0.25}
    assert counted.exits.survival_with({1}) == (1.0, 1.0, 0.5)


def test_ctrl_c_keeps_what_is_counted_and_says_how_much_that_is() -> None:
    def batches() -> Iterator[Batch]:
        yield batch_at(0, 6)
        raise KeyboardInterrupt

    counted = count_exits(FakeModel(), batches())
    assert counted.exits.survival == (1.0, 1.0, 0.5)
    assert (counted.inputs, counted.interrupted) == (6, True)


def test_the_knee_is_the_smallest_batch_with_nearly_the_best_rate() -> None:
    table = measured(FakeModel(floor=8)).table
    rates = [size / float(table.launch_s + table.block_times_s(size).sum()) for size in range(1, 65)]
    assert rates[knee(table) - 1] >= 0.9 * max(rates) > rates[knee(table) - 2]


@pytest.mark.parametrize(("threads", "waiting_counts"), [(1, False), (2, True)])
def test_one_thread_is_timed_by_itself(threads: int, waiting_counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)

    def run() -> Launched:
        time.sleep(0.02)
        return FakeModel().run(batch_at(0, 2), 3, ())

    launched, seconds = stopwatch_for("cpu")(run)
    assert len(launched.exits) == 2
    assert (seconds > 0.02) is waiting_counts


def test_exits_are_counted_by_inputs_and_by_tokens() -> None:
    batch = replace(batch_at(0, 4), lengths=np.array([1, 5, 2, 12]))
    counted = count_exits(FakeModel(), [batch])
    assert counted.exits.survival == (1.0, 1.0, 0.5)
    assert counted.by_tokens.survival == (1.0, 1.0, 0.85)
    assert count_exits(FakeModel(), [batch_at(0, 4)]).by_tokens is None


def test_memory_that_another_library_keeps_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime takes 70 bytes for the first block, keeps them, and needs 30 more for the second and 60 more for the
    ramp behind it; torch takes 5."""
    model, gib = FakeModel(), 2**30
    kept = iter([gib, *[gib + 70] * 2, *[gib + 100] * 2, *[gib + 160] * (1 + 2 * (model.num_blocks - 2))])
    patched = {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 10,
        "max_memory_allocated": lambda device: 15,
        "memory_reserved": lambda device: 4096,
        "mem_get_info": lambda device: (8 * gib - 4096 - next(kept), 8 * gib),
    }
    for name, function in patched.items():
        monkeypatch.setattr(torch.cuda, name, function)
    facts = facts_of(model, batch_at(0, 1), "h100", None, "", "cuda:0", served=model)
    assert facts.activation_bytes == (75, 65, *[5] * (model.num_blocks - 2))


def test_where_memory_is_not_counted_no_ramp_is_run_for_it() -> None:
    class Noting(FakeModel):
        def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: NDArray[np.int64] = NOBODY) -> Launched:
            opened.extend(ramps)
            return super().run(batch, stop, ramps, kept)

    opened = list[int]()
    assert facts_of(FakeModel(), batch_at(0, 1), "cpu", None, "", "cpu", served=Noting()).activation_bytes == ()
    assert opened == []
