"""Says what the demo must show and measures whether a network shows it, with a margin for chance.

The inputs are drawn from all distortions of the digits that training, ramps and thresholds have not seen. A figure
passes only if it passes by `SIGMAS` of its standard errors, so that another draw, or the last bits of another
processor's arithmetic, does not change the verdict.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deployments.demo.digits import NOISE, Images, demo_digits
from profiles.model import Batch, Exits, SplitModel

SIGMAS = 3.0
LEAST_ACCURACY = 0.95
MOST_LOST = 0.005  # of the accuracy of the full network, by exits
MIDDLE = (0.2, 0.8)  # the share of inputs that enter the second half of the network
LEAST_LEAVING, LEAVING_BLOCKS = 0.03, 4  # so many ramps let at least this share of the inputs go
NOISES, DEEPER = (0.0, 0.2, 0.4, 0.8), 1.03  # each of these noises moves exits deeper, by this factor at least
BATCH = 1000


@dataclass(frozen=True)
class Estimate:
    """A mean over inputs and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "Estimate":
        """
        >>> Estimate.of(np.array([0.0, 1.0, 0.0, 1.0]))
        Estimate(mean=0.5, error=0.25)
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

    accuracy: Estimate
    lost: Estimate
    survival: tuple[Estimate, ...]
    leaving: tuple[Estimate, ...]
    depths: tuple[Estimate, ...]

    def shortcomings(self) -> list[str]:
        """What this network does not show; nothing for a good demo."""
        middle = self.survival[len(self.survival) // 2]
        leaving = sum(share.low >= LEAST_LEAVING for share in self.leaving)
        shallow = [
            noise
            for noise, (before, after) in zip(NOISES[1:], pairwise(self.depths), strict=True)
            if after.low < DEEPER * before.high
        ]
        found = {
            f"the full network is right in {self.accuracy.mean:.1%}": self.accuracy.low < LEAST_ACCURACY,
            f"exits lose {self.lost.mean:.2%}": self.lost.high > MOST_LOST,
            f"{middle.mean:.1%} enter the second half": not MIDDLE[0] <= middle.low <= middle.high <= MIDDLE[1],
            f"inputs leave at {leaving} ramps only": leaving < LEAVING_BLOCKS,
            f"noise {shallow} moves no exits": bool(shallow),
        }
        return [sentence for sentence, wrong in found.items() if wrong]

    def __str__(self) -> str:
        survival = ", ".join(f"{share.mean:.3f}" for share in self.survival)
        depths = ", ".join(f"{depth.mean:.2f}" for depth in self.depths)
        return (
            f"right in {self.accuracy.mean:.2%}, exits lose {self.lost.mean:.2%} (standard error {self.lost.error:.2%})"
            f", survival {survival}, blocks run at noises {NOISES}: {depths}"
        )


def quality_of(model: SplitModel, count: int = 10_000, seed: int = 11) -> Quality:
    """Measured on so many inputs; the depths on half as many for each noise."""
    images, labels = demo_digits(count, NOISE, seed)
    batches = list(_batches(model, images))
    full, exits = _left(model, batches, ()), _left(model, batches, model.ramp_blocks)
    right, right_in_full = exits.labels == labels, full.labels == labels
    return Quality(
        Estimate.of(right_in_full.astype(float)),
        Estimate.of(right_in_full.astype(float) - right),
        tuple(Estimate.of((exits.blocks > block).astype(float)) for block in range(model.num_blocks - 1)),
        tuple(Estimate.of((exits.blocks == block).astype(float)) for block in range(model.num_blocks - 1)),
        tuple(_depth(model, count // 2, noise, seed + 1) for noise in NOISES),
    )


def _depth(model: SplitModel, count: int, noise: float, seed: int) -> Estimate:
    images, _ = demo_digits(count, noise, seed)
    return Estimate.of(_left(model, _batches(model, images), model.ramp_blocks).blocks.astype(float) + 1)


def _batches(model: SplitModel, images: Images) -> Iterator[Batch]:
    for start in range(0, len(images), BATCH):
        yield model.encode(list(images[start : start + BATCH]))


def _left(model: SplitModel, batches: Iterable[Batch], ramps: tuple[int, ...]) -> Exits:
    """Who leaves where, in the order of the inputs."""
    parts = [model.run(batch, model.num_blocks, ramps).exits for batch in batches]
    blocks = np.concatenate([part.blocks for part in parts])
    return Exits(np.arange(len(blocks)), blocks, np.concatenate([part.logits for part in parts]))
