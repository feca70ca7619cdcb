"""Pictures that bridges learn from: what they read, and the maps that they should give.

The features of all pictures fit into no memory, so the network makes them anew, a few pictures at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from isobatch.deployments.map_tasks import Keypoints
from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.points import are_near
from isobatch.deployments.prepare.measuring import RampLogits
from isobatch.deployments.prepare.sample import Indices
from isobatch.deployments.prepare.thresholds import calibration_error
from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.losses import Floats, picture_iou

BATCH = 16  # pictures at a time
CALIBRATED_BY = 20_000  # pixels
SPREAD = 2.0  # of the bell around a point on its heat map, in cells, as in ViTPose's training
BELLS = 1000.0  # the weight of errors of heat maps: their squares are small


@dataclass(frozen=True)
class SeenPictures:
    """Some pictures: what a bridge behind each block reads, and in a row for each pixel or point the full network's
    logits, 1 for each right answer, and what a bridge learns.

    A pixel or point without a label has no right answer.
    """

    pooled: Sequence[Tensor]
    head: Tensor
    truth: Tensor
    targets: Tensor
    heat: bool = False  # rows are heat maps, not logits

    def losses(self, bridges: Sequence[nn.Module]) -> Tensor:
        return torch.stack([self._loss(logits) for logits in self._logits(bridges)])

    def logits(self, bridges: Sequence[nn.Module]) -> RampLogits:
        return RampLogits(torch.stack(list(self._logits(bridges))).cpu(), self.head.cpu(), self.truth.cpu())

    def _logits(self, bridges: Sequence[nn.Module]) -> Iterator[Tensor]:
        return (bridge(pooled) for bridge, pooled in zip(bridges, self.pooled, strict=True))

    def _loss(self, logits: Tensor) -> Tensor:
        if not self.heat:
            return nn.functional.cross_entropy(logits, self.targets)
        labelled = self.truth.any(dim=1)
        return BELLS * nn.functional.mse_loss(logits[labelled], self.targets[labelled])


@dataclass(frozen=True)
class PixelSample:
    """Pictures, and the labels of their pixels (-1: none); without labels, the full network's answers are these."""

    model: BackedModel
    values: Sequence[Any]
    labels: NDArray[Any] | None

    def seen(self, rows: Indices) -> Iterator[SeenPictures]:
        """These pictures, a few at a time."""
        for some in parts_of(rows):
            pooled, head = self.model.features(self.model.encode([self.values[row] for row in some]))
            # Copies of tensors that no training may use.
            yield self._with_answers(some, [each.clone() for each in pooled], head.clone())

    def _with_answers(self, some: Indices, pooled: Sequence[Tensor], head: Tensor) -> SeenPictures:
        count = self.model.num_labels
        if self.labels is None:
            truth = nn.functional.one_hot(head.argmax(dim=1), count).float()
            return SeenPictures(pooled, head, truth, head.softmax(dim=1))
        numbers = torch.from_numpy(self.labels[some]).to(head.device).ravel()
        truth = nn.functional.one_hot(numbers + 1, count + 1)[:, 1:].float()
        return SeenPictures(pooled, head, truth, truth)

    def temperatures(self, bridges: Sequence[nn.Module], rows: Indices) -> list[float]:
        """Those that calibrate each ramp, followed by the head's."""
        return self._some(bridges, rows).temperatures()

    def errors(
        self, bridges: Sequence[nn.Module], temperatures: Sequence[float], rows: Indices
    ) -> Sequence[tuple[float | None, float | None]]:
        """Of calibration, before and after it, for each ramp and the head."""
        before = self._some(bridges, rows)
        after = before.calibrated(temperatures)
        return [
            (calibration_error(raw, before.truth), calibration_error(made, before.truth))
            for raw, made in zip(before.heads(), after.heads(), strict=True)
        ]

    def _some(self, bridges: Sequence[nn.Module], rows: Indices) -> RampLogits:
        """As many pixels of all these pictures as calibration needs."""
        random, made = np.random.default_rng(0), list[RampLogits]()
        for seen in self.seen(rows):
            logits, labelled = seen.logits(bridges), torch.nonzero(seen.truth.sum(dim=1)).ravel().cpu().numpy()
            kept = random.permutation(labelled)[: -(-CALIBRATED_BY * BATCH // len(rows))]
            made.append(RampLogits(logits.ramps[:, kept], logits.head[kept], logits.truth[kept]))
        return made[0].joined(made[1:])

    def compared(self, answers: ExitTable) -> ExitTable:
        """The table of all pixels, with answers that count as the same."""
        return answers

    def iou(self, answers: ExitTable, has_label: NDArray[np.bool_]) -> NDArray[np.float32] | None:
        """The mean IoU of each picture, by ramps. `has_label`: pictures x pixels."""
        truth = np.where(has_label, answers.truth.reshape(has_label.shape), -1)
        labels = answers.labels.reshape(-1, *truth.shape).astype(np.int64)
        return np.array([picture_iou(truth, each, self.model.num_labels) for each in labels], np.float32)


@dataclass(frozen=True)
class PointSample(PixelSample):
    """Pictures, and x and y of each point on its heat map (NaN: none); points within the tolerance are the same."""

    task: Keypoints
    tolerance: float  # in cells

    def _with_answers(self, some: Indices, pooled: Sequence[Tensor], head: Tensor) -> SeenPictures:
        height, width = self.task.grid
        if self.labels is None:
            points = self.task.on_maps(head.argmax(dim=1).cpu().numpy())
        else:
            points = self.labels[some].reshape(-1, 2)
        squares = torch.from_numpy(squared_distances(points, height, width)).to(head)
        targets = head if self.labels is None else (squares / (-2 * SPREAD**2)).exp()
        return SeenPictures(pooled, head, (squares <= self.tolerance**2).float(), targets, heat=True)

    def temperatures(self, bridges: Sequence[nn.Module], rows: Indices) -> list[float]:
        return [1.0] * (len(bridges) + 1)  # heat maps are no logits

    def errors(
        self, bridges: Sequence[nn.Module], temperatures: Sequence[float], rows: Indices
    ) -> Sequence[tuple[float | None, float | None]]:
        return [(None, None)] * len(temperatures)

    def compared(self, answers: ExitTable) -> ExitTable:
        points = self.task.on_maps(answers.labels)
        same = are_near(points, points[-1], self.tolerance)
        return replace(answers, agreed=same.astype(np.float32))

    def iou(self, answers: ExitTable, has_label: NDArray[np.bool_]) -> NDArray[np.float32] | None:
        return None


def squared_distances(points: Floats, height: int, width: int) -> Floats:
    """From each point, x and y, to the cells of a map, line by line.

    >>> squared_distances(np.array([[1.0, 0.0]]), 2, 2).tolist()
    [[1.0, 0.0, 2.0, 1.0]]
    """
    lines, columns = np.divmod(np.arange(height * width), width)
    squares: Floats = (points[:, :1] - columns) ** 2 + (points[:, 1:] - lines) ** 2
    return squares


def parts_of(rows: Indices) -> list[Indices]:
    """A few at a time, never one alone, of which a head could not learn its norms."""
    return np.array_split(rows, -(-len(rows) // BATCH))
