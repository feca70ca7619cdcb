"""Measures how much longer launches take while other processes launch on the same device.

One process launches alone, then several at once, in turn, so that other work on the machine disturbs both alike.
A CPU as a device is as many cores as it has threads, which processes that share it divide among them.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from isobatch.cluster.profiling.block_times import SampleInputs, on_timed_backend, sample_inputs
from isobatch.cluster.profiling.links import child, first_message
from isobatch.deployments.models import load_served
from isobatch.deployments.models.backends import compute_with, weights_dtype
from isobatch.deployments.models.served_model import ServedModel
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.lengths import Lengths
from isobatch.profiles.measure import host_clock_for
from isobatch.profiles.sweep import NOISY, whole_s

ROUNDS = 3  # of each batch size, after one that warms up
LEAST_LAUNCHES = 4  # of each process in a round
LEAST_S = 0.1  # of a round: many turns of processes that take turns on a core


@dataclass(frozen=True)
class TimedNetwork:
    """A network with its inputs, which any process can load. `threads`: of a device that is not shared."""

    model: str
    folder: Path
    device: str
    dtype: str
    backend: str
    lengths: Lengths | None
    tokens: Sequence[int]
    threads: int

    @property
    def on_cpu(self) -> bool:
        return not self.device.startswith("cuda")

    def load(self, sharers: int) -> tuple[ServedModel, list[SampleInputs]]:
        """Load it in a process of its own, which keeps to the cores of the device from then on."""
        if self.on_cpu:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-self.threads :])
        compute_with(max(1, self.threads // sharers))
        exact = load_served(self.model, device=self.device, dtype=weights_dtype(self.dtype))
        network = on_timed_backend(exact, self.model, self.backend, self.dtype)
        return network, sample_inputs(network, self.folder, self.lengths, self.tokens)


def check_can_share(device: str) -> None:
    """Raise UserError where processes cannot be kept on the cores of a device: on others they would not share it."""
    if not device.startswith("cuda") and not hasattr(os, "sched_setaffinity"):
        raise UserError("--together on a CPU needs Linux, which keeps processes on the cores that they share")


def shared_tables(
    network: TimedNetwork, tables: Sequence[LatencyTable], sharers: int, budget_s: float
) -> Iterator[tuple[LatencyTable, str]]:
    """The tables of a device that this many processes share, one for each of these, and a note on each."""
    least_s = max(LEAST_S, budget_s / (2 * sum(len(table.batch_sizes) for table in tables) * (ROUNDS + 1)))
    with ExitStack() as stack:
        start = partial(child, _launch_on_request, network)
        pipes = [stack.enter_context(start(each)) for each in (1, *(sharers,) * sharers)]
        try:
            for pipe in pipes:
                _checked(first_message(pipe))
            for number, table in enumerate(tables):
                sizes_s = zip(table.batch_sizes, whole_s(table).tolist(), strict=True)
                rounds = [
                    _factors(pipes, number, size, max(least_s, LEAST_LAUNCHES * sharers * seconds))
                    for size, seconds in sizes_s
                ]
                factors = [float(f"{median(each):.4g}") for each in rounds]
                shared = table.shared_by(sharers, factors)
                yield shared, _note(shared, factors, rounds)
        except (EOFError, BrokenPipeError):
            memory = f"has this machine memory for {len(pipes) + 1} times the network?"
            raise UserError(f"--together {sharers}: a process that launches was killed: {memory}") from None


def _checked(message: float | str | None) -> float:
    """The number that a process sent. Raise UserError if it sent the reason why it ended."""
    if isinstance(message, str):
        raise UserError(f"--together: a process that launches has ended: {message}")
    return message or 0.0


def _note(table: LatencyTable, factors: Sequence[float], rounds: Sequence[Sequence[float]]) -> str:
    each = zip(table.batch_sizes, factors, strict=True)
    by_size = ", ".join(f"{factor:.3g} at {table.size_text(size)}" for size, factor in each)
    spread = max(max(each) / min(each) for each in rounds) - 1
    warning = f"; WARNING: rounds differ by {spread:.0%}: the machine is too busy to trust" if spread > NOISY else ""
    return f"{table.kind_and_length}: launches at once take longer than alone, by batch size: {by_size}{warning}"


def _factors(pipes: Sequence[Any], *request: float) -> list[float]:
    """How much longer launches take together than alone, by round. The first process launches alone."""
    rounds = [_launch_s(pipes[1:], *request) / _launch_s(pipes[:1], *request) for _ in range(ROUNDS + 1)]
    return rounds[1:]


def _launch_s(pipes: Sequence[Any], *request: float) -> float:
    """Mean seconds of a launch of these processes, which launch at the same time. Where they take turns on a core, most
    launches end within their turn, so that a median would not see the others' turns."""
    for pipe in pipes:
        pipe.send(request)
    return fmean([_checked(pipe.recv()) for pipe in pipes])


def _launch_on_request(pipe: Any, network: TimedNetwork, sharers: int) -> None:
    """The work of a launching process, until the other end of its pipe is closed. An error is sent as a sentence."""
    with suppress(EOFError, BrokenPipeError):
        try:
            _launch(pipe, network, sharers)
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            pipe.send(str(error).partition("\n")[0] or type(error).__name__)


def _launch(pipe: Any, network: TimedNetwork, sharers: int) -> None:
    model, inputs = network.load(sharers)
    clock = time.perf_counter if network.on_cpu else host_clock_for(network.device)
    pipe.send(None)
    while True:
        table, size, seconds = pipe.recv()
        batch, launches, begun_s = inputs[table].batch(size), 0, clock()
        while not launches or clock() < begun_s + seconds:
            model.run(batch, model.num_blocks, ())
            launches += 1
        pipe.send((clock() - begun_s) / launches)
