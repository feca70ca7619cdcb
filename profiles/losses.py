"""The loss of inputs by leaving early, in the metric of the promise, and the confidence in it.

- accuracy: right answers, of all inputs. agreement: answers that are the full network's.
- worst-class: right answers among the inputs of one class, for the class that loses most. Each class has its own test,
  and all tests must pass. A class that loses too much fails its own test often enough, so tests need not be stricter.
- mean-iou: a picture's intersection over union, as the mean of the labels that it has. Every picture counts alike, so
  that the loss is a mean over inputs; a score over the pixels of all pictures would depend on few pictures of a rare
  label, and have no valid test for few of them.
- absolute-error: how much further scores are from the true ones, as a share of their range.
- ndcg@10: of lists of documents, each of which counts as one input (profiles/ranking.py).
- macro-f1, mcc, micro-f1: a score of all inputs together, which is no mean over them. Its loss and standard error come
  from the first-order influence of each input on the score, which is valid only for many inputs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Metric = Literal[
    "accuracy", "agreement", "worst-class", "macro-f1", "mcc", "micro-f1", "mean-iou", "absolute-error", "ndcg@10"
]
Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
Labels = NDArray[np.integer[Any]]

NAMES: Mapping[Metric, str] = {
    "accuracy": "accuracy",
    "agreement": "agreement",
    "worst-class": "any class's recall",
    "macro-f1": "macro-F1",
    "mcc": "MCC",
    "micro-f1": "micro-F1",
    "mean-iou": "mean IoU",
    "absolute-error": "the scores' range in absolute error",
    "ndcg@10": "NDCG@10",
}
MICRO_F1: Metric = "micro-f1"  # of all labels of all inputs, where an input may have several
MEAN_IOU: Metric = "mean-iou"
ABSOLUTE_ERROR: Metric = "absolute-error"
NDCG: Metric = "ndcg@10"
# Metrics that are means over all inputs; the others count by classes or lists.
OF_ALL: tuple[Metric, ...] = ("accuracy", "agreement", MEAN_IOU, ABSOLUTE_ERROR)
ROUNDING = 1e-9  # tolerance for rounding errors in comparisons of losses
STEADY = 1.96  # standard errors of a 95 % interval


@dataclass(frozen=True)
class Interval:
    """A mean, and the half-width of its 95 % interval."""

    mean: float
    within: float

    @classmethod
    def of(cls, mean: float, error: float) -> "Interval":
        return cls(float(mean), float(STEADY * error))

    def __str__(self) -> str:
        """
        >>> str(Interval(0.123, 0.0149))
        '12.3 ± 1.5 %'
        """
        return f"{100 * self.mean:.1f} ± {100 * self.within:.1f} %"


@dataclass(frozen=True)
class ScoreFigures:
    """A score of the full network and of the network with exits, and the loss by exits."""

    full: Interval
    exits: Interval
    lost: Interval


@dataclass(frozen=True)
class EntityF1(ScoreFigures):
    """The F1 score of entities, and their number."""

    entities: int

    def __str__(self) -> str:
        """
        >>> print(EntityF1(Interval(0.9, 0.01), Interval(0.89, 0.01), Interval(0.01, 0.005), 1200))
        1,200 entities: F1 90.0 ± 1.0 % in full, 89.0 ± 1.0 % with exits, lost by exits 1.0 ± 0.5 %
        """
        return f"{self.entities:,} entities: F1 {self.full} in full, {self.exits} with exits, lost by exits {self.lost}"


@dataclass(frozen=True)
class ListNdcg(ScoreFigures):
    """The NDCG@10 of lists of documents, and their number."""

    lists: int

    @classmethod
    def of(cls, full: Floats, exits: Floats) -> "ListNdcg":
        """From the NDCG@10 of each list."""
        lost = mean_loss(full - exits)
        in_full, with_exits = (Interval.of(each.mean(), each.std() / len(each) ** 0.5) for each in (full, exits))
        return cls(in_full, with_exits, Interval.of(lost.mean, lost.error), len(full))

    def __str__(self) -> str:
        """
        >>> print(ListNdcg(Interval(0.9, 0.01), Interval(0.89, 0.01), Interval(0.01, 0.005), 1200))
        1,200 lists: NDCG@10 90.0 ± 1.0 % in full, 89.0 ± 1.0 % with exits, lost by exits 1.0 ± 0.5 %
        """
        return f"{self.lists:,} lists: NDCG@10 {self.full} in full, {self.exits} with exits, lost by exits {self.lost}"


@dataclass(frozen=True)
class Loss:
    """The mean loss of inputs by leaving early, with gains subtracted; or an array of such means.

    `weight`: the most that one input can lose, if it is not 1: a rare class weighs more in some scores.
    """

    mean: Any
    mean_square: Any
    count: int
    weight: float = 1.0

    @property
    def error(self) -> Any:
        """The standard error. It assumes one more loss than was measured: no loss in 50 inputs proves little."""
        unseen = self.weight**2 / self.count
        return np.sqrt((np.maximum(self.mean_square - self.mean**2, 0.0) + unseen) / self.count)

    @property
    def counted(self) -> int:
        """The number of inputs of weight 1 that would show as much."""
        return max(1, int(self.count / self.weight + ROUNDING))

    def within(self, max_loss: float, margin: float) -> Any:
        return self.mean + margin * self.error <= max_loss + ROUNDING


def mean_loss(lost: Floats) -> Loss:
    """The mean of the losses of single inputs: 1, 0, or -1 for a gain."""
    return Loss(float(lost.mean()), float((lost**2).mean()), len(lost))


def picture_iou(truth: Labels, answers: Labels, num_labels: int) -> Floats:
    """The mean IoU of each picture over the labels that it has. Both are pictures x pixels; in `truth` -1 is no label.

    >>> picture_iou(np.array([[0, 0, 1, -1], [-1, -1, -1, -1]]), np.array([[0, 1, 1, 1], [0, 1, 2, 2]]), 3).tolist()
    [0.5, 1.0]
    """
    labelled, first = truth >= 0, num_labels * np.arange(len(truth))[:, None]

    def counts(labels: Labels, where: NDArray[np.bool_]) -> Indices:
        return np.bincount((first + labels)[where], minlength=len(truth) * num_labels).reshape(-1, num_labels)

    there, both = counts(truth, labelled), counts(truth, labelled & (answers == truth))
    ratios = np.where(there > 0, both / np.maximum(there + counts(answers, labelled) - both, 1), 0.0)
    has = (there > 0).sum(axis=1)
    return np.where(has > 0, ratios.sum(axis=1) / np.maximum(has, 1), 1.0)


def losses_by_class(lost: Floats, truth: Labels) -> tuple[Loss, ...]:
    """The mean loss of each class that occurs."""
    return tuple(mean_loss(lost[truth == label]) for label in np.unique(truth))


def balancing(truth: Labels) -> Floats:
    """Weights of the inputs that give every class the same total weight; their mean is 1."""
    counts = np.bincount(truth)
    weights: Floats = len(truth) / (np.count_nonzero(counts) * counts[truth])
    return weights


@dataclass(frozen=True)
class ClassScore:
    """A score, and the amount by which one input raises it, by the input's class and its answer (class x answer)."""

    value: float
    influence: Floats


def score_loss(metric: Metric, truth: Labels, full: Labels, exits: Labels) -> Loss:
    """The loss of a score by the answers with exits, against those of the full network."""
    score, size = SCORES[metric], 1 + int(max(truth.max(), full.max(), exits.max()))
    before, after = (score(_shares(truth, answers, size)) for answers in (full, exits))
    drifts = before.influence[truth, full] - after.influence[truth, exits]
    mean = before.value - after.value
    most = (before.influence.diagonal() - before.influence.min(axis=1))[np.unique(truth)].max()
    most = most or len(truth)  # of one class, or one answer, a single other input may decide the score
    return Loss(mean, mean**2 + float(drifts.var()), len(truth), _rounded_up(float(most)))


def _rounded_up(weight: float) -> float:
    """To a power of 1.1, and at least 1: each different weight needs its own margin, which takes 0.5 s to compute.

    >>> _rounded_up(0.3), round(_rounded_up(1.2), 6)
    (1.0, 1.21)
    """
    return float(1.1 ** math.ceil(math.log(max(weight, 1.0), 1.1) - ROUNDING))


def scored(metric: Metric, truth: Labels, answers: Labels) -> tuple[float, float]:
    score = SCORES[metric](_shares(truth, answers, 1 + int(max(truth.max(), answers.max()))))
    return score.value, float(score.influence[truth, answers].std() / len(truth) ** 0.5)


def _shares(truth: Labels, answers: Labels, size: int) -> Floats:
    """Class x answer: the share of all inputs that are of this class and got this answer."""
    pairs = truth.astype(np.int64) * size + answers
    shares: Floats = np.bincount(pairs, minlength=size * size).reshape(size, size) / len(truth)
    return shares


def macro_f1(shares: Floats) -> ClassScore:
    """The mean F1 of the classes that occur.

    >>> round(macro_f1(np.array([[0.4, 0.1], [0.1, 0.4]])).value, 9)
    0.8
    """
    occurs = shares.sum(axis=1) > 0
    both = np.where(occurs, shares.sum(axis=0) + shares.sum(axis=1), 1.0)
    f1 = np.where(occurs, 2 * shares.diagonal() / both, 0.0)
    per_input = np.where(occurs, f1 / both, 0.0)
    influence = np.diag(np.where(occurs, 2 / both, 0.0)) - per_input[:, None] - per_input[None, :]
    return ClassScore(float(f1.sum() / occurs.sum()), influence / occurs.sum())


def mcc(shares: Floats) -> ClassScore:
    """Matthews' correlation of answers and classes (in Gorodkin's form for more than two classes).

    >>> round(mcc(np.array([[0.4, 0.1], [0.1, 0.4]])).value, 9)
    0.6
    """
    truth, answers = shares.sum(axis=1), shares.sum(axis=0)
    right, chance = float(shares.trace()), float(truth @ answers)
    spread = (1 - truth @ truth) * (1 - answers @ answers)
    if spread <= 0:  # one class, or one answer: there is nothing to correlate
        return ClassScore(0.0, np.zeros_like(shares))
    value = (right - chance) / np.sqrt(spread)
    numerator = np.eye(len(shares)) - right - (answers[:, None] - chance) - (truth[None, :] - chance)
    true_width = (truth @ truth - truth)[:, None] / (1 - truth @ truth)
    answer_width = (answers @ answers - answers)[None, :] / (1 - answers @ answers)
    width = true_width + answer_width
    return ClassScore(float(value), numerator / np.sqrt(spread) - value * width)


SCORES: Mapping[str, Callable[[Floats], ClassScore]] = {"macro-f1": macro_f1, "mcc": mcc}
# Metrics whose confidence is valid for many inputs.
APPROXIMATE: tuple[str, ...] = (*SCORES, MICRO_F1, MEAN_IOU, ABSOLUTE_ERROR, NDCG)


@dataclass(frozen=True)
class PooledF1:
    """F1 over the parts of inputs, such as labels or entities.

    `right`: how many of those that are answered are right, input by input; `both`: how many are answered, plus how many
    there are.
    """

    right: Floats
    both: Floats

    @property
    def value(self) -> float:
        """
        >>> PooledF1(np.array([1.0, 0.0]), np.array([3.0, 1.0])).value
        0.5
        """
        total = float(self.both.sum())
        return 2 * float(self.right.sum()) / total if total else 1.0

    @property
    def influence(self) -> Floats:
        """The amount by which each input raises F1, in units of an average input's largest possible influence."""
        influence: Floats = (2 * self.right - self.value * self.both) / (self.both.mean() or 1.0)
        return influence

    def drift(self, exits: "PooledF1") -> Floats:
        """The loss of each input by the answers with exits, to first order: at this F1."""
        lost: Floats = 2 * (self.right - exits.right) - self.value * (self.both - exits.both)
        return lost / (self.both.mean() or 1.0)

    def loss(self, exits: "PooledF1") -> Loss:
        """The loss by answers with exits. Inputs with more parts weigh more, so all count as fewer equal ones."""
        mean, drift = self.value - exits.value, self.influence - exits.influence
        some = float(self.both.mean())
        alike = float((self.both**2).mean()) / some**2 if some else len(self.both)  # without a part, nothing is shown
        return Loss(mean, mean**2 + float(drift.var()), len(drift), _rounded_up(alike))
