"""The quality that the demo must have, and its measurement with a margin for chance.

The inputs are distortions of digits that were not used for training, ramps and thresholds. A figure passes only by a
margin of `SIGMAS` standard errors, so that other random inputs, or the last bits of another processor's arithmetic, do
not change the verdict.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.demo.digits import NOISE, Images, demo_digits
from isobatch.profiles.model import Batch, Exits, SplitModel

SIGMAS = 3.0  # standard errors by which every figure must pass
MIN_ACCURACY = 0.95  # the full network's accuracy, at least
MAX_LOST = 0.005  # the accuracy that exits may cost
MIDDLE = (0.2, 0.8)  # bounds of the share of inputs that enter the second half of the network
# At least this many ramps let at least this share of inputs leave.
MIN_LEAVING = 0.03
MIN_LEAVING_RAMPS = 4
# Each of these noises moves exits deeper than the one before it, by this factor at least.
NOISES = (0.0, 0.2, 0.4, 0.8)
MIN_DEEPER = 1.03
BATCH = 1000  # digits per batch


@dataclass(frozen=True)
class MeanWithError:
    """A mean over inputs and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "MeanWithError":
        """
        >>> MeanWithError.of(np.array([0.0, 1.0, 0.0, 1.0]))
        MeanWithError(mean=0.5, error=0.25)
        """
        return cls(float(values.mean()), float(values.std() / np.sqrt(len(values))))

    @property
    def low(self) -> float:
        return self.mean - SIGMAS * self.error

    @property
    def high(self) -> float:
        return self.mean + SIGMAS * self.error


@dataclass(frozen=True)
class Quality:
    """`survival[k]` is the share of inputs that go on after block k; `depths` are mean blocks run, noise by noise."""

    accuracy: MeanWithError
    lost: MeanWithError
    survival: tuple[MeanWithError, ...]
    leaving: tuple[MeanWithError, ...]
    depths: tuple[MeanWithError, ...]

    def shortcomings(self) -> list[str]:
        """The figures that do not pass, as sentences; none for a good demo."""
        middle = self.survival[len(self.survival) // 2]
        leaving = sum(share.low >= MIN_LEAVING for share in self.leaving)
        shallow = [
            noise
            for noise, (before, after) in zip(NOISES[1:], pairwise(self.depths), strict=True)
            if after.low < MIN_DEEPER * before.high
        ]
        failures = {
            f"the full network is right in {self.accuracy.mean:.1%}": self.accuracy.low < MIN_ACCURACY,
            f"exits lose {self.lost.mean:.2%}": self.lost.high > MAX_LOST,
            f"{middle.mean:.1%} enter the second half": not MIDDLE[0] <= middle.low <= middle.high <= MIDDLE[1],
            f"inputs leave at {leaving} ramps only": leaving < MIN_LEAVING_RAMPS,
            f"noise {shallow} moves no exits": bool(shallow),
        }
        return [sentence for sentence, failed in failures.items() if failed]

    def __str__(self) -> str:
        survival = ", ".join(f"{share.mean:.3f}" for share in self.survival)
        depths = ", ".join(f"{depth.mean:.2f}" for depth in self.depths)
        return (
            f"right in {self.accuracy.mean:.2%}, exits lose {self.lost.mean:.2%} (standard error {self.lost.error:.2%})"
            f", survival {survival}, blocks run at noises {NOISES}: {depths}"
        )


def quality_of(model: SplitModel, count: int = 10_000, seed: int = 11) -> Quality:
    """The quality of a network, measured on `count` inputs, and the depths on half as many for each noise."""
    images, labels = demo_digits(count, NOISE, seed)
    batches = list(_batches(model, images))
    full, exits = _exits(model, batches, ()), _exits(model, batches, model.ramp_blocks)
    right, right_in_full = exits.labels == labels, full.labels == labels
    return Quality(
        MeanWithError.of(right_in_full.astype(float)),
        MeanWithError.of(right_in_full.astype(float) - right),
        tuple(MeanWithError.of((exits.blocks > block).astype(float)) for block in range(model.num_blocks - 1)),
        tuple(MeanWithError.of((exits.blocks == block).astype(float)) for block in range(model.num_blocks - 1)),
        tuple(_depth(model, count // 2, noise, seed + 1) for noise in NOISES),
    )


def _depth(model: SplitModel, count: int, noise: float, seed: int) -> MeanWithError:
    images, _ = demo_digits(count, noise, seed)
    return MeanWithError.of(_exits(model, _batches(model, images), model.ramp_blocks).blocks.astype(float) + 1)


def _batches(model: SplitModel, images: Images) -> Iterator[Batch]:
    for start in range(0, len(images), BATCH):
        yield model.encode(list(images[start : start + BATCH]))


def _exits(model: SplitModel, batches: Iterable[Batch], ramps: tuple[int, ...]) -> Exits:
    """The exits of all inputs, in their order."""
    parts = [model.run(batch, model.num_blocks, ramps).exits for batch in batches]
    blocks = np.concatenate([part.blocks for part in parts])
    return Exits(np.arange(len(blocks)), blocks, np.concatenate([part.logits for part in parts]))
