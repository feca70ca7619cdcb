"""Trains a ramp after every block, on fixed features: the network's own weights are not changed.

A light ramp is a logistic regression, so L-BFGS finds the single optimum for a given penalty on large weights; the
penalty is lowered as long as that helps. DeeBERT's pooler has no single optimum: Adam trains it epoch by epoch, as long
as that helps. Progress is judged on a tenth of the rows, which no ramp learns from.

A ramp of a score is two linear layers side by side: the score, and the logarithm of how far it is from the network's.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_softmax
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from isobatch.deployments.exits import slope
from isobatch.deployments.models.ramps import RampKind, make_head
from isobatch.deployments.prepare.features import Floats
from isobatch.deployments.progress import show

# Penalties on the squares of weights, in the order in which they are tried.
PENALTIES = (1.0, 3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
ITERATIONS = 60  # iterations of L-BFGS per penalty: few, as the start is near the optimum
EPOCHS = 200  # epochs of Adam for a pooler, at most
EPOCHS_WITHOUT_GAIN = 6  # training ends after this number of epochs in a row without a gain
BATCH = 128  # rows per step of Adam
LEARNING_RATE = 1e-3  # the learning rate of Adam

Rows = NDArray[np.int64]
Doubles = NDArray[np.float64]
# What is learned: probabilities of labels that exclude each other, or of each one by itself; numbers; or the logarithm
# of distances, as that of the scale of a Laplace distribution.
Learned = Literal["labels", "each label", "numbers", "distances"]
LARGEST = 30.0  # the logarithm of the largest distance


@dataclass(frozen=True)
class TrainingRows:
    """Standardised features, and their targets."""

    features: Tensor
    targets: Tensor
    learned: Learned = "labels"

    def loss(self, head: nn.Module) -> Tensor:
        logits: Tensor = head(self.features)
        if self.learned == "each label":
            return nn.functional.binary_cross_entropy_with_logits(logits, self.targets) * logits.shape[1]
        if self.learned == "numbers":
            return nn.functional.mse_loss(logits, self.targets) / 2
        if self.learned == "distances":
            return (logits + self.targets * (-logits).clamp(max=LARGEST).exp()).mean()
        return nn.functional.cross_entropy(logits, self.targets)


def train(
    pooled: Sequence[Floats], targets: Floats, rows: Rows, kind: RampKind, seed: int = 0, what: str = "ramps",
    learned: Learned = "labels", own: Mapping[int, nn.Module] = MappingProxyType({}),
) -> list[nn.Module]:  # fmt: skip
    """One head per block. `targets`: one-hot labels, or the network's own probabilities. `what`: name of the progress.
    `own`: heads that are trained already, by their blocks.

    BLAS gets one thread: on matrices with few columns several threads wait for each other longer than they compute.
    """
    parts = _parts(rows, seed)
    with threadpool_limits(1, user_api="blas"):
        return [
            own[block] if block in own else _ramp(features, targets, parts, kind, seed, learned)
            for block, features in enumerate(show(pooled, what, len(pooled)))
        ]


def train_scores(
    pooled: Sequence[Floats], targets: Floats, rows: Rows, are_numbers: bool, seed: int = 0, what: str = "ramps"
) -> list[nn.Module]:
    """One head per block for the policies `near` and `near_number`. `targets`: the network's scores, rows x 1."""
    parts = _parts(rows, seed)
    with threadpool_limits(1, user_api="blas"):
        return [_score_ramp(each, targets, parts, are_numbers, seed) for each in show(pooled, what, len(pooled))]


def _score_ramp(features: Floats, targets: Floats, parts: tuple[Rows, Rows], are_numbers: bool, seed: int) -> nn.Module:
    score = _ramp(features, targets, parts, "light", seed, "numbers" if are_numbers else "each label")
    rows, distances = np.concatenate(parts), np.zeros_like(targets)
    outputs = score(torch.from_numpy(features[rows]))
    distances[rows] = distances_of(outputs, torch.from_numpy(targets[rows]), are_numbers)
    distance = _ramp(features, distances, parts, "light", seed, "distances")
    both = make_head("light", features.shape[1], 2)
    others = distance.state_dict()
    both.load_state_dict({name: torch.cat((each, others[name])) for name, each in score.state_dict().items()})
    return both.eval().requires_grad_(False)


@torch.inference_mode()
def distances_of(outputs: Tensor, targets: Tensor, are_numbers: bool) -> Floats:
    """How far scores are from the network's, in the units in which ramps predict it."""
    scores = outputs if are_numbers else outputs.sigmoid()
    far: Floats = ((targets - scores).abs() / (1.0 if are_numbers else slope(scores))).numpy()
    return far


def _parts(rows: Rows, seed: int) -> tuple[Rows, Rows]:
    """The rows that ramps learn from, and those by which they are judged meanwhile."""
    judging, learning = np.split(np.random.default_rng(seed).permutation(rows), [len(rows) // 10])
    return learning, judging


def _ramp(
    features: Floats, targets: Floats, parts: tuple[Rows, Rows], kind: RampKind, seed: int, learned: Learned
) -> nn.Module:
    scale = FeatureScale.of(features[parts[0]])
    learn, judge = (TrainingRows(scale(features[part]), torch.from_numpy(targets[part]), learned) for part in parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = make_head(kind, features.shape[1], targets.shape[1])
        if kind == "light":
            _keep_best(head, _lower_penalties(head, learn), judge, stages_without_gain=1)
        else:
            _keep_best(head, _epochs(head, learn), judge, EPOCHS_WITHOUT_GAIN)
    return scale.folded_into(head.eval())


def _keep_best(head: nn.Module, stages: Iterator[None], judge: TrainingRows, stages_without_gain: int) -> None:
    best, best_state, since = np.inf, head.state_dict(), 0
    for _ in stages:
        with torch.inference_mode():
            loss = float(judge.loss(head))
        since = 0 if loss < best else since + 1
        if since == 0:
            best, best_state = loss, deepcopy(head.state_dict())
        if since == stages_without_gain:
            break
    head.load_state_dict(best_state)


def _lower_penalties(head: nn.Module, learn: TrainingRows) -> Iterator[None]:
    """Train with smaller and smaller penalties. Each stage starts from the previous weights, which are close."""
    assert isinstance(head, nn.Linear), "This is a bug: a light ramp is one linear layer."
    features, targets = learn.features.numpy(), learn.targets.numpy()
    parameters = torch.cat((head.weight, head.bias[:, None]), dim=1).detach().double().numpy().ravel()
    for penalty in PENALTIES:
        arguments = (features, targets, penalty, learn.learned)
        result = minimize(penalised_loss, parameters, arguments, "L-BFGS-B", jac=True, options={"maxiter": ITERATIONS})
        parameters = result.x
        weights = torch.from_numpy(parameters.astype(np.float32)).reshape(targets.shape[1], -1)
        with torch.no_grad():
            head.weight.copy_(weights[:, :-1])
            head.bias.copy_(weights[:, -1])
        yield


def penalised_loss(
    parameters: Doubles, features: Floats, targets: Floats, penalty: float, learned: Learned = "labels"
) -> tuple[float, Doubles]:
    """The loss of a regression (for labels a logistic one) and its gradient.

    All numbers but the features are doubles, as features may fill gigabytes. This is numpy, as torch takes four times
    longer for matrices of this size.
    """
    weights = parameters.reshape(targets.shape[1], -1)
    logits = features @ weights[:, :-1].T.astype(np.float32) + weights[:, -1]
    if learned == "each label":
        wrong, missed = expit(logits) - targets, np.logaddexp(0.0, logits) - targets * logits
    elif learned == "numbers":
        wrong, missed = logits - targets, np.square(logits - targets) / 2
    elif learned == "distances":
        relative = targets * np.exp(np.minimum(-logits, LARGEST))
        wrong, missed = 1 - relative, logits + relative
    else:
        logs = log_softmax(logits, axis=1)
        wrong, missed = np.exp(logs) - targets, -targets * logs
    loss = penalty * np.square(weights[:, :-1]).sum() + missed.sum() / len(targets)
    wrong = wrong / len(targets)
    of_weights = wrong.T.astype(np.float32) @ features + 2 * penalty * weights[:, :-1]
    gradient = np.column_stack((of_weights, wrong.sum(axis=0)))
    return float(loss), gradient.ravel()


def _epochs(head: nn.Module, learn: TrainingRows) -> Iterator[None]:
    optimiser = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        for chosen in torch.split(torch.randperm(len(learn.features)), BATCH):
            optimiser.zero_grad()
            some = replace(learn, features=learn.features[chosen], targets=learn.targets[chosen])
            torch.autograd.backward(some.loss(head))
            optimiser.step()
        yield


@dataclass(frozen=True)
class FeatureScale:
    """Standardises features: zero mean and unit deviation over the rows of training."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, features: Floats) -> "FeatureScale":
        mean, deviation = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64) + 1e-6
        return cls(torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(deviation.astype(np.float32)))

    def __call__(self, features: Floats) -> Tensor:
        return (torch.from_numpy(features) - self.mean) / self.deviation

    @torch.no_grad()
    def folded_into(self, head: nn.Module) -> nn.Module:
        """A head with the same logits for unscaled features: its first linear layer includes the scale."""
        first = next(layer for layer in head.modules() if isinstance(layer, nn.Linear))
        first.weight.div_(self.deviation)
        first.bias.sub_(first.weight @ self.mean)
        return head.requires_grad_(False)


@torch.inference_mode()
def head_logits(heads: Sequence[nn.Module], pooled: Sequence[Floats], rows: Rows) -> Tensor:
    """The logits of every ramp for these rows: ramps x rows x labels."""
    return torch.stack([head(torch.from_numpy(features[rows])) for head, features in zip(heads, pooled, strict=True)])
