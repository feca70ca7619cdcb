"""Claim: exits with bridges (PAME) leave early in a network that labels pixels, within a promise of agreement.

No weights are downloaded: a small FCN is trained here on pictures of scikit-learn's digits, one to six of them in a
picture, on noise; every pixel is background or one of ten digits. Its weights are frozen then, and an exit behind every
second block is trained towards the labels. A picture leaves where at most a share of its pixels is less sure than a
threshold (PAME's rule of count and confidence). The promise is that of `isobatch prepare`: of other pictures at most
1 % of the pixels get another answer than the full network's, 95 % sure. Multiplications are counted, those of exits
that are looked at in vain, too. Which exits are open is chosen on the pictures that the ladder is made from.

It is an experiment, no part of the product: a network of one's own would need its bridges trained.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from experiments.bridges.network import NUM_BLOCKS, Backbone, Costs, Exit
from isobatch.deployments.progress import show
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.losses import Floats, Indices

SIDE, MOST_DIGITS, NUM_LABELS, NOISE = 32, 6, 11, 0.15
STEPS, EXIT_STEPS, BATCH, RATE = 900, 300, 32, 3e-3
SHAPE, TEST, OTHERS = 1500, 1500, 3000  # pictures, each drawn anew
EXITS = (1, 3, 5, 7)  # behind these blocks
UNSURE = (0.0, 0.01, 0.02, 0.05)  # of the pixels need not be sure
ALLOWED, CONFIDENCE = 0.01, 0.95
THRESHOLDS = np.concatenate([[1.01], 1 - np.geomspace(1e-4, 0.5, 60)])  # of sureness, the strictest first


@dataclass(frozen=True)
class Scenes:
    """Pictures, and the label of every pixel."""

    pictures: Tensor
    labels: Tensor

    @classmethod
    def drawn(cls, count: int, seed: int) -> "Scenes":
        images, names = load_digits(return_X_y=True)
        images = images.reshape(-1, 8, 8) / 16
        random = np.random.default_rng(seed)
        half = np.arange(len(images)) % 2 == (0 if seed == 0 else 1)  # of training and of all else: other digits
        chosen, grounds = np.flatnonzero(half), random.normal(0, NOISE, (count, SIDE, SIDE))
        labels = np.zeros((count, SIDE, SIDE), np.int64)
        for ground, marks in zip(grounds, labels, strict=True):
            for _ in range(random.integers(1, MOST_DIGITS + 1)):
                digit, (top, left) = random.choice(chosen), random.integers(0, SIDE - 8, 2)
                place = slice(top, top + 8), slice(left, left + 8)
                ink = images[digit] > 0.3
                ground[place] += images[digit]
                marks[place][ink] = names[digit] + 1
        return cls(torch.from_numpy(grounds).float()[:, None], torch.from_numpy(labels))


def measure(steps: int = STEPS, exit_steps: int = EXIT_STEPS) -> dict[str, float]:
    torch.manual_seed(0)
    learnt = Scenes.drawn(4000, seed=0)
    backbone = Backbone(NUM_LABELS)
    _train(backbone, lambda rows: [backbone(learnt.pictures[rows])], learnt, steps)
    backbone.eval().requires_grad_(False)
    exits = [Exit(backbone, block) for block in EXITS]

    def labelled(rows: Tensor) -> list[Tensor]:
        states = list(backbone.features(learnt.pictures[rows]))
        return [each(states[each.block], (SIDE, SIDE)) for each in exits]

    _train(nn.ModuleList(exits), labelled, learnt, exit_steps)
    for each in exits:
        each.eval()
    with torch.inference_mode():
        costs = Costs.of(backbone, exits, learnt.pictures[:1])
        parts = [Labelled.of(backbone, exits, Scenes.drawn(*part)) for part in ((SHAPE, 1), (TEST, 2), (OTHERS, 3))]
    return dict(_figures(costs, *parts))


def _train(module: nn.Module, labelled: Callable[[Tensor], list[Tensor]], scenes: Scenes, steps: int) -> None:
    module.train()
    optimiser = torch.optim.AdamW(module.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in show(range(steps), "training"):
        rows = torch.randint(len(scenes.labels), (BATCH,))
        loss = torch.stack([functional.cross_entropy(logits, scenes.labels[rows]) for logits in labelled(rows)]).sum()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()


@dataclass(frozen=True)
class Labelled:
    """Exits + 1 x pictures x pixels: what is answered, the full network last; how sure; and the labels."""

    labelled: Indices
    sure: Floats
    labels: Indices

    @classmethod
    def of(cls, backbone: Backbone, exits: Sequence[Exit], scenes: Scenes) -> "Labelled":
        labelled, sure = list[Tensor](), list[Tensor]()
        for some in torch.split(scenes.pictures, 250):
            states = list(backbone.features(some))
            logits = [*(each(states[each.block], (SIDE, SIDE)) for each in exits), backbone(some)]
            best = torch.stack([each.softmax(dim=1) for each in logits]).flatten(3).max(dim=2)
            labelled.append(best.indices)
            sure.append(best.values)
        labels = scenes.labels.flatten(1).numpy()
        return cls(torch.cat(labelled, dim=1).numpy(), torch.cat(sure, dim=1).double().numpy(), labels)

    def table(self, unsure: float, costs: Floats) -> ExitTable:
        """Who would leave where, if so many pixels need not be sure: losses are shares of a picture's pixels."""
        few = int(unsure * self.sure.shape[2])
        least = np.partition(self.sure[:-1], few, axis=2)[:, :, few]  # all but so few are at least so sure
        first = np.array([np.searchsorted(-THRESHOLDS, -each) for each in least]).astype(np.uint8)
        agreed = (self.labelled == self.labelled[-1]).mean(axis=2).astype(np.float32)
        right = (self.labelled == self.labels).mean(axis=2).astype(np.float32)
        nothing = np.zeros(self.labelled.shape[:2], np.uint16)
        return ExitTable(THRESHOLDS, first, right, nothing, nothing[-1].astype(np.int64), costs, None, agreed)

    def mean_iou(self, places: Indices) -> float:
        """The mean over labels of intersection over union, where pictures leave at these exits."""
        labelled, labels = self.labelled[places, np.arange(len(places))].ravel(), self.labels.ravel()
        both = np.bincount(labels * NUM_LABELS + labelled, minlength=NUM_LABELS**2).reshape(NUM_LABELS, NUM_LABELS)
        return float((np.diag(both) / (both.sum(axis=0) + both.sum(axis=1) - np.diag(both))).mean())


@dataclass(frozen=True)
class OpenExits:
    """Exits that are open, how many pixels need not be sure, and what pictures cost that leave at each of all exits."""

    opened: tuple[int, ...]
    unsure: float
    costs: Floats

    def evidence(self, shape: Labelled, test: Labelled) -> Evidence:
        made, tested = (seen.table(self.unsure, self.costs) for seen in (shape, test))
        return Evidence(made, tested, "agreement", ALLOWED, CONFIDENCE)


def costs_of(costs: Costs, opened: Sequence[int]) -> Floats:
    """The share of the network's multiplications that are done when a picture leaves at each exit, and at the end."""
    whole, before = sum(costs.blocks) + costs.head, np.cumsum(costs.blocks)
    looked = np.cumsum([costs.exits[each] if each in opened else 0 for each in range(len(EXITS))])
    at_exits = [before[block] + looked[number] for number, block in enumerate(EXITS)]
    result: Floats = np.array([*at_exits, whole + looked[-1]]) / whole
    return result


def _figures(costs: Costs, shape: Labelled, test: Labelled, others: Labelled) -> Iterator[tuple[str, float]]:
    whole = sum(costs.blocks) + costs.head
    for number, block in enumerate(EXITS):
        yield f"exit_cost_{block}", costs.exits[number] / whole
        yield f"exit_pixels_agreed_{block}", float((others.labelled[number] == others.labelled[-1]).mean())
    at_the_end = np.full(len(others.labels), len(EXITS))
    yield "pixels_right_full", float((others.labelled[-1] == others.labels).mean())
    yield "mean_iou_full", others.mean_iou(at_the_end)
    hoped = [(_hoped(each, shape, test), each) for each in _choices(costs)]
    for most, name in ((1, "one_exit"), (2, "two_exits"), (len(EXITS), "any_exits")):
        _, chosen = min((each for each in hoped if len(each[1].opened) <= most), key=lambda each: each[0])
        evidence, table = chosen.evidence(shape, test), others.table(chosen.unsure, chosen.costs)
        places = table.places(evidence.proven_candidates(chosen.opened, chosen.costs))
        yield f"cost_{name}", table.cost(places)
        yield f"pixels_agreed_{name}", float(table.agrees[places, np.arange(len(places))].mean())
        yield f"mean_iou_{name}", others.mean_iou(places)
        yield f"stayed_{name}", float((places == len(EXITS)).mean())
        yield f"opened_{name}", float(len(chosen.opened))


def _choices(costs: Costs) -> Iterator[OpenExits]:
    sets = chain.from_iterable(combinations(range(len(EXITS)), count) for count in range(1, len(EXITS) + 1))
    for opened in sets:
        for unsure in UNSURE:
            yield OpenExits(opened, unsure, costs_of(costs, opened))


def _hoped(choice: OpenExits, shape: Labelled, test: Labelled) -> float:
    """The cost as far as the pictures tell that may be asked again and again."""
    evidence = choice.evidence(shape, test)
    return evidence.shape.cost(evidence.shape.places(evidence.likely_candidates(choice.opened, choice.costs)))


assert max(EXITS) < NUM_BLOCKS - 1
