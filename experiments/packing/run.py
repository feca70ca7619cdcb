"""Claim: without padding, launches take the time of their tokens, which is hardly ever more than padded.

The same network runs the same batches packed and padded, in turns, on one thread: torch, ONNX Runtime, and 8 bits.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console
from scipy.optimize import nnls

from experiments.packing.padded import PaddedModel, on_onnx, on_torch
from experiments.packing.texts import Integers, batch_of, cut, lengths_of, untrained_minilm
from experiments.packing.waiting import Seconds, by_length, first_come, most_per_s
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.measure import stopwatch_for
from isobatch.profiles.model import Batch

console = Console(stderr=True)
Counted = Callable[[Sequence[int]], int]  # of a launch's lengths: the tokens that determine its time

BACKENDS = ("torch", "onnx", "int8")
APART = 1e-4  # the largest difference of packed and padded logits
EQUAL = (16, 32)  # texts, and tokens of each text, in batches without padding
SIZES = (1, 2, 4, 8, 16, 32)  # texts of a launch whose time is predicted
SOON, LATER = 3, 12  # the limits of p99, in padded launches of 16 texts of the mean length


@dataclass(frozen=True)
class Pair:
    """One network, packed and padded. In 8 bits answers may differ, since padding affects the scales."""

    packed: TorchModel
    padded: PaddedModel
    is_exact: bool


def measure(batches: int = 8, rounds: int = 3, layers: int = 6) -> dict[str, float]:
    torch.set_num_threads(1)
    console.print("MiniLM's shape with random weights; lengths in words and marks", highlight=False)
    sst2 = lengths_of("sst2")
    mixed = np.concatenate([sst2, lengths_of("agnews"), lengths_of("qnli")])
    figures = dict[str, float]()
    with TemporaryDirectory() as folder:
        for backend in BACKENDS:
            console.print(backend)
            result = _of(pair_on(backend, layers, Path(folder)), sst2, mixed, batches, rounds)
            figures |= {name if backend == "torch" else f"{name}_{backend}": value for name, value in result.items()}
    return figures


def pair_on(backend: str, layers: int, folder: Path) -> Pair:
    network, int8 = untrained_minilm(layers), backend == "int8"
    exact = cut(copy.deepcopy(network))
    if backend == "torch":
        return Pair(exact, PaddedModel(exact, on_torch(network)), is_exact=True)
    served = OnnxModel(exact, f"untrained MiniLM, {layers} layers", int8=int8, cache=folder / "packed")
    served.prepare([BlockRange(0, exact.num_blocks)], batch_of([3], 0))
    return Pair(served, PaddedModel(exact, on_onnx(network, folder, int8)), is_exact=not int8)


def _of(pair: Pair, sst2: Integers, mixed: Integers, batches: int, rounds: int) -> dict[str, float]:
    drawn = [batch for size in SIZES for batch in _drawn(mixed, size, batches)]
    packed, padded = times_in_turns(pair, drawn, rounds)
    equal = [batch_of([EQUAL[1]] * EQUAL[0], seed) for seed in range(max(batches // 3, 1))]
    return {
        "packed_over_padded_mixed_16": 1 / packed_over_padded(pair, _drawn(mixed, 16, batches), rounds),
        "packed_over_padded_sst2_8": 1 / packed_over_padded(pair, _drawn(sst2, 8, 2 * batches), rounds),
        "overhead_equal_lengths": packed_over_padded(pair, equal, 4 * rounds) - 1,
        "packed_over_sorted_equal_p99": packed_over_sorted(packed, padded, mixed),
        "packed_over_sorted_later": packed_over_sorted(packed, padded, mixed, LATER),
        "time_prediction_error": packed.error(real_tokens),
    }


def _drawn(lengths: Integers, size: int, batches: int) -> list[Batch]:
    random = np.random.default_rng(size)
    return [batch_of(random.choice(lengths, size), seed) for seed in range(batches)]


def packed_over_padded(pair: Pair, batches: Sequence[Batch], rounds: int) -> float:
    """The time of all batches, packed over padded."""
    packed, padded = times_in_turns(pair, batches, rounds)
    return sum(packed.took_s) / sum(padded.took_s)


def times_in_turns(pair: Pair, batches: Sequence[Batch], rounds: int) -> tuple["PackedTimes", "PackedTimes"]:
    """The median times of each batch, packed and padded in turns."""
    lengths = [batch.lengths.tolist() for batch in batches if batch.lengths is not None]
    packed_s, padded_s = zip(*(_in_turns(pair, batch, rounds) for batch in batches), strict=True)
    return PackedTimes(lengths, packed_s), PackedTimes(lengths, padded_s)


def _in_turns(pair: Pair, batch: Batch, rounds: int) -> tuple[float, float]:
    result, expected = (_run(model, batch)[0] for model in (pair.packed, pair.padded))
    if pair.is_exact and not np.abs(result - expected).max() < APART:
        raise ValueError("packed and padded logits differ: there is nothing to compare")
    took_s = [(_run(pair.packed, batch)[1], _run(pair.padded, batch)[1]) for _ in range(rounds)]
    return median(ours for ours, _ in took_s), median(theirs for _, theirs in took_s)


def _run(model: TorchModel, batch: Batch) -> tuple["np.typing.NDArray[np.float32]", float]:
    launched, took_s = stopwatch_for("cpu")(partial(model.run, batch, model.num_blocks, ()))
    return launched.exits.logits, took_s


def real_tokens(lengths: Sequence[int]) -> int:
    return sum(lengths)


def padded_tokens(lengths: Sequence[int]) -> int:
    return max(lengths) * len(lengths)


@dataclass(frozen=True)
class PackedTimes:
    """The lengths of launches' texts, and the times of the launches."""

    lengths: Sequence[Sequence[int]]
    took_s: Sequence[float]

    def line(self, counted: Counted, places: slice = slice(None)) -> Seconds:
        """The time of a launch by a straight line through these times over their counts."""
        took_s = np.array(self.took_s[places])
        terms = np.array([[1.0, counted(lengths)] for lengths in self.lengths[places]])
        weights = 1 / took_s  # relative errors count
        (at_once_s, each_s), _ = nnls(terms * weights[:, None], took_s * weights)
        return lambda lengths: float(at_once_s + each_s * counted(lengths))

    def error(self, counted: Counted) -> float:
        """The mean relative error of the line for launches to which it was not fitted."""
        line, others = self.line(counted, slice(None, None, 2)), slice(1, None, 2)
        predicted = [line(lengths) for lengths in self.lengths[others]]
        return float(np.abs(np.array(predicted) / np.array(self.took_s[others]) - 1).mean())


def packed_over_sorted(packed: PackedTimes, padded: PackedTimes, lengths: Integers, launches: int = SOON) -> float:
    """Texts per second at the same p99. With a longer p99, more texts wait, and sorting pads less."""
    ours, theirs = packed.line(real_tokens), padded.line(padded_tokens)
    limit_s = launches * theirs([int(lengths.mean())] * 16)
    return most_per_s(limit_s, lengths, first_come, ours) / most_per_s(limit_s, lengths, by_length, theirs)
