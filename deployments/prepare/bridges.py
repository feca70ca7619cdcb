"""Makes the exits of networks whose answers are maps: bridges to heads of their own, as in PAME.

A head reads the maps of all regions of a network; after an early block the later ones are missing. A bridge has the
first block of each later region and a copy of the head, which begin as the network's own. They are trained on frozen
features, towards labels or else towards the full network's map. A picture leaves if no more of its pixels or points
are unsure than a given number.

The features of all pictures fit into no memory, so the network makes them again, a few pictures at a time.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from isobatch.deployments.exits import Policy
from isobatch.deployments.map_tasks import Keypoints
from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.models.ramps import policy_at
from isobatch.deployments.points import are_near
from isobatch.deployments.prepare.entities import of_texts
from isobatch.deployments.prepare.measuring import PrepareOptions, RampLogits, TrainedRamps, choose_of_parts, rules_of
from isobatch.deployments.prepare.sample import Indices, Sample
from isobatch.deployments.prepare.thresholds import replay
from isobatch.deployments.progress import show
from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.losses import Floats, picture_iou

BATCH = 16  # pictures at a time
CALIBRATED_BY = 20_000  # pixels
SPREAD = 2.0  # of the bell around a point on its heat map, in cells, as in ViTPose's training
BELLS = 1000.0  # the weight of errors of heat maps: their squares are small


@dataclass(frozen=True)
class SeenPictures:
    """Some pictures: what a bridge after each block reads, and in a row for each pixel or point the full network's
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
            # No training may use the tensors of an inference: these are copies.
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
        return before.errors(before.calibrated(temperatures))

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


# Shares of pixels or points that need not be sure, from which the best is chosen.
UNSURE = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
HELD = 0.25  # of the training part: bridges do not learn from it, and thresholds are ordered by it
EPOCHS = 8
LEARNING_RATE = 4e-3  # the highest one of Adam, which falls to nothing in the end


def make_bridges(model: BackedModel, sample: Sample, options: PrepareOptions) -> TrainedRamps:
    """Bridges after every block but the last, calibrated and tested."""
    pictures = pictures_of(model, sample, options)
    train = np.random.default_rng(options.seed).permutation(sample.parts.train)
    held, learn = np.split(train, [int(HELD * len(train))])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        bridges = _trained(pictures, learn, held)
    shape, test = np.concatenate((held, sample.parts.calibrate)), sample.parts.test
    with torch.inference_mode():
        temperatures, policy = pictures.temperatures(bridges, shape), policy_at(options.policy)
        of_shape, of_test = (picture_tables(pictures, bridges, temperatures, each, policy) for each in (shape, test))
        tested = choose_of_parts(of_shape, of_test.__getitem__, options)
        errors = pictures.errors(bridges, temperatures, test)
    rules = rules_of(replace(options, ramp="bridge"), temperatures, tested, errors)
    if isinstance(pictures, PointSample):
        rules = rules.model_copy(update={"tolerance": pictures.tolerance})
    return TrainedRamps(rules, {block: bridge.cpu() for block, bridge in enumerate(bridges)}, tested.evidence)


def pictures_of(model: BackedModel, sample: Sample, options: PrepareOptions) -> PixelSample:
    task = sample.task
    if isinstance(task, Keypoints):
        return PointSample(model, sample.values, sample.labels, task, options.tolerance * max(task.grid))
    return PixelSample(model, sample.values, sample.labels)


def _trained(pictures: PixelSample, learn: Indices, held: Indices) -> list[nn.Module]:
    """Train all bridges at once, and keep each one's state with the lowest loss on the held-out pictures."""
    anatomy, device = pictures.model.exact.anatomy, pictures.model.exact.device
    assert anatomy.bridge, "This is a bug: a network whose answers are maps has bridges."
    bridges = [anatomy.bridge(block).to(device) for block in range(pictures.model.num_blocks - 1)]
    optimiser = torch.optim.AdamW(nn.ModuleList(bridges).parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, LEARNING_RATE, epochs=EPOCHS, steps_per_epoch=len(parts_of(learn))
    )
    least, best = np.full(len(bridges), np.inf), [bridge.state_dict() for bridge in bridges]
    for _ in show(range(EPOCHS), "bridges, epoch by epoch"):
        for bridge in bridges:
            bridge.train()
        for seen in pictures.seen(learn[torch.randperm(len(learn)).numpy()]):
            optimiser.zero_grad()
            torch.autograd.backward(seen.losses(bridges).sum())
            optimiser.step()
            schedule.step()
        for bridge in bridges:
            bridge.eval()
        with torch.inference_mode():
            lost = torch.stack([seen.losses(bridges) for seen in pictures.seen(held)]).mean(dim=0).cpu().numpy()
        for better in np.flatnonzero(lost < least):
            least[better], best[better] = lost[better], deepcopy(bridges[better].state_dict())
    for bridge, state in zip(bridges, best, strict=True):
        bridge.load_state_dict(state)
        bridge.requires_grad_(False)
    return bridges


def picture_tables(
    pictures: PixelSample, bridges: Sequence[nn.Module], temperatures: Sequence[float], rows: Indices, policy: Policy
) -> dict[int, ExitTable]:
    """The table of these pictures for each number of pixels or points that need not be sure; losses are shares."""
    costs = [(block + 1) / (len(bridges) + 1) for block in range(len(bridges))]
    made: dict[int, list[ExitTable]] = {}
    for some, seen in zip(parts_of(rows), show(pictures.seen(rows), "thresholds", len(parts_of(rows))), strict=True):
        logits = seen.logits(bridges).calibrated(temperatures)
        answers = pictures.compared(replay(policy, logits.ramps, logits.head, logits.truth, costs))
        has_label = (logits.truth.sum(dim=1) > 0).reshape(len(some), -1).numpy()
        labelled, iou = has_label.mean(axis=1), pictures.iou(answers, has_label)
        for most in sorted({int(share * has_label.shape[1]) for share in UNSURE}):
            table = of_texts(answers, np.full(len(some), has_label.shape[1]), most)
            right = np.where(labelled > 0, table.right / np.maximum(labelled, 1 / has_label.shape[1]), 1.0)
            made.setdefault(most, []).append(replace(table, right=right.astype(np.float32), iou=iou))
    return {most: _joined(tables) for most, tables in made.items()}


def _joined(tables: Sequence[ExitTable]) -> ExitTable:
    names = ("first", "right", "labels", "truth", "agreed", *(() if tables[0].iou is None else ("iou",)))
    return replace(tables[0], **{name: np.concatenate([getattr(each, name) for each in tables], -1) for name in names})
