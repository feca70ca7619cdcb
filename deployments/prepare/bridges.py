"""Makes the exits of networks whose answers are maps: bridges to heads of their own, as in PAME.

A head reads the maps of all regions of a network; behind an early block the later ones are missing. A bridge has the
first block of each later region and a copy of the head, which begin as the network's own. They are trained on frozen
features, towards labels or else towards the full network's map. A picture leaves where at most a number of its pixels
or points is not sure.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from isobatch.deployments.exits import Policy
from isobatch.deployments.map_tasks import Keypoints
from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.models.ramps import policy_at
from isobatch.deployments.prepare.entities import of_texts
from isobatch.deployments.prepare.map_samples import PixelSample, PointSample, parts_of
from isobatch.deployments.prepare.measuring import (
    PrepareOptions,
    TrainedRamps,
    choose_of_parts,
    rules_of,
)
from isobatch.deployments.prepare.sample import Indices, Sample
from isobatch.deployments.prepare.thresholds import replay
from isobatch.deployments.progress import show
from isobatch.profiles.exit_table import ExitTable

# Shares of pixels or points that need not be sure, from which the best is chosen.
UNSURE = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
HELD = 0.25  # of the training part: bridges do not learn from it, and thresholds are ordered by it
EPOCHS = 8
LEARNING_RATE = 4e-3  # the highest one of Adam, which falls to nothing in the end


def make_bridges(model: BackedModel, sample: Sample, options: PrepareOptions) -> TrainedRamps:
    """Bridges behind every block but the last, calibrated and tested."""
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
    """Train all bridges at once, and keep each as it was when it lost least on the held pictures."""
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
