"""Train a ramp after every block, on features that do not change: the network's own weights are not touched.

A light ramp is a logistic regression, so L-BFGS finds the one best answer for a given penalty on large weights; the
penalty is lowered until that no longer helps. DeeBERT's pooler has no single best answer: Adam, epoch by epoch, until
that no longer helps. What helps is judged on a tenth of the rows, which no ramp learns from.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from deployments.models.ramps import RampKind, make_head
from deployments.prepare.features import Floats
from deployments.progress import show

PENALTIES = (1.0, 3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
ITERATIONS = 60
EPOCHS = 200
EPOCHS_WITHOUT_GAIN = 6
BATCH = 128
LEARNING_RATE = 1e-3

Rows = NDArray[np.int64]
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Lesson:
    """Standardised features, and their targets as probabilities."""

    features: Tensor
    targets: Tensor

    def loss(self, head: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(head(self.features), self.targets)


def train(
    pooled: Sequence[Floats], targets: Floats, rows: Rows, kind: RampKind, seed: int = 0, what: str = "ramps"
) -> list[nn.Module]:
    """One head a block. `targets` are one-hot labels, or what the network itself believes. `what` names the progress.

    BLAS gets one thread: for matrices of so few columns several wait for each other longer than they compute.
    """
    judging, learning = np.split(np.random.default_rng(seed).permutation(rows), [len(rows) // 10])
    with threadpool_limits(1, user_api="blas"):
        return [_ramp(features, targets, learning, judging, kind, seed) for features in show(pooled, what, len(pooled))]


def _ramp(features: Floats, targets: Floats, learning: Rows, judging: Rows, kind: RampKind, seed: int) -> nn.Module:
    scale = _standard(features[learning])
    learn, judge = (Lesson(scale(features[part]), torch.from_numpy(targets[part])) for part in (learning, judging))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = make_head(kind, features.shape[1], targets.shape[1])
        if kind == "light":
            _keep_best(head, _lower_penalties(head, learn), judge, stages_without_gain=1)
        else:
            _keep_best(head, _epochs(head, learn), judge, EPOCHS_WITHOUT_GAIN)
    return scale.folded_into(head.eval())


def _keep_best(head: nn.Module, stages: Iterator[None], judge: Lesson, stages_without_gain: int) -> None:
    best, kept, since = np.inf, head.state_dict(), 0
    for _ in stages:
        with torch.inference_mode():
            loss = float(judge.loss(head))
        since = 0 if loss < best else since + 1
        if since == 0:
            best, kept = loss, deepcopy(head.state_dict())
        if since == stages_without_gain:
            break
    head.load_state_dict(kept)


def _lower_penalties(head: nn.Module, learn: Lesson) -> Iterator[None]:
    """Train with ever smaller penalties; each stage starts from the weights of the one before, which are near."""
    assert isinstance(head, nn.Linear), "This is a bug: a light ramp is one linear layer."
    features, targets = learn.features.numpy(), learn.targets.numpy()
    at = torch.cat((head.weight, head.bias[:, None]), dim=1).detach().double().numpy().ravel()
    for penalty in PENALTIES:
        found = minimize(
            penalised_loss, at, (features, targets, penalty), "L-BFGS-B", jac=True, options={"maxiter": ITERATIONS}
        )
        at = found.x
        both = torch.from_numpy(at.astype(np.float32)).reshape(targets.shape[1], -1)
        with torch.no_grad():
            head.weight.copy_(both[:, :-1])
            head.bias.copy_(both[:, -1])
        yield


def penalised_loss(at: Doubles, features: Floats, targets: Floats, penalty: float) -> tuple[float, Doubles]:
    """Of a logistic regression, and its slope: in doubles but for the features, of which there may be gigabytes.

    In numpy, as torch takes four times as long for so few numbers at a time.
    """
    weights = at.reshape(targets.shape[1], -1)
    logs = log_softmax(features @ weights[:, :-1].T.astype(np.float32) + weights[:, -1], axis=1)
    loss = penalty * np.square(weights[:, :-1]).sum() - (targets * logs).sum() / len(targets)
    wrong = (np.exp(logs) - targets) / len(targets)
    slope = np.column_stack((wrong.T.astype(np.float32) @ features + 2 * penalty * weights[:, :-1], wrong.sum(axis=0)))
    return float(loss), slope.ravel()


def _epochs(head: nn.Module, learn: Lesson) -> Iterator[None]:
    optimiser = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        for chosen in torch.split(torch.randperm(len(learn.features)), BATCH):
            optimiser.zero_grad()
            torch.autograd.backward(Lesson(learn.features[chosen], learn.targets[chosen]).loss(head))
            optimiser.step()
        yield


@dataclass(frozen=True)
class Scale:
    """Standardise features: zero mean, unit deviation over the rows learnt from."""

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


def _standard(features: Floats) -> Scale:
    mean, deviation = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64) + 1e-6
    return Scale(torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(deviation.astype(np.float32)))


@torch.inference_mode()
def answers(heads: Sequence[nn.Module], pooled: Sequence[Floats], rows: Rows) -> Tensor:
    """The logits of every ramp for these rows: ramps x rows x labels."""
    return torch.stack([head(torch.from_numpy(features[rows])) for head, features in zip(heads, pooled, strict=True)])
