"""Every way to run a split, as arrays: the edges of the graph that the planner searches.

An option starts before block `start` and gives its stop, its kind, its batch size, and whether the ramps inside are
active. Options that another one beats in every respect are left out, which keeps the search exact.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from isobatch.optimizer.effort import TIE_BREAK, Bools, Floats, Ints
from isobatch.optimizer.model import split_costs
from isobatch.optimizer.model.limits import KEPT, DeviceMemory
from isobatch.optimizer.problem import Problem


@dataclass(frozen=True)
class Options:
    """Arrays with one entry per option. `load_s`, `work_s`, `barred` have a row per class of source kinds."""

    start: int
    stop: Ints
    kind: Ints
    batch: Ints
    inner: Bools  # ramps inside the split are active
    load_s: Floats  # device seconds per arriving input
    work_s: Floats  # computing and transfer, for an input that stays to the end
    arrivals: Floats  # arrivals to wait for, see split_costs.latency_s
    memory: Floats  # bytes on the device
    class_of: Ints  # the class of each kind that a batch may come from
    barred: Bools  # no link leads from that class to the option's kind

    def __len__(self) -> int:
        return len(self.stop)

    @cached_property
    def some_barred(self) -> bool:
        return bool(self.barred.any())

    def latency_s(self, seconds_per_input: float, row: int | slice = slice(None)) -> Floats:
        """Latencies when inputs arrive at this distance."""
        latency_s: Floats = self.work_s[row] + self.arrivals * seconds_per_input
        return latency_s

    def only(self, keep: Bools) -> "Options":
        each = {name: getattr(self, name)[keep] for name in ("stop", "kind", "batch", "inner", "arrivals", "memory")}
        rows = {name: getattr(self, name)[:, keep] for name in ("load_s", "work_s", "barred")}
        return Options(self.start, **each, **rows, class_of=self.class_of)


@dataclass(frozen=True)
class Builder:
    """The tables of one problem, evaluated once at every batch size that may occur."""

    facts: Problem
    batches: tuple[int, int]  # the smallest and the largest
    budget_s: float
    timed: bool = True  # whether latency matters
    pruned: bool = True  # leave out options that another one beats
    cuts: tuple[int, ...] | None = None  # the network is cut exactly before these blocks; None: anywhere

    def options(self) -> list[Options]:
        return [self.starting(start) for start in range(self.facts.num_blocks)]

    @cached_property
    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.facts, self._largest)

    @cached_property
    def _survival(self) -> Floats:
        """The share that enters each block, and 0 after the last."""
        return np.array([*self.facts.survival, 0.0])

    @cached_property
    def _largest(self) -> Ints:
        """The largest batch of each kind: nothing was measured beyond the largest batch of its table."""
        return np.array([min(self.batches[1], table.largest) for table in self.facts.tables])

    @cached_property
    def _batches(self) -> Ints:
        return np.arange(1, self._largest.max() + 1)

    @cached_property
    def _releasing(self) -> Bools:
        """The blocks at whose ramp inputs leave if every ramp before it is active. The network's head is no ramp."""
        return self._leaving(self._survival[:-1], self._survival[1:])

    def _leaving(self, before: Floats, behind: Floats) -> Bools:
        """Whether inputs leave in a split; the last entry is the end of the network."""
        leaving = np.asarray(behind < before)
        leaving[-1] = False
        return leaving

    @cached_property
    def _block_s(self) -> Floats:
        return self._times_s("block_times_s", np.append(0, self._batches))

    @cached_property
    def _ramp_s(self) -> Floats:
        return self._times_s("ramp_times_s", np.append(0, self._batches))

    @cached_property
    def _knots(self) -> Floats:
        """Batch sizes between which the times of all kinds are linear: whole ones, and those of tables of texts."""
        return np.unique([*self._batches, *(size for table in self.facts.tables for size in table.batch_sizes)])

    @cached_property
    def _block_and_ramp_s(self) -> Floats:
        """Kinds x knots x blocks."""
        ramps_s = self._times_s("ramp_times_s", self._knots) * self._releasing
        return self._times_s("block_times_s", self._knots) + ramps_s

    @cached_property
    def _tie_break_s(self) -> float:
        """A tiny extra cost of every split: among equal plans, the one with the fewest splits wins."""
        size = np.maximum(np.arange(self._block_s.shape[1]), 1.0)[:, None]
        return TIE_BREAK * float((self._block_s / size)[:, 1:].min(axis=(0, 1)).sum())

    @cached_property
    def _launch_s(self) -> Floats:
        return np.array([table.launch_s for table in self.facts.tables])[:, None, None]

    def _allowed(self, start: int) -> Bools:
        """Whether a split may run from this block to each stop."""
        stops = np.arange(start + 1, self.facts.num_blocks + 1)
        level_stop = next((edge for edge in self.facts.edges if edge > start), self.facts.num_blocks)
        allowed: Bools = stops <= level_stop
        if self.cuts is not None:
            ends = sorted({0, *self.cuts, *self.facts.edges, self.facts.num_blocks})
            behind = next((end for end in ends if end > start), 0)
            allowed = (stops == behind) & (start in ends)
        return allowed

    def _times_s(self, method: str, sizes: Floats | Ints) -> Floats:
        """Kinds x batch sizes x blocks."""
        rows = [np.minimum(sizes, largest) for largest in self._largest]
        times = [getattr(table, method)(row) for table, row in zip(self.facts.tables, rows, strict=True)]
        return np.stack(times)

    def starting(self, start: int) -> Options:
        """All options from one block: arrays of stops x kinds x (batch sizes x [quiet, ramps inside])."""
        quiet = self._quiet_s(start)
        transfer, class_of = self._transfer(start)
        load, work = self._loads(start, quiet, transfer)
        return self._best(start, load, work, class_of)

    def _loads(self, start: int, quiet: Floats, transfer: Floats) -> tuple[Floats, Floats]:
        """Load and work, with a first axis for the classes of source kinds."""
        shrinking, felt = self._shrinking_s(start)
        occupied_s = split_costs.occupied_s(_by_stop(quiet, shrinking), transfer)
        possible, reach = np.isfinite(occupied_s), self._survival[start]
        load = split_costs.load_s(reach, np.where(possible, occupied_s, 0.0), np.repeat(self._batches, 2))
        load = load + self._tie_break_s
        work = _by_stop(quiet, felt) + transfer if reach > 0 else np.zeros_like(occupied_s)
        return np.where(possible, load, np.inf), np.where(possible, work, np.inf)

    def _quiet_s(self, start: int) -> Floats:
        """Kinds x batches x stops: times if the batch keeps its size up to the ramp at the end of the split."""
        work = np.cumsum(self._block_s[:, 1:, start:], axis=2) + self._launch_s
        leaving = self._leaving(self._survival[start], self._survival[start + 1 :])
        possible = ~leaving | np.isin(np.arange(start, self.facts.num_blocks), sorted(self.facts.ramp_blocks))
        if self.facts.keeps_open:
            possible &= ~self._shrinks(start)
        quiet: Floats = np.where(possible, work + self._ramp_s[:, 1:, start:] * leaving, np.inf)
        return quiet

    def _shrinks(self, start: int) -> Bools:
        """Whether inputs may leave inside a split, by its last block."""
        return np.append(False, np.logical_or.accumulate(self._releasing[start:-1]))

    def still(self, start: int) -> tuple[Floats, Floats]:
        """Loads (kinds x batches x stops) if the batch keeps its size and is not transferred, and arrivals by batch."""
        turn_s = np.array([self.facts.turn_s(device.kind) for device in self.facts.devices])[:, None, None]
        quiet, reach = np.maximum(self._quiet_s(start), turn_s), self._survival[start]
        allowed = (self._batches <= self._largest[:, None]) & (self._batches >= self.batches[0])
        possible = np.isfinite(quiet) & allowed[..., None] & self._allowed(start)
        occupied_s, size = np.where(possible, quiet, 0.0), self._batches[:, None]
        load = split_costs.load_s(reach, occupied_s, size) + self._tie_break_s
        return np.where(possible, load, np.inf), split_costs.wait_arrivals(reach, self._batches)

    def local_memory(self, start: int) -> Floats:
        """Kinds x batches x stops from 0: the memory of splits in a local placement."""
        memory = self.memory.splits(start, self._batches, KEPT).transpose(1, 2, 0)
        return np.concatenate([np.full((*memory.shape[:2], start + 1), np.inf), memory], axis=2)

    def _shrinking_s(self, start: int) -> tuple[Floats, Floats]:
        """The same if every ramp inside is active: on average, and for an input that stays."""
        shrinks = self._shrinks(start)
        shares, reach, size = self._survival, self._survival[start], self._batches[:, None]
        if not (shrinks.any() and reach > 0):
            never = np.full((len(self._launch_s), len(self._batches), len(shrinks)), np.inf)
            return never, never
        staying = shares[start:-1] / reach
        some = split_costs.occupancy(size, staying)
        stop_s = np.array([table.each_stop_s for table in self.facts.tables])[:, None, None]
        again_s = stop_s * np.append(False, self._releasing[start:-1])
        launch = np.cumsum(some * (self._at(start, split_costs.mean_size(size, staying)) + again_s), axis=2)
        felt = np.cumsum(self._at(start, split_costs.felt_size(size, staying)) + again_s, axis=2)
        launch, felt = launch + self._launch_s, felt + self._launch_s
        return np.where(shrinks, launch, np.inf), np.where(shrinks, felt, np.inf)

    def _at(self, start: int, size: Floats) -> Floats:
        """Seconds of blocks and active ramps at fractional batch sizes (batches x blocks)."""
        size, knots = np.clip(size, 1, self._batches[-1]), self._knots
        low = knots.searchsorted(size, side="right") - 1
        high = np.minimum(low + 1, len(knots) - 1)
        part = (size - knots[low]) / np.where(high > low, knots[high] - knots[low], 1.0)
        block = np.arange(start, self.facts.num_blocks)
        times: Floats = self._block_and_ramp_s[:, low, block]
        return times + part * (self._block_and_ramp_s[:, high, block] - times)

    def _transfer(self, start: int) -> tuple[Floats, Ints]:
        """Seconds (class of source x 1 x kind x batch), and the class of every source. Nothing precedes block 0."""
        classes: dict[bytes, tuple[int, Floats]] = {}
        class_of = []
        for source, table in zip(self.facts.devices, self.facts.tables, strict=True):
            size = self._batches.astype(float) * (table.hidden_bytes[start - 1] if start else 0)
            seconds = np.stack([self._way_s(source.kind, target.kind, size, start) for target in self.facts.devices])
            class_of.append(classes.setdefault(seconds.tobytes(), (len(classes), seconds))[0])
        by_class = np.stack([seconds for _, seconds in classes.values()])[:, None]
        return np.repeat(by_class, 2, axis=-1), np.array([*class_of, 0])

    def _way_s(self, source: str, target: str, size: Floats, start: int) -> Floats:
        if start == 0:
            return size
        link = self.facts.links.get((source, target))
        if link is None:
            return np.full(len(size), np.inf)
        return np.asarray(link.transfer_s(size))  # type: ignore[arg-type]  # its formula is valid for arrays as well

    def _best(self, start: int, load: Floats, work: Floats, class_of: Ints) -> Options:
        """The options that fit into memory and that no other option beats, in flat arrays."""
        batch = np.repeat(self._batches, 2)
        memory = np.repeat(self.memory.splits(start, self._batches), 2, axis=2)
        allowed = (batch <= self._largest[:, None]) & (batch >= self.batches[0])
        fits = allowed & (memory <= self.memory.capacity[:, None])
        load = np.where(fits, load, np.inf)
        keep = np.isfinite(load.min(0)) & (work.min(0) <= self.budget_s) & self._allowed(start)[:, None, None]
        if self.pruned:
            keep &= ~self._beaten(load, work, memory)
        stop, kind, size = np.nonzero(keep)
        reach = self._survival[start]
        arrivals = (split_costs.fill_arrivals(reach, batch) + split_costs.wait_arrivals(reach, batch))[size]
        load, work = load[:, stop, kind, size], work[:, stop, kind, size]
        barred = np.isinf(load)
        return Options(
            start, stop + start + 1, kind, batch[size], size % 2 == 1, np.where(barred, 0.0, load),
            np.where(barred, 0.0, work), arrivals, memory[stop, kind, size], class_of, barred,
        )  # fmt: skip

    def _beaten(self, load: Floats, work: Floats, memory: Floats) -> Bools:
        """Options that are no better than one of a smaller or equal batch, whatever kind the batch comes from.

        Each is compared only with the lightest one before it, as a smaller batch fills sooner.
        """
        lightest = load.min(0)
        order = np.arange(load.shape[-1])
        if not self.timed:  # every option is compared with the lightest of all
            rival = np.broadcast_to(lightest.argmin(-1, keepdims=True), lightest.shape)
        else:
            best = np.minimum.accumulate(lightest, axis=-1)
            record = np.concatenate([np.ones_like(best[..., :1], bool), best[..., 1:] < best[..., :-1]], -1)
            rival = np.maximum.accumulate(np.where(record, order, 0), axis=-1)
        lighter = (np.take_along_axis(load, rival[None], -1) <= load).all(0)
        sooner = (not self.timed) | (np.take_along_axis(work, rival[None], -1) <= work).all(0)
        leaner = self.memory.holds_any_cut[:, None] | (np.take_along_axis(memory, rival, -1) <= memory)
        beaten: Bools = lighter & sooner & leaner & (rival != order)
        return beaten


def _by_stop(quiet: Floats, shrinking: Floats) -> Floats:
    """Both (kinds x batches x stops) interleaved as 1 x stops x kinds x (batches x [quiet, shrinking])."""
    both = np.stack([quiet, shrinking], -1).transpose(2, 0, 1, 3)
    return both.reshape(1, *both.shape[:2], -1)
