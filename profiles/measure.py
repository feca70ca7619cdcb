"""Times a network's blocks and ramps on one device, and counts its exits. The only file of profiles with torch."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isobatch.profiles import sweep
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.latency import MOST_LARGEST, USUAL_LARGEST, LatencyTable
from isobatch.profiles.model import Batch, Launched, SplitModel

log = logging.getLogger(__name__)
Stopwatch = Callable[[Callable[[], Launched]], tuple[Launched, float]]  # a call's result, and the seconds it took
Progress = Callable[[float, str], None]  # the share of the work that is done, and the current step

LEAST_ROUNDS = 3  # rounds of one visit to a batch size, at least
MOST_ROUNDS = 25  # and at most
PASSES_PER_ROUND = 6  # of the network in one round: block by block 3 times, with ramps, with stops, and at once
VISIT_SHARE = 1 / 16  # the share of the budget for one visit: enough for two visits to each of eight batch sizes
LARGEST_SHARE = 1 / 4  # the share of the budget for a visit to the largest batch


@dataclass(frozen=True)
class Measured:
    """A measured table, the relative spread of its rounds, and the drift between first and second visits."""

    table: LatencyTable
    spread: float
    drift: float | None  # None: there was no second visit
    interrupted: bool = False
    of_replica: bool = True  # whether launches include what a replica adds to them

    def __str__(self) -> str:
        steady = "steady enough to trust" if self.drift is not None else "not checked again, give a larger --timing-s"
        verdict = "; ".join(f"WARNING: {warning}" for warning in self.warnings) or steady
        least = sweep.knee(self.table)
        enough = f"{least} input{'s' if least > 1 else ''} a batch {'come' if least > 1 else 'comes'} within 10 %"
        again = "no second visit" if self.drift is None else f"a second visit differs by {self.drift:.1%}"
        spread = f"rounds spread by {self.spread:.1%}"
        return f"{self.table.kind_and_length}: {enough} of the best rate; {spread}, {again}: {verdict}"

    @property
    def warnings(self) -> tuple[str, ...]:
        reasons = []
        if self.spread > sweep.NOISY:
            reasons.append(
                f"half of the rounds differ by more than {self.spread:.0%}: the machine is too busy to trust"
            )
        if self.drift is not None and self.drift > sweep.NOISY:
            reasons.append(f"the same batch took {self.drift:.0%} more or less later on: the machine is not steady")
        if self.interrupted:
            sizes = ", ".join(map(self.table.size_text, self.table.batch_sizes))
            without = "" if self.of_replica else ", without what a replica adds to launches"
            reasons.append(f"interrupted: only batch sizes {sizes} were measured{without}")
        return tuple(reasons)


@dataclass
class Sweep:
    """Measures one network at several batch sizes, with most of the budget where its curve bends.

    Every size is visited twice, early and late, and the rounds of both visits count, so that a table shows the
    machine's usual speed.
    """

    model: SplitModel
    make_batch: Callable[[float], Batch]
    stopwatch: Stopwatch
    _: KW_ONLY
    budget_s: float
    # The largest batch. None: as large as usual, and larger where that answers more, in time beyond the budget.
    largest: int | None = None
    least: float = 1
    clock: Callable[[], float] = time.perf_counter
    progress: Progress = lambda share, what: None

    def __post_init__(self) -> None:
        self._start_s, self._most = self.clock(), self.largest or USUAL_LARGEST
        self._rounds: dict[float, sweep.Rounds] = {}

    def run(self, facts: sweep.NetworkFacts) -> Measured:
        """Measure. Ctrl-C ends it with the sizes measured so far, if there are any."""
        drift, interrupted = None, False
        try:
            for warming in (1, 1, min(8, self._most)):
                one_round(self.model, self.make_batch(warming), self.stopwatch)
            for size in self._sizes():
                self._rounds[size] = self._visit(size)
            if self.largest is None:
                self._visit_larger()
            drift = self._visit_again()
        except KeyboardInterrupt:
            if not self._rounds:
                raise
            interrupted = True
        spread = float(np.median([rounds.spread for rounds in self._rounds.values()]))
        return Measured(sweep.tabulate(self._counted(facts.length), facts), spread, drift, interrupted)

    def _counted(self, length: int | None) -> dict[float, sweep.Rounds]:
        """The rounds by batch size; that of texts counts their tokens, as a multiple of a text of this length."""
        return {_size(self.make_batch(size), length): rounds for size, rounds in self._rounds.items()}

    @property
    def _left_s(self) -> float:
        return self._start_s + self.budget_s - self.clock()

    def _sizes(self) -> Iterator[float]:
        """Both ends and the middle in any case, then more sizes until half of the budget is spent."""
        if self.least < 1:
            yield self.least
        while (size := sweep.next_size(self._whole_s, self._most)) is not None:
            if len(self._whole_s) >= 3 and self._left_s < self.budget_s / 2:
                return
            yield size
            if len(self._whole_s) == 2:
                self._most = sweep.affordable(self._whole_s, self._most, self._longest_pass_s)

    def _visit_larger(self) -> None:
        """Double the largest batch while that answers more per second and fits the device's memory."""
        while sweep.worth_doubling(self._whole_s):
            began_s, twice = self.clock(), 2 * max(self._whole_s)
            longest_s = 2 * max(self._whole_s.values())
            if twice > MOST_LARGEST or longest_s > self._longest_pass_s:
                return
            try:
                self._rounds[twice] = self._visit(twice)
            except Exception as error:  # libraries report a lack of memory in different ways
                log.warning(f"batches of {twice} are not timed: {' '.join(str(error).split())}")
                torch.cuda.empty_cache()
                return
            self.budget_s += 2 * (self.clock() - began_s)  # for the second visit, too

    @property
    def _longest_pass_s(self) -> float:
        """Seconds that a pass of the largest batch through the network may take."""
        return LARGEST_SHARE * self.budget_s / LEAST_ROUNDS / PASSES_PER_ROUND

    def _visit(self, size: float) -> sweep.Rounds:
        """Measure a batch size in a few rounds at least, and more while this visit's share of the budget lasts."""
        batch, rounds = self.make_batch(size), list[sweep.RoundTimes]()
        lengths = batch.lengths if size < 1 else None
        what = f"batch {size:g}" if lengths is None else f"a text of {lengths.sum()} tokens"
        self.progress(1 - max(self._left_s, 0.0) / self.budget_s, what)
        until = self.clock() + min(VISIT_SHARE * self.budget_s, self._left_s)
        while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and self.clock() < until):
            rounds.append(one_round(self.model, batch, self.stopwatch))
        return sweep.Rounds.of(rounds)

    def _visit_again(self) -> float | None:
        """Visit sizes again, the latest first, as the largest and those in the bend. The median relative change."""
        differences = []
        for size, before in reversed(list(self._rounds.items())):
            if before.median_s * LEAST_ROUNDS * PASSES_PER_ROUND > self._left_s:
                continue
            again = self._visit(size)
            differences.append(abs(again.median_s / before.median_s - 1))
            self._rounds[size] = before + again
        return float(np.median(differences)) if differences else None

    @property
    def _whole_s(self) -> dict[int, float]:
        """Median seconds by batch size, for sizes of at least one input."""
        return {int(size): rounds.median_s for size, rounds in self._rounds.items() if size >= 1}


def one_round(model: SplitModel, batch: Batch, stopwatch: Stopwatch) -> sweep.RoundTimes:
    """Time every block alone and with its ramp; all blocks with a stop at each ramp; then all blocks at once.

    A block runs alone again before its ramp and after it, as its weights are in the cache from the second time on.
    """
    blocks_s, ramps_s, current = list[float](), list[float](), batch
    for block in range(model.num_blocks):
        alone = partial(model.run, current, block + 1, ())
        launched, block_s = stopwatch(alone)
        blocks_s.append(block_s)
        if block in model.ramp_blocks:
            with_ramp = partial(model.run, current, block + 1, (block,))
            before_s, ramp_s, after_s = (stopwatch(call)[1] for call in (alone, with_ramp, alone))
            ramps_s.append(ramp_s - (before_s + after_s) / 2)
        current = launched.survivors or current
    _, stopping_s = stopwatch(partial(_run_stopping, model, batch))
    _, whole_s = stopwatch(partial(model.run, batch, model.num_blocks, ()))
    return sweep.RoundTimes(blocks_s, ramps_s, stopping_s, whole_s)


def _run_stopping(model: SplitModel, batch: Batch) -> Launched:
    """Run all blocks and ramps like a replica that stops at every ramp.

    The number of inputs that continue is fixed, so the time does not depend on which inputs would leave.
    """
    for ramp, count in zip(model.ramp_blocks, sweep.staying(len(batch), len(model.ramp_blocks)), strict=True):
        survivors = model.run(batch, ramp + 1, (ramp,), np.arange(len(batch))).survivors
        assert survivors is not None, "This is a bug: all inputs stay."
        # Some of each length: texts stand in the order of their lengths.
        batch = model.select(survivors, np.floor((np.arange(count) + 0.5) * len(survivors) / count).astype(np.int64))
    return model.run(batch, model.num_blocks, ())


def facts_of(
    model: SplitModel, single: Batch, kind: str, length: int | None, source: str, device: str,
    served: SplitModel | None = None,
) -> sweep.NetworkFacts:  # fmt: skip
    """The bytes of one input on the wire and in memory, block by block, and of the blocks' weights.

    `served`: the same network as it is served, whose memory for a launch counts, if its modules do not run in torch.
    """
    hidden, memory, activation, repeated, current = list[int](), list[int](), list[int](), list[int](), single
    before: Collection[int] = ()
    known = device.startswith("cuda")
    for block in range(model.num_blocks):
        ramps = tuple(ramp for ramp in model.ramp_blocks if ramp == block)
        with modules_run() as modules:
            model.run(current, block + 1, ramps)
        own = (tensor for each in modules for tensor in (*each.parameters(recurse=False), *each.buffers(recurse=False)))
        # By address, so that each counts once; a packed layer keeps a tensor without one.
        weights = {tensor.data_ptr() or id(tensor): tensor.nbytes for tensor in own}
        memory.append(sum(weights.values()))
        repeated.append(sum(size for place, size in weights.items() if place in before))
        before = weights
        run = partial((served or model).run, current, block + 1)
        launched, peak_bytes = _peak_bytes(partial(run, ()), device)
        if ramps and known:  # a bridge may need more
            peak_bytes = max(peak_bytes, _peak_bytes(partial(run, ramps), device)[1])
        activation.append(peak_bytes)
        current = launched.survivors or current
        # Of the hidden state, or of the answer.
        hidden.append(launched.survivors.size_bytes if launched.survivors else int(launched.exits.logits.nbytes))
    return sweep.NetworkFacts(
        kind, model.ramp_blocks, tuple(hidden), tuple(memory), tuple(activation) if known else (), length, source,
        repeated_bytes=tuple(repeated) if any(repeated) else (),
    )  # fmt: skip


@dataclass(frozen=True)
class CountedExits:
    """The exits counted over this number of `inputs`."""

    exits: ExitProfile
    by_tokens: ExitProfile | None  # of texts, each weighted by its tokens
    inputs: int
    interrupted: bool


def count_exits(model: SplitModel, batches: Iterable[Batch]) -> CountedExits:
    """Count exits. Ctrl-C ends it with the inputs counted so far, if there are any."""
    counted, interrupted = list[tuple[NDArray[np.bool_], NDArray[np.int64] | None]](), False
    try:
        for batch in batches:
            counted.append((_sure_at(model, batch), batch.lengths))
    except KeyboardInterrupt:
        if not counted:
            raise
        interrupted = True
    sure, lengths = np.concatenate([each for each, _ in counted]), [each for _, each in counted if each is not None]
    profile = partial(ExitProfile.from_sure, sure, np.array(model.ramp_blocks, np.int64), model.num_blocks)
    by_tokens = profile(np.concatenate(lengths)) if lengths else None
    return CountedExits(profile(np.ones(len(sure), np.int64)), by_tokens, len(sure), interrupted)


def _sure_at(model: SplitModel, batch: Batch) -> NDArray[np.bool_]:
    """By input and ramp, whether the input would leave there if no ramp before were open."""
    every, sure = np.arange(len(batch)), np.zeros((len(batch), len(model.ramp_blocks)), bool)
    for column, ramp in enumerate(model.ramp_blocks):
        launched = model.run(batch, ramp + 1, (ramp,), every)
        assert launched.survivors is not None, "This is a bug: all inputs stay."
        sure[launched.exits.rows, column], batch = True, launched.survivors
    return sure


def _size(batch: Batch, length: int | None) -> float:
    if batch.lengths is None or not length:
        return len(batch)
    size = float(f"{batch.lengths.sum() / length:.6g}")
    return int(size) if size == int(size) else size


def stopwatch_for(device: str) -> Stopwatch:
    """Events on a GPU, where a call returns before its work is done; on the host the wall clock, or a better one.

    A single computing thread never waits, so its processor time is the wall time on a machine without other programs.
    Several threads do wait for each other, so the wall clock times them.
    """
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        return _by_events
    clock = host_clock_for(device)

    def by_clock(call: Callable[[], Launched]) -> tuple[Launched, float]:
        start = clock()
        launched = call()
        return launched, clock() - start

    return by_clock


def host_clock_for(device: str) -> Callable[[], float]:
    """A clock that first waits for all work of the device."""

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    if device.startswith("cuda"):
        return synchronized
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def _by_events(call: Callable[[], Launched]) -> tuple[Launched, float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    launched = call()
    end.record()
    end.synchronize()
    return launched, start.elapsed_time(end) / 1000


@contextmanager
def modules_run() -> Iterator[dict[torch.nn.Module, None]]:
    """The modules that run inside this context, each once, in order."""
    modules: dict[torch.nn.Module, None] = {}

    def note(module: torch.nn.Module, *_: Any) -> None:
        modules[module] = None

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        yield modules
    finally:
        hook.remove()


def _peak_bytes(call: Callable[[], Launched], device: str) -> tuple[Launched, int]:
    """The most memory that a call needs beyond what is already in use; 0 on the host, where it is not counted.

    Torch counts its own. What other libraries took, such as ONNX Runtime, they keep for their next call.
    """
    if not device.startswith("cuda"):
        return call(), 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, of_others = torch.cuda.memory_allocated(device), _bytes_of_others(device)
    launched = call()
    torch.cuda.synchronize(device)
    own = torch.cuda.max_memory_allocated(device) - before
    return launched, own + max(0, _bytes_of_others(device) - of_others)


def _bytes_of_others(device: str) -> int:
    """The device's memory that is in use, and not by torch."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
