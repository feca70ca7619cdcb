"""Makes ramps for networks with one output: they predict the score, and its distance from the last block's score.

These distances are calibrated on rows outside the ramp's training data: at each depth they grow until they cover
SURE_SHARE of the rows. Thresholds and the promise are then chosen as for labels (measuring.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor, nn

from isobatch.deployments.exits import near, near_number
from isobatch.deployments.prepare.features import Features, Floats
from isobatch.deployments.prepare.measuring import PrepareOptions, TrainedRamps, rules_of, tested_outcome
from isobatch.deployments.prepare.sample import Indices, Sample
from isobatch.deployments.prepare.thresholds import replay
from isobatch.deployments.prepare.training import distances_of, head_logits, train_scores
from isobatch.deployments.progress import busy
from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import ExitTable

SURE_SHARE = 0.95  # of the last block's scores that lie within the predicted distance


@dataclass(frozen=True)
class ScoreRange:
    """The range of a network's scores. A score's place in it is from 0 to 1."""

    low: float = 0.0
    width: float = 1.0

    def places(self, scores: NDArray[Any]) -> Floats:
        return ((scores - self.low) / self.width).astype(np.float32)


def true_scores(labels: NDArray[Any], lists: Indices | None, are_numbers: bool) -> NDArray[Any]:
    """The scores that a network should give. The most relevant document should get 1, as a probability.

    >>> true_scores(np.array([0, 3]), np.array([0, 0]), are_numbers=False).tolist()
    [0.0, 1.0]
    """
    return labels if lists is None or are_numbers else labels / labels.max()


def range_of_scores(full: NDArray[Any], truth: NDArray[Any] | None, are_numbers: bool) -> ScoreRange:
    """From 0 to 1, or from the least to the greatest number: of the true ones, or else of those that are given.

    >>> range_of_scores(np.array([1.5, 3.0]), np.array([1, 5]), are_numbers=True)
    ScoreRange(low=1.0, width=4.0)
    """
    if not are_numbers:
        return ScoreRange()
    known = full if truth is None else truth
    if not (width := float(np.ptp(known))):
        raise UserError("the network gives every input the same score: there is nothing to tell apart")
    return ScoreRange(float(known.min()), width)


def score_table(
    outputs: Tensor, sample: Sample, rows: Indices, full: Floats, truth: Floats, tolerance: float
) -> ExitTable:
    """The exit table of these rows. `outputs`: ramps x rows x 2, as `near` takes them. `full` and `truth`: the scores
    that the network gives and that it should give to all rows of the sample, as places in their range."""
    count, policy = len(rows), near_number if sample.task.numbers else near
    costs = [(block + 1) / (len(outputs) + 1) for block in range(len(outputs))]
    table = replay(policy, outputs, torch.zeros(count, 1), torch.zeros(count, 1), costs)
    logits = outputs[:, :, 0].numpy()
    scores = np.concatenate((logits if sample.task.numbers else expit(logits), full[None, rows])).astype(np.float32)
    right = 1 - np.abs(scores - truth[rows]).clip(max=1.0)
    agreed = (np.abs(scores - scores[-1]) <= tolerance).astype(np.float32)
    table = replace(table, right=right, agreed=agreed, scores=scores)
    if sample.lists is None or sample.labels is None:
        return table
    return replace(table, lists=sample.lists[rows], relevance=sample.labels[rows].astype(np.float32))


def make_score_ramps(features: Features, sample: Sample, options: PrepareOptions) -> TrainedRamps:
    """Ramps that are trained, calibrated and tested."""
    numbers, parts = sample.task.numbers, sample.parts
    options = replace(options, policy=f"{near.__module__}:{(near_number if numbers else near).__name__}")
    given = features.logits[:, 0] if numbers else expit(features.logits[:, 0])
    right = None if sample.labels is None else true_scores(sample.labels, sample.lists, numbers)
    scale = range_of_scores(given, right, numbers)
    full = scale.places(given)
    truth = full if right is None else scale.places(right)
    heads = train_scores(features.pooled, full[:, None], parts.train, numbers, options.seed)
    calibrate = head_logits(heads, features.pooled, parts.calibrate)
    held_out = [(parts.calibrate, calibrate), *_cross_fitted(features, full, sample, options)]
    test = head_logits(heads, features.pooled, parts.test)
    with busy("choosing distances and thresholds"):
        rows, shape = np.concatenate([each for each, _ in held_out]), torch.cat([each for _, each in held_out], dim=1)
        widths = _widths(shape, full[rows], numbers)
        shape, test = (torch.stack((each[..., 0], each[..., 1] + widths[:, None]), dim=2) for each in (shape, test))
        shaping, judging = (
            score_table(outputs, sample, chosen, full, truth, options.tolerance)
            for outputs, chosen in ((shape, rows), (test, parts.test))
        )
        evidence = Evidence(shaping, judging, options.metric, options.max_accuracy_loss, options.confidence)
        tested = tested_outcome(evidence, evidence.prepared)
    rules = rules_of(options, [1.0] * (len(heads) + 1), tested, [(None, None)] * len(heads))
    rules = rules.model_copy(update={"tolerance": options.tolerance * scale.width})
    for head, width in zip(heads, widths.tolist(), strict=True):
        _fit(head, scale, width)
    return TrainedRamps(rules, dict(enumerate(heads)), evidence)


def _cross_fitted(
    features: Features, full: Floats, sample: Sample, options: PrepareOptions
) -> Iterator[tuple[Indices, Tensor]]:
    """The rows of each half of the training part, and what ramps make of them that learn from the other half.

    A list of documents is in one half.
    """
    train = sample.parts.train
    lists = train if sample.lists is None else sample.lists[train]
    chosen = np.random.default_rng(options.seed).permutation(np.unique(lists))
    first = np.isin(lists, chosen[: len(chosen) // 2])
    for learned in (first, ~first):
        heads = train_scores(
            features.pooled, full[:, None], train[learned], sample.task.numbers, options.seed, "ramps of a half"
        )
        yield train[~learned], head_logits(heads, features.pooled, train[~learned])


def _widths(outputs: Tensor, full: Floats, are_numbers: bool) -> Tensor:
    """For each ramp the logarithm of the factor with which its distances cover SURE_SHARE of these rows."""
    logs = []
    for each in outputs:
        far = distances_of(each[:, :1], torch.from_numpy(full[:, None]), are_numbers)[:, 0]
        logs.append(np.log(np.quantile(far / np.exp(each[:, 1].numpy()), SURE_SHARE) + 1e-9))
    return torch.tensor(np.array(logs, np.float32))


@torch.no_grad()
def _fit(head: nn.Module, scale: ScoreRange, width: float) -> None:
    """Widen the distances of a ramp, and turn its places in the range into scores."""
    assert isinstance(head, nn.Linear), "This is a bug: a ramp of a score is one linear layer."
    head.bias[1] += width
    head.weight[0] *= scale.width
    head.bias[0] = head.bias[0] * scale.width + scale.low
