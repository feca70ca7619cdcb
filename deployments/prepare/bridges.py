"""Makes the exits of networks that label pixels: bridges to heads of their own, as in PAME.

A head reads the maps of all regions of a network; behind an early block the later ones are missing. A bridge has the
first block of each later region and a copy of the head, which begin as the network's own. They are trained on frozen
features, towards labels or else towards the full network's map. A picture leaves where at most a number of its pixels
is not sure. The features of all pictures fit into no memory, so the network makes them anew, a few pictures at a time.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.deployments.exits import Policy
from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.models.ramps import policy_at
from isobatch.deployments.prepare.entities import of_texts
from isobatch.deployments.prepare.measuring import (
    PrepareOptions,
    RampLogits,
    TrainedRamps,
    choose_of_parts,
    rules_of,
)
from isobatch.deployments.prepare.sample import Indices, Sample
from isobatch.deployments.prepare.thresholds import calibration_error, replay
from isobatch.deployments.progress import show
from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.losses import picture_iou

UNSURE = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)  # shares of pixels that need not be sure, from which the best is chosen
HELD = 0.25  # of the training part: bridges do not learn from it, and thresholds are ordered by it
EPOCHS = 8
BATCH, LEARNING_RATE = 16, 4e-3  # pictures per step of Adam, and its highest rate, which falls to nothing in the end
CALIBRATED_BY = 20_000  # pixels


@dataclass(frozen=True)
class SeenPictures:
    """Some pictures: what a bridge behind each block reads, and for each pixel the full network's logits and the label.

    Labels are one-hot; a pixel without a label has none.
    """

    pooled: Sequence[Tensor]
    head: Tensor
    truth: Tensor
    targets: Tensor

    def losses(self, bridges: Sequence[nn.Module]) -> Tensor:
        return torch.stack([nn.functional.cross_entropy(logits, self.targets) for logits in self._logits(bridges)])

    def logits(self, bridges: Sequence[nn.Module]) -> RampLogits:
        return RampLogits(torch.stack(list(self._logits(bridges))).cpu(), self.head.cpu(), self.truth.cpu())

    def _logits(self, bridges: Sequence[nn.Module]) -> Iterator[Tensor]:
        return (bridge(pooled) for bridge, pooled in zip(bridges, self.pooled, strict=True))


@dataclass(frozen=True)
class PixelSample:
    """Pictures, and the labels of their pixels (-1: none); without labels, the full network's answers are these."""

    model: BackedModel
    values: Sequence[Any]
    labels: Indices | None

    def seen(self, rows: Indices) -> Iterator[SeenPictures]:
        """These pictures, a few at a time."""
        for some in _parts(rows):
            pooled, head = self.model.features(self.model.encode([self.values[row] for row in some]))
            copies = [each.clone() for each in pooled]  # of tensors that no training may use
            head, count = head.clone(), self.model.num_labels
            if self.labels is None:
                truth = nn.functional.one_hot(head.argmax(dim=1), count).float()
                yield SeenPictures(copies, head, truth, head.softmax(dim=1))
            else:
                numbers = torch.from_numpy(self.labels[some]).to(head.device).ravel()
                truth = nn.functional.one_hot(numbers + 1, count + 1)[:, 1:].float()
                yield SeenPictures(copies, head, truth, truth)


def make_bridges(model: BackedModel, sample: Sample, options: PrepareOptions) -> TrainedRamps:
    """Bridges behind every block but the last, calibrated and tested."""
    pictures = PixelSample(model, sample.values, sample.labels)
    train = np.random.default_rng(options.seed).permutation(sample.parts.train)
    held, learn = np.split(train, [int(HELD * len(train))])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        bridges = _trained(pictures, learn, held)
    shape, test = np.concatenate((held, sample.parts.calibrate)), sample.parts.test
    with torch.inference_mode():
        temperatures, policy = _some_pixels(pictures, bridges, shape).temperatures(), policy_at(options.policy)
        of_shape, of_test = (picture_tables(pictures, bridges, temperatures, each, policy) for each in (shape, test))
        tested = choose_of_parts(of_shape, of_test.__getitem__, options)
        before = _some_pixels(pictures, bridges, test)
    after = before.calibrated(temperatures)
    errors = [
        (calibration_error(raw, before.truth), calibration_error(made, before.truth))
        for raw, made in zip(before.heads(), after.heads(), strict=True)
    ]
    rules = rules_of(replace(options, ramp="bridge"), temperatures, tested, errors)
    return TrainedRamps(rules, {block: bridge.cpu() for block, bridge in enumerate(bridges)}, tested.evidence)


def _trained(pictures: PixelSample, learn: Indices, held: Indices) -> list[nn.Module]:
    """Train all bridges at once, and keep each as it was when it lost least on the held pictures."""
    anatomy, device = pictures.model.exact.anatomy, pictures.model.exact.device
    assert anatomy.bridge, "This is a bug: a network that labels pixels has bridges."
    bridges = [anatomy.bridge(block).to(device) for block in range(pictures.model.num_blocks - 1)]
    optimiser = torch.optim.AdamW(nn.ModuleList(bridges).parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, LEARNING_RATE, epochs=EPOCHS, steps_per_epoch=len(_parts(learn))
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


def _some_pixels(pictures: PixelSample, bridges: Sequence[nn.Module], rows: Indices) -> RampLogits:
    """As many pixels of all these pictures as calibration needs."""
    random, made = np.random.default_rng(0), list[RampLogits]()
    for seen in pictures.seen(rows):
        logits, labelled = seen.logits(bridges), torch.nonzero(seen.truth.sum(dim=1)).ravel().cpu().numpy()
        kept = random.permutation(labelled)[: -(-CALIBRATED_BY * BATCH // len(rows))]
        made.append(RampLogits(logits.ramps[:, kept], logits.head[kept], logits.truth[kept]))
    return made[0].joined(made[1:])


def picture_tables(
    pictures: PixelSample, bridges: Sequence[nn.Module], temperatures: Sequence[float], rows: Indices, policy: Policy
) -> dict[int, ExitTable]:
    """The table of these pictures for each number of pixels that need not be sure; losses are shares of pixels."""
    costs = [(block + 1) / (len(bridges) + 1) for block in range(len(bridges))]
    made: dict[int, list[ExitTable]] = {}
    for some, seen in zip(_parts(rows), show(pictures.seen(rows), "thresholds", len(_parts(rows))), strict=True):
        logits = seen.logits(bridges).calibrated(temperatures)
        of_pixels = replay(policy, logits.ramps, logits.head, logits.truth, costs)
        pixels = len(logits.head) // len(some)
        has_label = logits.truth.sum(dim=1).reshape(len(some), -1).numpy()
        labelled, truth = has_label.mean(axis=1), np.where(has_label > 0, of_pixels.truth.reshape(len(some), -1), -1)
        answers = of_pixels.labels.reshape(-1, *truth.shape).astype(np.int64)
        iou = np.array([picture_iou(truth, each, logits.head.shape[1]) for each in answers], np.float32)
        for most in sorted({int(share * pixels) for share in UNSURE}):
            table = of_texts(of_pixels, np.full(len(some), pixels), most)
            right = np.where(labelled > 0, table.right / np.maximum(labelled, 1 / pixels), 1.0)
            made.setdefault(most, []).append(replace(table, right=right.astype(np.float32), iou=iou))
    return {most: _joined(tables) for most, tables in made.items()}


def _joined(tables: Sequence[ExitTable]) -> ExitTable:
    names = ("first", "right", "labels", "truth", "agreed", "iou")
    return replace(tables[0], **{name: np.concatenate([getattr(each, name) for each in tables], -1) for name in names})


def _parts(rows: Indices) -> list[Indices]:
    """A few at a time, never one alone, of which a head could not learn its norms."""
    return np.array_split(rows, -(-len(rows) // BATCH))
