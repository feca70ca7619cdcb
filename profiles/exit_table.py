"""Where inputs would leave: the exits of recorded inputs at any thresholds, and the thresholds for the earliest exits.

The policy itself decided, for every ramp, candidate threshold and input, whether the input would leave. An input leaves
at the first ramp that lets it go, so the cost and loss of any set of thresholds are sums over that table.

    cost(input) = the share of the network that it runs + multiplier * its loss

For a multiplier (the worth of accuracy), thresholds are improved one ramp at a time until no change helps. The
multipliers, from high to low, give a ladder from "no input leaves" to "inputs leave as early as possible".
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.losses import (
    MEAN_IOU,
    MICRO_F1,
    NDCG,
    OF_ALL,
    ROUNDING,
    SCORES,
    Floats,
    Indices,
    Labels,
    Loss,
    Metric,
    PooledF1,
    balancing,
    losses_by_class,
    mean_loss,
    score_loss,
)
from isobatch.profiles.ranking import RankedLists

MULTIPLIERS = np.geomspace(5000.0, 0.5, 161)  # the worth of accuracy in units of the network's cost, from high to low
MAX_PASSES = 20  # passes over all ramps; a few are enough, as a pass that changes nothing is the last


@dataclass(frozen=True)
class ExitTable:
    """The exits that a policy would allow to recorded inputs.

    `candidates` are thresholds, the strictest first. `first` is ramps x inputs: the first candidate at which an input
    leaves there, or their number if it leaves at none. `right` and `labels` are ramps + 1 x inputs, the full network
    last: the probability that the answer is right (0 or 1 where the truth is known), and its label. `truth` is the true
    label of each input. `costs` is the share of the network that runs up to each ramp, and up to the end.

    `reference` has the answers of another network to compare with; None: the full network's.
    """

    candidates: Floats
    first: NDArray[np.uint8]
    right: NDArray[np.float32]
    labels: Labels
    truth: Labels
    costs: Floats
    reference: Labels | None = None
    # Where inputs have several answers each: the shares of answers that are the full network's. Then `right` are shares
    # of answers as well, and `labels` and `truth` have no meaning.
    agreed: NDArray[np.float32] | None = None
    # Where inputs have several labels each: 2 x ramps + 1 x inputs, `right` and `both` of `PooledF1`.
    marks: NDArray[np.float32] | None = None
    # Where pixels are labelled: ramps + 1 x inputs, the mean IoU of each picture.
    iou: NDArray[np.float32] | None = None
    # Where inputs have a score: ramps + 1 x inputs. If they are documents, also the list and the relevance of each.
    scores: NDArray[np.float32] | None = None
    lists: Indices | None = None
    relevance: NDArray[np.float32] | None = None

    @property
    def num_ramps(self) -> int:
        return len(self.first)

    @property
    def num_inputs(self) -> int:
        return int(self.first.shape[1])

    @property
    def strictest(self) -> Indices:
        """The candidates that let the fewest inputs leave: none, if the policy has such a threshold."""
        return np.zeros(self.num_ramps, np.int64)

    @property
    def agrees(self) -> NDArray[Any]:
        """Ramps + 1 x inputs: whether the answer is the full network's, or the share of its answers that are."""
        agrees: NDArray[Any] = self.labels == self.full_labels if self.agreed is None else self.agreed
        return agrees

    @property
    def full_labels(self) -> Labels:
        """The answers of the full network, or of the reference in its place."""
        labels: Labels = self.labels[-1] if self.reference is None else self.reference
        return labels

    @property
    def full_right(self) -> Floats:
        right = self.right[-1] if self.reference is None else self.reference == self.truth
        return np.asarray(right, np.float64)

    def of(self, chosen: Indices) -> "ExitTable":
        """The table of some inputs. Of documents these must be whole lists."""
        right, labels = self.right[:, chosen], self.labels[:, chosen]
        reference = None if self.reference is None else self.reference[chosen]
        optional: dict[str, Any] = {
            name: None if each is None else each[..., chosen] for name, each in self._optional.items()
        }
        made = replace(self, first=self.first[:, chosen], right=right, labels=labels, truth=self.truth[chosen])
        return replace(made, reference=reference, **optional)

    def only(self, ramps: list[int], costs: Floats) -> "ExitTable":
        """The same inputs with only these ramps open, at these costs."""
        rows = [*ramps, self.num_ramps]
        optional: dict[str, Any] = {
            name: each if each is None or each.ndim == 1 else each[..., rows, :]
            for name, each in self._optional.items()
        }
        made = replace(self, first=self.first[ramps], right=self.right[rows], labels=self.labels[rows])
        return replace(made, costs=costs[rows], **optional)

    @property
    def _optional(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPTIONAL}

    def places(self, chosen: Indices) -> Indices:
        """The ramp at which each input leaves with this candidate at each ramp, or the number of ramps if at none."""
        if not self.num_ramps:
            return np.zeros(self.num_inputs, np.int64)
        leaving = self.first <= chosen[:, None]
        return np.where(leaving.any(axis=0), leaving.argmax(axis=0), self.num_ramps)

    def cost(self, places: Indices) -> float:
        return float(self.costs[places].mean())

    def answers(self, places: Indices) -> Labels:
        labels: Labels = self.labels[places, np.arange(self.num_inputs)]
        return labels

    def pooled(self, places: Indices) -> PooledF1:
        """The labels of inputs that leave at these ramps."""
        assert self.marks is not None, "This is a bug: these inputs have one label each."
        right, both = self.marks[:, places, np.arange(self.num_inputs)].astype(np.float64)
        return PooledF1(right, both)

    @property
    def ranked(self) -> RankedLists:
        assert self.lists is not None, "This is a bug: these inputs are no documents."
        assert self.relevance is not None, "This is a bug: documents have a relevance."
        return RankedLists(self.lists, self.relevance)

    def ndcg(self, places: Indices) -> Floats:
        """The NDCG@10 of each list, if its documents leave at these ramps."""
        assert self.scores is not None, "This is a bug: documents have scores."
        return self.ranked.ndcg(self.scores[places, np.arange(self.num_inputs)])

    @property
    def _iou_lost(self) -> Floats:
        assert self.iou is not None, "This is a bug: these inputs are no pictures whose pixels are labelled."
        lost: Floats = (self.iou[-1] - self.iou).astype(np.float64)
        return lost

    @property
    def at_end(self) -> Indices:
        return np.full(self.num_inputs, self.num_ramps)

    def losses(self, metric: Metric) -> Floats:
        """Ramps + 1 x inputs: 1 where the full network's answer is right and this one wrong, -1 for the reverse.

        Agreement cannot be won: every answer that differs from the full network's is a loss. If all classes count
        alike, the losses of a rare class weigh more; for micro-F1, those of an input with many labels. For NDCG, a
        document's loss is that of its list if no other document leaves early.
        """
        if metric == MICRO_F1:
            ends = [np.full(self.num_inputs, place) for place in range(self.num_ramps + 1)]
            full = self.pooled(self.at_end)
            return np.array([full.drift(self.pooled(end)) for end in ends])
        if metric == NDCG:
            assert self.scores is not None, "This is a bug: documents have scores."
            return self.ranked.losses(self.scores)
        if metric == MEAN_IOU:
            return self._iou_lost
        judged = (self.agrees if metric == "agreement" else self.right).astype(np.float64)
        lost: Floats = (1.0 if metric == "agreement" else self.full_right) - judged
        return lost if metric in OF_ALL else lost * balancing(self.truth)

    def lost(self, places: Indices, metric: Metric) -> tuple[Loss, ...]:
        """The losses of inputs that leave at these ramps. Each of them must be within the allowed loss."""
        if metric == MICRO_F1:
            return (self.pooled(self.at_end).loss(self.pooled(places)),)
        if metric == NDCG:
            return (mean_loss(self.ndcg(self.at_end) - self.ndcg(places)),)
        if metric in SCORES:
            return (score_loss(metric, self.truth, self.full_labels, self.answers(places)),)
        inputs = np.arange(self.num_inputs)
        if metric == "agreement":
            same = self.answers(places) == self.full_labels if self.agreed is None else self.agreed[places, inputs]
            return (mean_loss(1.0 - same.astype(np.float64)),)
        if metric == MEAN_IOU:
            return (mean_loss(self._iou_lost[places, inputs]),)
        lost = self.full_right - self.right[places, inputs]
        return losses_by_class(lost, self.truth) if metric == "worst-class" else (mean_loss(lost),)


OPTIONAL = ("agreed", "marks", "iou", "scores", "lists", "relevance")  # arrays that only some tables have
# The arrays of a table by the names that files give them.
ARRAYS = {
    field.name: "said" if field.name == "labels" else field.name
    for field in fields(ExitTable)
    if field.name not in ("reference", *OPTIONAL)
}


@dataclass(frozen=True)
class Leaving:
    """A choice of thresholds on a table. `places` is the ramp at which each input leaves, or the number of ramps."""

    places: Indices
    cost: float
    losses: tuple[Loss, ...]

    @property
    def lost(self) -> Loss:
        return max(self.losses, key=lambda each: float(each.mean))


def outcome(table: ExitTable, chosen: Indices, metric: Metric) -> Leaving:
    places = table.places(chosen)
    return Leaving(places, table.cost(places), table.lost(places, metric))


def ladder(table: ExitTable, metric: Metric) -> list[Indices]:
    """Choices of thresholds, from the one with the least loss to the one with the least cost.

    Single steps connect the choices that the multipliers give.
    """
    losses = table.losses(metric)
    rungs, chosen, least = [table.strictest], table.strictest, table.costs[-1]
    for multiplier in MULTIPLIERS:
        values = table.costs[:, None] + multiplier * losses
        chosen = improved(table, chosen, values)
        if (cost := table.cost(table.places(chosen))) < least - ROUNDING:
            least = cost
            rungs += _between(table, values, rungs[-1], chosen)
    return rungs


def _between(table: ExitTable, values: Floats, low: Indices, high: Indices) -> Iterator[Indices]:
    """From one choice to another, a candidate at one ramp at a time: always the step with the least mean after it."""
    while (ahead := np.sign(high - low)).any():
        growths = np.where(ahead != 0, _growths(table, values, low, ahead), np.inf)
        low = np.where(np.arange(len(low)) == growths.argmin(), low + ahead, low)
        yield low


def _growths(table: ExitTable, values: Floats, chosen: Indices, ahead: Indices) -> Floats:
    """The growth of the sum of values with the next candidate (1 ahead) or the one before (-1), for each ramp."""
    left = np.logical_or.accumulate(table.first <= chosen[:, None], axis=0)
    later, growths = values[-1], np.zeros(len(chosen))
    for ramp in reversed(range(len(chosen))):
        moved = table.first[ramp] == (chosen[ramp] + 1 if ahead[ramp] > 0 else chosen[ramp])
        if ramp:
            moved &= ~left[ramp - 1]
        growths[ramp] = ahead[ramp] * (values[ramp] - later)[moved].sum()
        later = np.where(table.first[ramp] <= chosen[ramp], values[ramp], later)
    return growths


def highest(rungs: Sequence[Indices], table: ExitTable, metric: Metric, shown: Callable[[Loss], bool]) -> Indices:
    """The last rung before the first one that fails the test of its losses. The first rung needs no test."""
    best = rungs[0]
    for chosen in rungs[1:]:
        if not all(map(shown, outcome(table, chosen, metric).losses)):
            break
        best = chosen
    return best


def improved(table: ExitTable, chosen: Indices, values: Floats) -> Indices:
    """Improve one ramp at a time, from the last to the first, until a pass changes nothing."""
    for _ in range(MAX_PASSES):
        before, chosen = chosen, _pass(table, chosen, values)
        if np.array_equal(before, chosen):
            break
    return chosen


def _pass(table: ExitTable, chosen: Indices, values: Floats) -> Indices:
    """The best candidate for each ramp, given the old candidates before it and the new ones after it."""
    left = np.logical_or.accumulate(table.first <= chosen[:, None], axis=0)
    later, best = values[-1], chosen.copy()
    for ramp in reversed(range(table.num_ramps)):
        gains = values[ramp] - later
        if ramp:
            gains = np.where(left[ramp - 1], 0.0, gains)
        sums = np.bincount(table.first[ramp], gains, len(table.candidates) + 1).cumsum()[:-1]
        best[ramp] = sums.argmin()
        later = np.where(table.first[ramp] <= best[ramp], values[ramp], later)
    return best
