"""Train the ramps of all blocks at once, on features that do not change: the network's own weights are not touched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deployments.models.ramps import RampKind, make_head
from deployments.prepare.features import Floats
from deployments.prepare.progress import show


@dataclass(frozen=True)
class Recipe:
    """How ramps are trained. The defaults are what `experiments/prepare` measured best on texts and on images."""

    kind: RampKind = "light"
    epochs: int = 20
    batch: int = 256
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    seed: int = 0


def train(pooled: Sequence[Floats], targets: Floats, rows: NDArray[np.int64], recipe: Recipe) -> list[nn.Module]:
    """One head a block. `targets` are probabilities: one-hot labels, or what the network itself believes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        heads = [make_head(recipe.kind, features.shape[1], targets.shape[1]) for features in pooled]
    scales = [_standard(features, rows) for features in pooled]
    optimiser = torch.optim.AdamW(
        [weight for head in heads for weight in head.parameters()],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
    )
    steps = recipe.epochs * -(-len(rows) // recipe.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for chosen in show(_shuffled(rows, recipe), "ramps", steps):
        wanted = torch.from_numpy(targets[chosen])
        losses = [
            nn.functional.cross_entropy(head(scale(features[chosen])), wanted)
            for head, scale, features in zip(heads, scales, pooled, strict=True)
        ]
        optimiser.zero_grad()
        torch.autograd.backward(losses)
        optimiser.step()
        schedule.step()
    return [scale.folded_into(head.eval()) for head, scale in zip(heads, scales, strict=True)]


@dataclass(frozen=True)
class Scale:
    """Standardise features: zero mean, unit deviation over the training part."""

    mean: Tensor
    deviation: Tensor

    def __call__(self, features: Floats) -> Tensor:
        return (torch.from_numpy(features) - self.mean) / self.deviation

    @torch.no_grad()
    def folded_into(self, head: nn.Module) -> nn.Module:
        """The same answers from features as they are: the first linear layer absorbs the scale."""
        first = next(layer for layer in head.modules() if isinstance(layer, nn.Linear))
        first.weight.div_(self.deviation)
        first.bias.sub_(first.weight @ self.mean)
        return head.requires_grad_(False)


def _standard(features: Floats, rows: NDArray[np.int64]) -> Scale:
    mean, square = np.zeros(features.shape[1]), np.zeros(features.shape[1])
    for chosen in np.array_split(np.sort(rows), -(-len(rows) // 4096)):
        part = features[chosen].astype(np.float64)
        mean += part.sum(axis=0) / len(rows)
        square += (part**2).sum(axis=0) / len(rows)
    deviation = np.sqrt(np.maximum(square - mean**2, 0.0)) + 1e-6
    return Scale(torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(deviation.astype(np.float32)))


def _shuffled(rows: NDArray[np.int64], recipe: Recipe) -> Iterator[NDArray[np.int64]]:
    random = np.random.default_rng(recipe.seed)
    for _ in range(recipe.epochs):
        order = random.permutation(rows)
        for start in range(0, len(order), recipe.batch):
            # Sorted within the batch: the disk is read in one direction.
            yield np.sort(order[start : start + recipe.batch])


@torch.inference_mode()
def answers(heads: Sequence[nn.Module], pooled: Sequence[Floats], rows: NDArray[np.int64]) -> Tensor:
    """The logits of every ramp for these rows: ramps x rows x labels."""
    return torch.stack([head(torch.from_numpy(features[rows])) for head, features in zip(heads, pooled, strict=True)])
