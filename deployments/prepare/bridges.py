"""Makes the exits of networks that label pixels: bridges to a head of their own (PAME, papers of Bhatti et al.).

A head reads features of all regions of a network; behind an earlier block the later ones are missing. A bridge has the
first block of each later region and a copy of the head, which begin as the network's own. They are trained on frozen
features, towards labels or else towards the full network's map. A picture leaves where at most a number of its pixels
is not sure. Logits of all pixels of all pictures would not fit into memory, so pictures are read a few at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.deployments.exits import Policy
from isobatch.deployments.models.ramps import policy_at
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.prepare.entities import of_texts
from isobatch.deployments.prepare.features import Features, Floats
from isobatch.deployments.prepare.measuring import (
    PrepareOptions,
    RampLogits,
    TrainedRamps,
    choose_of_parts,
    rules_of,
)
from isobatch.deployments.prepare.sample import Indices, Sample
from isobatch.deployments.prepare.thresholds import calibration_error, replay
from isobatch.deployments.prepare.training import keep_best
from isobatch.deployments.progress import show
from isobatch.profiles.exit_table import ExitTable

UNSURE = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)  # shares of pixels that need not be sure, from which the best is chosen
HELD = 0.25  # of the training part: a bridge does not learn from it, and thresholds are ordered by it
EPOCHS, EPOCHS_WITHOUT_GAIN = 40, 3
BATCH, LEARNING_RATE = 16, 2e-3  # pictures per step of Adam
AT_ONCE = 8  # pictures whose logits are in memory at the same time
CALIBRATED_BY = 20_000  # pixels


@dataclass(frozen=True)
class Pictures:
    """The pooled states of pictures behind each block, the full network's logits, and the labels of all pixels."""

    features: Features
    labels: Indices | None  # None: the full network's answers are the labels
    num_labels: int
    device: torch.device

    @property
    def pixels(self) -> int:
        """Of a picture's map."""
        return int(self.features.logits.shape[1]) // self.num_labels

    def pooled(self, block: int, rows: Indices) -> Tensor:
        return self._on_device(self.features.pooled[block][rows])

    def head(self, rows: Indices) -> Tensor:
        return self._on_device(self.features.logits[rows]).reshape(-1, self.num_labels)

    def truth(self, rows: Indices) -> Tensor:
        """One-hot; no label where a pixel has none."""
        numbers = self.head(rows).argmax(dim=1) if self.labels is None else self._on_device(self.labels[rows]).ravel()
        return nn.functional.one_hot(numbers + 1, self.num_labels + 1)[:, 1:].float()

    def targets(self, rows: Indices) -> Tensor:
        return self.head(rows).softmax(dim=1) if self.labels is None else self.truth(rows)

    def logits(self, bridges: Sequence[nn.Module], rows: Indices) -> RampLogits:
        ramps = torch.stack([bridge(self.pooled(block, rows)) for block, bridge in enumerate(bridges)])
        return RampLogits(ramps.cpu(), self.head(rows).cpu(), self.truth(rows).cpu())

    def _on_device(self, array: Floats | Indices) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)


@dataclass(frozen=True)
class BridgeRows:
    """The pictures from which the bridge behind a block learns, or by which it is judged."""

    pictures: Pictures
    block: int
    rows: Indices

    def loss(self, bridge: nn.Module) -> Tensor:
        return torch.stack([self.loss_of(bridge, some) for some in _parts(self.rows, BATCH)]).mean()

    def loss_of(self, bridge: nn.Module, rows: Indices) -> Tensor:
        logits = bridge(self.pictures.pooled(self.block, rows))
        return nn.functional.cross_entropy(logits, self.pictures.targets(rows))

    def epochs(self, bridge: nn.Module) -> Iterator[None]:
        optimiser = torch.optim.AdamW(bridge.parameters(), lr=LEARNING_RATE)
        for _ in range(EPOCHS):
            bridge.train()
            for rows in _parts(self.rows[torch.randperm(len(self.rows)).numpy()], BATCH):
                optimiser.zero_grad()
                torch.autograd.backward(self.loss_of(bridge, rows))
                optimiser.step()
            bridge.eval()
            yield


def make_bridges(model: TorchModel, features: Features, sample: Sample, options: PrepareOptions) -> TrainedRamps:
    """Bridges behind every block but the last, calibrated and tested."""
    pictures = Pictures(features, sample.labels, model.num_labels, model.device)
    train = np.random.default_rng(options.seed).permutation(sample.parts.train)
    held, learn = np.split(train, [int(HELD * len(train))])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        blocks = show(range(model.num_blocks - 1), "bridges")
        bridges = [_trained(model, block, pictures, learn, held) for block in blocks]
    shape = np.concatenate((held, sample.parts.calibrate))
    with torch.inference_mode():
        temperatures = _some_pixels(pictures, bridges, shape).temperatures()
        policy, parts = policy_at(options.policy), (shape, sample.parts.test)
        of_shape, of_test = (picture_tables(pictures, bridges, temperatures, each, policy) for each in parts)
        tested = choose_of_parts(of_shape, of_test.__getitem__, options)
        before = _some_pixels(pictures, bridges, sample.parts.test)
    after = before.calibrated(temperatures)
    errors = [
        (calibration_error(raw, before.truth), calibration_error(made, before.truth))
        for raw, made in zip(before.heads(), after.heads(), strict=True)
    ]
    rules = rules_of(replace(options, ramp="bridge"), temperatures, tested, errors)
    return TrainedRamps(rules, {block: bridge.cpu() for block, bridge in enumerate(bridges)}, tested.evidence)


def _trained(model: TorchModel, block: int, pictures: Pictures, learn: Indices, held: Indices) -> nn.Module:
    assert model.anatomy.bridge, "This is a bug: a network that labels pixels has bridges."
    bridge = model.anatomy.bridge(block).to(pictures.device)
    judge = BridgeRows(pictures, block, held)
    keep_best(bridge, BridgeRows(pictures, block, learn).epochs(bridge), judge, EPOCHS_WITHOUT_GAIN)
    return bridge.eval().requires_grad_(False)


def _some_pixels(pictures: Pictures, bridges: Sequence[nn.Module], rows: Indices) -> RampLogits:
    """Pixels of all these pictures, as many as calibration needs."""
    each = -(-CALIBRATED_BY // len(rows))
    parts, random = [], np.random.default_rng(0)
    for some in _parts(rows, AT_ONCE):
        made = pictures.logits(bridges, some)
        labelled = torch.nonzero(made.truth.sum(dim=1)).ravel().numpy()
        kept = random.permutation(labelled)[: each * len(some)]
        parts.append(RampLogits(made.ramps[:, kept], made.head[kept], made.truth[kept]))
    return parts[0].joined(parts[1:])


def picture_tables(
    pictures: Pictures, bridges: Sequence[nn.Module], temperatures: Sequence[float], rows: Indices, policy: Policy
) -> dict[int, ExitTable]:
    """The table of these pictures for each number of pixels that need not be sure; losses are shares of pixels."""
    costs = [(block + 1) / (len(bridges) + 1) for block in range(len(bridges))]
    made: dict[int, list[ExitTable]] = {int(share * pictures.pixels): [] for share in UNSURE}
    for some in show(_parts(rows, AT_ONCE), "thresholds"):
        logits = pictures.logits(bridges, some).calibrated(temperatures)
        of_pixels = replay(policy, logits.ramps, logits.head, logits.truth, costs)
        labelled = logits.truth.sum(dim=1).reshape(len(some), -1).mean(dim=1).numpy()
        for most, each in made.items():
            table = of_texts(of_pixels, np.full(len(some), pictures.pixels), most)
            right = np.where(labelled > 0, table.right / np.maximum(labelled, 1 / pictures.pixels), 1.0)
            each.append(replace(table, right=right.astype(np.float32)))
    return {most: _joined(each) for most, each in made.items()}


def _joined(tables: Sequence[ExitTable]) -> ExitTable:
    names = ("first", "right", "labels", "truth", "agreed")
    return replace(tables[0], **{name: np.concatenate([getattr(each, name) for each in tables], -1) for name in names})


def _parts(rows: Indices, count: int) -> list[Indices]:
    return [rows[start : start + count] for start in range(0, len(rows), count)]
