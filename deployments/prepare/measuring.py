"""Makes ramps from features: trains and calibrates them, chooses thresholds, and tests these on separate inputs.

The promise (profiles/promise.py) rests on the test of a fixed sequence. Some inputs decide the order in which
thresholds are loosened, step by step. Other inputs decide the number of steps: the first step that fails the test ends
the sequence. So, for any number of steps, a false promise passes no more often than its confidence allows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor, nn

from isobatch.deployments.exits import Policy, yes_or_no
from isobatch.deployments.models.ramps import ExitRules, RampDtype, RampKind, RampRule, policy_at
from isobatch.deployments.prepare.entities import MOST_UNSURE, entity_f1, of_texts, of_words
from isobatch.deployments.prepare.features import Features, Floats
from isobatch.deployments.prepare.report import by_class
from isobatch.deployments.prepare.sample import Indices, Sample
from isobatch.deployments.prepare.thresholds import calibration_error, replay, temperature
from isobatch.deployments.prepare.training import Learned, head_logits, train
from isobatch.deployments.progress import busy
from isobatch.profiles.confidence import bound
from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import ExitTable, Leaving, outcome
from isobatch.profiles.losses import OF_ALL, Labels, ListNdcg, Metric
from isobatch.profiles.promise import ExitPromise


@dataclass(frozen=True)
class PrepareOptions:
    """Options of preparing a network. `metric`: the measure of what exits lose (profiles/losses.py).

    `threshold`: one threshold for every ramp, instead of a search for thresholds that keep the allowed loss. Nothing is
    promised for it.
    """

    policy: str = "isobatch.deployments.exits:entropy"
    ramp: RampKind = "light"
    dtype: RampDtype = "float32"
    max_accuracy_loss: float = 0.01
    confidence: float = 0.95
    metric: Metric = "accuracy"
    seed: int = 0
    threshold: float | None = None
    tolerance: float = 0.05  # scores that differ by no more, as a share of their range, count as the same


@dataclass(frozen=True)
class RampLogits:
    """The logits of ramps and head for some inputs, before or after calibration, and the true labels (one-hot)."""

    ramps: Tensor
    head: Tensor
    truth: Tensor
    counts: Indices | None = None  # the number of words of each text, if words are answered, or of each input's labels
    by_label: bool = False  # each label is answered by itself

    def temperatures(self) -> list[float]:
        """The temperature that calibrates each ramp, followed by the head's temperature."""
        return [temperature(logits, self.truth) for logits in self.heads()]

    def calibrated(self, temperatures: Sequence[float]) -> "RampLogits":
        """The logits after calibration by one temperature per ramp, followed by the head's temperature."""
        ramps = [logits / value for logits, value in zip(self.ramps, temperatures, strict=False)]
        return replace(self, ramps=torch.stack(ramps), head=self.head / temperatures[-1])

    def heads(self) -> list[Tensor]:
        return [*self.ramps, self.head]

    def errors(self, calibrated: "RampLogits") -> list[tuple[float | None, float | None]]:
        """Of calibration, before and after it, for each ramp and the head."""
        both = zip(self.heads(), calibrated.heads(), strict=True)
        return [(calibration_error(before, self.truth), calibration_error(after, self.truth)) for before, after in both]

    def joined(self, others: Iterable["RampLogits"]) -> "RampLogits":
        """The logits of these inputs and of others together."""
        every = [self, *others]
        ramps = torch.cat([each.ramps for each in every], dim=1)
        head, truth = torch.cat([each.head for each in every]), torch.cat([each.truth for each in every])
        counts = [each.counts for each in every if each.counts is not None]
        return RampLogits(ramps, head, truth, np.concatenate(counts) if counts else None, self.by_label)

    def softened_truth(self) -> Tensor:
        """The mean of the true labels and the head's probabilities, as labels of few inputs alone are noisy."""
        return (self.truth + self.head.softmax(dim=1)) / 2


@dataclass(frozen=True)
class TrainedRamps:
    """Ramps after every block but the last, the rules by which inputs leave, and the evidence for the promise."""

    rules: ExitRules
    heads: Mapping[int, nn.Module]
    evidence: Evidence | None


def make_ramps(
    features: Features,
    sample: Sample,
    options: PrepareOptions,
    names: Sequence[str] = (),
    own: Mapping[int, nn.Module] = MappingProxyType({}),
) -> TrainedRamps:
    """Ramps that are trained, calibrated and tested. `names`: the names of labels, which decide on entities. `own`: the
    ramps that need no training, by their blocks."""
    if features.counts is not None and not all(len(features.of(part)) for part in sample.parts):
        raise UserError("hardly any text has a word that the network answers: give more texts with such words")
    targets, truth = targets_of(features, sample)
    by_label, rows = sample.task.by_label, features.of(sample.parts.train)
    heads = train(features.pooled, targets, rows, options.ramp, options.seed, learned=_learned(by_label), own=own)
    shape = ramp_logits(heads, features, truth, sample.parts.calibrate, by_label)
    if options.threshold is None:
        shape = shape.joined(_cross_fitted(features, targets, truth, sample, options, own))
    test = ramp_logits(heads, features, truth, sample.parts.test, by_label)
    with busy("choosing temperatures and thresholds"):
        temperatures = shape.temperatures()
        calibrated = test.calibrated(temperatures)
        tested = _choose(shape.calibrated(temperatures), calibrated, options)
    rules = rules_of(options, temperatures, tested, test.errors(calibrated))
    if tested.answers and tested.counts is not None and sample.words is not None:
        rules = rules.model_copy(update={"entities": entity_f1(*tested.answers, tested.counts, names)})
    return TrainedRamps(rules, dict(enumerate(heads)), tested.evidence)


def _learned(by_label: bool) -> Learned:
    return "each label" if by_label else "labels"


def targets_of(features: Features, sample: Sample) -> tuple[Floats, Tensor]:
    """The targets of training, and the right answers: the labels, or the answers of the full network."""
    num_labels = features.logits.shape[1]
    labels = _labels(features, sample)
    if sample.task.by_label:
        yes = labels.astype(np.float32)
        return yes if sample.labels is not None else expit(features.logits), torch.from_numpy(yes)
    truth = np.eye(num_labels, dtype=np.float32)[labels]
    targets = torch.from_numpy(features.logits).softmax(dim=1).numpy() if sample.labels is None else truth
    return targets, torch.from_numpy(truth)


def _labels(features: Features, sample: Sample) -> Indices:
    """The right label in each row of the features, or the right answer to each label."""
    if sample.labels is None and sample.task.by_label:
        return (features.logits > 0).astype(np.int64)
    if sample.labels is None:
        answers: Indices = features.logits.argmax(axis=1)
        return answers
    if sample.words is None or features.counts is None or features.numbers is None:
        return sample.labels
    return of_words(sample.labels, sample.words, features.counts, features.numbers)


def ramp_logits(
    heads: list[nn.Module], features: Features, truth: Tensor, inputs: Indices, by_label: bool = False
) -> RampLogits:
    rows, counts = features.of(inputs), None if features.counts is None else features.counts[inputs]
    ramps, head, right = head_logits(heads, features.pooled, rows), torch.from_numpy(features.logits[rows]), truth[rows]
    if not by_label:
        return RampLogits(ramps, head, right, counts)
    ramps, right = torch.stack([yes_or_no(each) for each in ramps]), torch.stack((1 - right, right), dim=2)
    return RampLogits(ramps, yes_or_no(head), right.flatten(0, 1), np.full(len(rows), head.shape[1]), by_label)


@dataclass(frozen=True)
class ThresholdOutcome:
    """The outcome of thresholds on the inputs of the test, and their promise for other inputs."""

    thresholds: Sequence[float]
    table: ExitTable
    outcome: Leaving
    promise: ExitPromise | None
    evidence: Evidence | None = None
    # If words are answered: the table of all words of the tested texts, the number of words of each text, and how many
    # of a text's words need not be sure. If each label is answered by itself, labels stand in place of words.
    words: ExitTable | None = None
    counts: Indices | None = None
    most_unsure: int = 0

    @property
    def ndcg(self) -> ListNdcg | None:
        """None: the inputs are no lists of documents."""
        if self.table.lists is None:
            return None
        return ListNdcg.of(self.table.ndcg(self.table.at_end), self.table.ndcg(self.outcome.places))

    @property
    def answers(self) -> tuple[Labels, Labels, Labels] | None:
        """The true labels, the full network's, and those with exits; None if only shares of whole texts are known.

        Where each label is answered by itself, they are inputs x labels.
        """
        places = self.outcome.places
        if self.words is not None and self.counts is not None:
            rows = self.words.truth, self.words.labels[-1], self.words.answers(np.repeat(places, self.counts))
            if self.table.marks is None:
                return rows
            truth, full, exits = (each.reshape(len(self.counts), -1) for each in rows)
            return truth, full, exits
        if self.table.agreed is not None:
            return None
        return self.table.truth, self.table.full_labels, self.table.answers(places)


def _cross_fitted(
    features: Features, targets: Floats, truth: Tensor, sample: Sample, options: PrepareOptions,
    own: Mapping[int, nn.Module],
) -> Iterator["RampLogits"]:  # fmt: skip
    """The logits of the training rows by ramps that did not learn from them: of each half by ramps of the other half.

    A ramp is too sure of rows that it has learned from, and rows that no ramp learns from are few.
    """
    halves = np.array_split(np.random.default_rng(options.seed).permutation(sample.parts.train), 2)
    for learned, other in (halves, halves[::-1]):
        rows, by_label = features.of(learned), sample.task.by_label
        what, kind = "ramps of a half", _learned(by_label)
        heads = train(features.pooled, targets, rows, options.ramp, options.seed, what, kind, own)
        yield ramp_logits(heads, features, truth, other, by_label)


def _choose(shape: RampLogits, test: RampLogits, options: PrepareOptions) -> ThresholdOutcome:
    """The cheapest thresholds of the sequence that pass the test, or the one threshold in the options."""
    policy, num_ramps = policy_at(options.policy), len(test.ramps)
    costs = [(block + 1) / (num_ramps + 1) for block in range(num_ramps)]
    tested = replay(policy, test.ramps, test.head, test.truth, costs, options.threshold)
    if test.counts is not None:
        return _choose_of_texts(policy, shape, tested, test.counts, options)
    if options.threshold is not None:
        fixed = outcome(tested, tested.strictest, options.metric)
        return ThresholdOutcome([options.threshold] * num_ramps, tested, fixed, None)
    shaping = replay(policy, shape.ramps, shape.head, shape.softened_truth(), costs)
    evidence = Evidence(shaping, tested, options.metric, options.max_accuracy_loss, options.confidence)
    return tested_outcome(evidence, evidence.prepared)


def tested_outcome(evidence: Evidence, chosen: Indices) -> ThresholdOutcome:
    tested, promise = evidence.test, proven_promise(evidence, chosen)
    leaving = outcome(tested, chosen, evidence.metric)
    return ThresholdOutcome(tested.candidates[chosen].tolist(), tested, leaving, promise, evidence)


def _choose_of_texts(
    policy: Policy, shape: RampLogits, tested: ExitTable, counts: Indices, options: PrepareOptions
) -> ThresholdOutcome:
    """Thresholds for texts that leave with all their words. The number of unsure words is chosen before the test.

    An input that has several labels leaves when each of them is sure.
    """
    assert shape.counts is not None, "This is a bug: words are words in every part."
    shaping = replay(policy, shape.ramps, shape.head, shape.softened_truth(), tested.costs[:-1].tolist())
    tried = (0,) if shape.by_label else MOST_UNSURE
    of_shape = {most: of_texts(shaping, shape.counts, most, shape.by_label) for most in tried}

    def test_of(most: int) -> ExitTable:
        return of_texts(tested, counts, most, shape.by_label)

    return replace(choose_of_parts(of_shape, test_of, options), words=tested, counts=counts)


def choose_of_parts(
    of_shape: Mapping[int, ExitTable], test_of: Callable[[int], ExitTable], options: PrepareOptions
) -> ThresholdOutcome:
    """Thresholds for inputs that leave with all their parts. `of_shape`: the table for each number of unsure parts."""

    def evidence_of(most: int, test: ExitTable) -> Evidence:
        return Evidence(of_shape[most], test, options.metric, options.max_accuracy_loss, options.confidence)

    def expected_cost(most: int) -> float:
        evidence = evidence_of(most, of_shape[most])
        return outcome(evidence.shape, evidence.prepared, options.metric).cost

    most = min(of_shape, key=expected_cost)
    evidence = evidence_of(most, test_of(most))
    return replace(tested_outcome(evidence, evidence.prepared), most_unsure=most)


def proven_promise(evidence: Evidence, chosen: Indices) -> ExitPromise | None:
    """The promise, if these thresholds pass the test. If no input leaves, nothing is lost, and no test is needed."""
    leaving = outcome(evidence.test, chosen, evidence.metric)
    may_lose = leaving.cost < 1.0 or evidence.test.reference is not None
    if may_lose and not all(map(evidence.shows, leaving.losses)):
        return None
    most = max(bound(loss, evidence.confidence, evidence.metric) for loss in leaving.losses) if may_lose else 0.0
    return ExitPromise(
        metric=evidence.metric,
        max_loss=evidence.max_loss,
        confidence=evidence.confidence,
        rows=evidence.test.num_inputs,
        counted=None if evidence.metric in OF_ALL else min(loss.counted for loss in leaving.losses),
        lost=leaving.lost.mean,
        bound=min(most, evidence.max_loss),
    )


def retuned(rules: ExitRules, evidence: Evidence, chosen: Indices) -> ExitRules:
    """The same ramps with other thresholds, and with figures that are measured again on the inputs of the test."""
    tested = tested_outcome(evidence, chosen)
    return rules.model_copy(update={**_measured(tested), "ramps": tuple(_retuned(rules.ramps, tested))})


def _retuned(ramps: Sequence[RampRule], tested: ThresholdOutcome) -> Iterator[RampRule]:
    right, places = tested.table.right, tested.outcome.places
    for ramp, (rule, threshold) in enumerate(zip(ramps, tested.thresholds, strict=True)):
        leaving = right[ramp][places == ramp]
        measured = {
            "threshold": threshold,
            "survival": float((places > ramp).mean()),
            "exit_accuracy": float(leaving.mean()) if len(leaving) else None,
        }
        yield rule.model_copy(update=measured)


def _measured(tested: ThresholdOutcome) -> dict[str, Any]:
    right, places = tested.table.right, tested.outcome.places
    inputs = np.arange(len(places))
    return {
        "full_accuracy": float(right[-1].mean()),
        "exit_accuracy": float(right[places, inputs].mean()),
        "agreement": float(tested.table.agrees[places, inputs].mean()),
        "mean_depth_share": tested.outcome.cost,
        "promise": tested.promise,
        "classes": by_class(*tested.answers) if tested.answers else (),
        "entities": None,
        "ndcg": tested.ndcg,
    }


def rules_of(
    options: PrepareOptions, temperatures: list[float], tested: ThresholdOutcome,
    errors: Sequence[tuple[float | None, float | None]],
) -> ExitRules:  # fmt: skip
    """`errors`: of calibration, before and after it, for each ramp."""
    ramps = [
        RampRule(
            block=ramp,
            threshold=threshold,
            temperature=temperatures[ramp],
            accuracy=float(tested.table.right[ramp].mean()),
            ece_before=errors[ramp][0],
            ece_after=errors[ramp][1],
        )
        for ramp, threshold in enumerate(tested.thresholds)
    ]
    return ExitRules(
        kind=options.ramp,
        policy=options.policy,
        dtype=options.dtype,
        ramps=tuple(_retuned(ramps, tested)),
        head_temperature=temperatures[-1],
        most_unsure=tested.most_unsure,
        **_measured(tested),
    )
