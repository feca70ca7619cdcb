"""A network that sleeps for the launch table's time instead of computing, to try out any cluster on a laptop."""

import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.transport.packed import rows_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile, first_ramp
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.lengths import AROUND
from isobatch.profiles.model import NOBODY, Batch, Exits, Launched

Blocks = NDArray[np.int64]
# Tests set this environment variable to a folder. A file there, named by a process id, holds that process's slowdown.
FAULTS = "ISOBATCH_VIRTUAL_FAULTS"
CACHED_LAUNCHES = 1 << 14  # different launches whose times are remembered
TOKENS_LIMIT = 4096  # of one text


def injected_slowdown() -> float:
    """How many times slower a test makes this process (1: not at all)."""
    folder = os.environ.get(FAULTS)
    file = Path(folder, str(os.getpid())) if folder else None
    return float(file.read_text()) if file and file.exists() else 1.0


class VirtualModel:
    """A SplitModel in which only the time of a launch is real.

    An input may name a block, as in `{"exit_block": 3}`: it leaves at the first active ramp from that block on. For
    others, the ramps at which they leave if these are active are drawn from the profile. Hidden states have the size in
    the table.

    With a `length`, inputs are texts. A string has a token for each word and two around them; other inputs have
    `"tokens": 17`, or `length` tokens. A launch then takes the table's time for its number of tokens.
    """

    def __init__(
        self,
        table: LatencyTable,
        exits: ExitProfile,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
        slower: Callable[[], float] = injected_slowdown,
        length: int | None = None,
        edges: tuple[int, ...] = (),
    ) -> None:
        if table.num_blocks != exits.num_blocks:
            raise UserError(f"the table has {table.num_blocks} blocks, the exit profile {exits.num_blocks}")
        self.labels = ("0", "1")
        self._table, self._length, self.edges = table, length, edges
        nested, drawn = ExitProfile(exits.survival).by_set[0], exits.by_set
        self._sets = np.vstack((nested, drawn[0]))  # those of inputs that name a block, then those of the profile
        self._below = np.cumsum(drawn[1])
        self._random = np.random.default_rng(0)
        self._sleep, self._clock, self._slower = sleep, clock, slower
        self._late_s = 0.0
        # A core may run hundreds of launches a second, so each different launch is computed from the table only once.
        self._seconds = lru_cache(CACHED_LAUNCHES)(self._compute_seconds)
        self._left_at = lru_cache(CACHED_LAUNCHES)(self._find_left_at)

    @property
    def num_blocks(self) -> int:
        return self._table.num_blocks

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def ramp_blocks(self) -> tuple[int, ...]:
        return tuple(range(self.num_blocks - 1))

    @property
    def reads_text(self) -> bool:
        return self._length is not None

    def encode(self, inputs: Sequence[Any]) -> Batch:
        sets = np.array([self._set_of(content) for content in inputs], np.int64)
        if self._length is None:
            return _batch(0, sets, None)
        lengths = np.array([_tokens(content, self._length) for content in inputs], np.int64)
        return _batch(0, np.repeat(sets, lengths), None, lengths)

    def run(self, batch: Batch, stop: int, ramps: Collection[int], kept: Blocks = NOBODY) -> Launched:
        """Sleep for the table's time. If one sleep was too long, the next is shorter, so the sum is right."""
        # The size as the table counts it: inputs, or texts of the profile's length.
        size = float(len(batch))
        if self._length and batch.lengths is not None:
            size = float(batch.lengths.sum()) / self._length
        ends_s = self._clock() + self._slower() * self.seconds(batch.cursor, stop, size, ramps) - self._late_s
        launched = self._launched(batch, stop, ramps, kept)
        self._sleep(max(0.0, ends_s - self._clock()))
        self._late_s = max(0.0, self._clock() - ends_s)
        return launched

    def _launched(self, batch: Batch, stop: int, ramps: Collection[int], kept: Blocks) -> Launched:
        sets = batch.arrays["sets"]
        if batch.lengths is not None:
            sets = sets[np.cumsum(batch.lengths) - batch.lengths]
        left_at = self._left_at(batch.cursor, stop, frozenset(ramps))[sets]
        leaving, stays = np.flatnonzero(left_at >= 0), left_at < 0
        if stop < self.num_blocks:
            stays[kept] = True
        staying = np.flatnonzero(stays)
        logits = np.zeros((len(leaving), self.num_labels), np.float32)
        exits = Exits(leaving, left_at[leaving], logits)
        if not len(staying):
            return Launched(exits, None)
        hidden = np.zeros((1, self._table.hidden_bytes[stop - 1] // (self._length or 1)), np.uint8)
        selected = self.select(batch, staying)
        survivors = _batch(stop, selected.arrays["sets"], hidden, selected.lengths)
        return Launched(exits, survivors)

    def merge(self, batches: Sequence[Batch]) -> Batch:
        sets = np.concatenate([batch.arrays["sets"] for batch in batches])
        lengths = [batch.lengths for batch in batches if batch.lengths is not None]
        all_lengths = np.concatenate(lengths) if lengths else None
        return _batch(batches[0].cursor, sets, batches[0].arrays.get("hidden"), all_lengths)

    def select(self, batch: Batch, rows: NDArray[np.int64]) -> Batch:
        sets, hidden = batch.arrays["sets"], batch.arrays.get("hidden")
        if batch.lengths is None:
            return _batch(batch.cursor, sets[rows], hidden)
        return _batch(batch.cursor, sets[rows_of(batch.lengths, rows)], hidden, batch.lengths[rows])

    def seconds(self, start: int, stop: int, size: float, ramps: Collection[int]) -> float:
        """The seconds that a launch takes on the simulated device."""
        return self._seconds(start, stop, size, frozenset(ramps))

    def _compute_seconds(self, start: int, stop: int, size: float, ramps: frozenset[int]) -> float:
        blocks = self._table.block_times_s(size)[start:stop].sum()
        heads = sum(self._table.ramp_times_s(size)[ramp] for ramp in ramps if start <= ramp < stop)
        return float(self._table.each_stop_s + blocks + heads)

    def _set_of(self, content: Any) -> int:
        """The number of the set of ramps at which this input leaves."""
        if isinstance(content, list) and any(each is None or isinstance(each, dict) for each in content):
            raise UserError("an input of a virtual network cannot be a list of inputs")
        if isinstance(content, dict) and isinstance(content.get("exit_block"), int):
            if not 0 <= content["exit_block"] < self.num_blocks:
                raise UserError(f"exit_block = {content['exit_block']} must lie in 0..{self.num_blocks - 1}")
            return int(content["exit_block"])
        drawn = np.searchsorted(self._below, self._random.random() * self._below[-1], side="right")
        return self.num_blocks + min(int(drawn), len(self._below) - 1)

    def _find_left_at(self, start: int, stop: int, ramps: frozenset[int]) -> Blocks:
        """The block after which the inputs of each set leave in a launch (-1: they stay)."""
        first = first_ramp(self._sets, [ramp for ramp in ramps if start <= ramp < stop])
        return first if stop == self.num_blocks else np.where(first == self.num_blocks - 1, -1, first)


def _tokens(content: Any, length: int) -> int:
    if isinstance(content, str):
        return min(len(content.split()) + AROUND, TOKENS_LIMIT)
    tokens = content.get("tokens", length) if isinstance(content, dict) else length
    if not isinstance(tokens, int) or not 1 <= tokens <= TOKENS_LIMIT:
        raise UserError(f"tokens = {tokens!r} must be a number from 1 to {TOKENS_LIMIT}")
    return tokens


def _batch(
    cursor: int, sets: Blocks, hidden: NDArray[np.uint8] | None, lengths: NDArray[np.int64] | None = None
) -> Batch:
    """A batch whose hidden states are one repeated row: they take memory only when they are packed to be sent."""
    rows = len(sets)  # one per input, or per token
    states = {} if hidden is None else {"hidden": np.broadcast_to(hidden[0], (rows, hidden.shape[1]))}
    count = rows if lengths is None else len(lengths)
    return Batch(cursor, {"sets": sets} | states, np.zeros((count, 0), np.float32), lengths)
