"""From features to ramps that are trained, calibrated, given thresholds, and tested on inputs kept for that alone.

The promise (profiles/promise.py) is kept by testing a fixed sequence: how thresholds are loosened, step by step, is
decided on some inputs. Others decide how far: the first step that fails the test ends it. So no
matter how many steps there are, a promise that is too bold passes no more often than its confidence says.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deployments.exits import Policy
from deployments.models.ramps import ClassFigures, ExitRules, RampDtype, RampKind, RampRule, policy_at
from deployments.prepare.calibration import calibration_error, temperature
from deployments.prepare.classes import by_class
from deployments.prepare.entities import entity_f1
from deployments.prepare.features import Features, Floats
from deployments.prepare.sample import Indices, Sample
from deployments.prepare.thresholds import replay
from deployments.prepare.training import answers, train
from deployments.prepare.words import MOST_UNSURE, of_texts, of_words
from deployments.progress import busy
from profiles.confidence import bound
from profiles.errors import UserError
from profiles.evidence import Evidence
from profiles.exit_table import ExitTable, Leaving, outcome
from profiles.losses import OF_ALL, EntityF1, Labels, Metric
from profiles.promise import ExitPromise


@dataclass(frozen=True)
class PrepareOptions:
    """What a user may choose. `metric` is what may be lost (profiles/losses.py).

    `threshold`: this one at every ramp, instead of those that a search finds for what may be lost. It promises nothing.
    """

    policy: str = "deployments.exits:entropy"
    ramp: RampKind = "light"
    dtype: RampDtype = "float32"
    max_accuracy_loss: float = 0.01
    confidence: float = 0.95
    metric: Metric = "accuracy"
    seed: int = 0
    threshold: float | None = None


@dataclass(frozen=True)
class Seen:
    """The logits of ramps and head for some inputs, calibrated or not yet, and the true labels (one-hot)."""

    ramps: Tensor
    head: Tensor
    truth: Tensor
    counts: Indices | None = None  # words of each text, where words are answered

    def temperatures(self) -> list[float]:
        """The temperature that calibrates each ramp, and the head's last."""
        return [temperature(logits, self.truth) for logits in self.heads()]

    def calibrated(self, temperatures: Sequence[float]) -> "Seen":
        """The same, calibrated by one temperature a ramp and the head's last."""
        ramps = [logits / value for logits, value in zip(self.ramps, temperatures, strict=False)]
        return replace(self, ramps=torch.stack(ramps), head=self.head / temperatures[-1])

    def heads(self) -> list[Tensor]:
        return [*self.ramps, self.head]

    def and_also(self, others: Iterable["Seen"]) -> "Seen":
        """These inputs and others."""
        every = [self, *others]
        ramps = torch.cat([each.ramps for each in every], dim=1)
        counts = (
            None if self.counts is None else np.concatenate([each.counts for each in every if each.counts is not None])
        )
        return Seen(ramps, torch.cat([each.head for each in every]), torch.cat([each.truth for each in every]), counts)

    def believed(self) -> Tensor:
        """The truth, half of it as the head believes it: labels of few inputs alone are a noisy guide."""
        return (self.truth + self.head.softmax(dim=1)) / 2


@dataclass(frozen=True)
class Made:
    """Ramps after every block but the last, the rules by which inputs leave at them, and what the promise rests on."""

    rules: ExitRules
    heads: Mapping[int, nn.Module]
    evidence: Evidence | None


def make_ramps(found: Features, sample: Sample, options: PrepareOptions, names: Sequence[str] = ()) -> Made:
    """`names`: of the labels, by which words make up entities."""
    if found.counts is not None and not all(len(found.of(part)) for part in sample.parts.each):
        raise UserError("hardly any text has a word that the network answers: give more that have")
    wanted, truth = targets_of(found, sample)
    heads = train(found.pooled, wanted, found.of(sample.parts.train), options.ramp, options.seed)
    shape = look(heads, found, truth, sample.parts.calibrate)
    if options.threshold is None:
        shape = shape.and_also(_unlearnt(found, wanted, truth, sample.parts.train, options))
    test = look(heads, found, truth, sample.parts.test)
    with busy("choosing temperatures and thresholds"):
        temperatures = shape.temperatures()
        calibrated = test.calibrated(temperatures)
        reached = _choose(shape.calibrated(temperatures), calibrated, options)
    errors = [
        (calibration_error(before, test.truth), calibration_error(after, test.truth))
        for before, after in zip(test.heads(), calibrated.heads(), strict=True)
    ]
    rules = _rules(options, temperatures, reached, errors)
    if reached.words and sample.labels is not None:
        rules = rules.model_copy(update={"entities": reached.words.entities(reached.outcome.places, names)})
    return Made(rules, dict(enumerate(heads)), reached.evidence)


def targets_of(found: Features, sample: Sample) -> tuple[Floats, Tensor]:
    """What ramps are trained towards, and what counts as right: the labels, or what the full network says."""
    num_labels = found.logits.shape[1]
    labels = _labels(found, sample)
    truth = np.eye(num_labels, dtype=np.float32)[labels]
    wanted = torch.from_numpy(found.logits).softmax(dim=1).numpy() if sample.labels is None else truth
    return wanted, torch.from_numpy(truth)


def _labels(found: Features, sample: Sample) -> Indices:
    """What counts as right, in each row of the features."""
    if sample.labels is None:
        said: Indices = found.logits.argmax(axis=1)
        return said
    if sample.words is None or found.counts is None or found.numbers is None:
        return sample.labels
    return of_words(sample.labels, sample.words, found.counts, found.numbers)


def look(heads: list[nn.Module], found: Features, truth: Tensor, inputs: Indices) -> Seen:
    rows, counts = found.of(inputs), None if found.counts is None else found.counts[inputs]
    return Seen(answers(heads, found.pooled, rows), torch.from_numpy(found.logits[rows]), truth[rows], counts)


@dataclass(frozen=True)
class Reached:
    """What thresholds do to the inputs that are kept for the test, and what they promise for others."""

    thresholds: Sequence[float]
    table: ExitTable
    outcome: Leaving
    promise: ExitPromise | None
    evidence: Evidence | None = None
    words: "WordsReached | None" = None

    @property
    def classes(self) -> tuple[ClassFigures, ...]:
        """Class by class; where words are answered, as far as these are known one by one."""
        if self.words:
            return self.words.classes(self.outcome.places)
        if self.table.agreed is not None:
            return ()
        return by_class(self.table.truth, self.table.said[-1], self.table.answers(self.outcome.places))


@dataclass(frozen=True)
class WordsReached:
    """The words of the texts of the test, and how many of a text's words need not be sure."""

    table: ExitTable
    counts: Indices
    most_unsure: int

    def classes(self, places: Indices) -> tuple[ClassFigures, ...]:
        """The figures of every label, where texts leave at these ramps."""
        return by_class(self.table.truth, self.table.said[-1], self._answers(places))

    def entities(self, places: Indices, names: Sequence[str]) -> EntityF1 | None:
        """F1 of whole entities, where labels of these names make up any."""
        return entity_f1(self.table.truth, self.table.said[-1], self._answers(places), self.counts, names)

    def _answers(self, places: Indices) -> Labels:
        return self.table.answers(np.repeat(places, self.counts))


def _unlearnt(
    found: Features, wanted: Floats, truth: Tensor, rows: Indices, options: PrepareOptions
) -> Iterator["Seen"]:
    """What ramps say of the rows that ramps learn from: of either half, by ramps that learn from the other.

    A ramp is too sure of rows that it has learnt from, and those that no ramp learns from are few.
    """
    halves = np.array_split(np.random.default_rng(options.seed).permutation(rows), 2)
    for learnt, other in (halves, halves[::-1]):
        heads = train(found.pooled, wanted, found.of(learnt), options.ramp, options.seed, "ramps of a half")
        yield look(heads, found, truth, other)


def _choose(shape: Seen, test: Seen, options: PrepareOptions) -> Reached:
    """The thresholds of a ladder that cost least of those that pass the test; or the one that was told."""
    policy, num_ramps = policy_at(options.policy), len(test.ramps)
    costs = [(block + 1) / (num_ramps + 1) for block in range(num_ramps)]
    tested = replay(policy, test.ramps, test.head, test.truth, costs, options.threshold)
    if test.counts is not None:
        return _choose_of_texts(policy, shape, tested, test.counts, options)
    if options.threshold is not None:
        told = outcome(tested, tested.strictest, options.metric)
        return Reached([options.threshold] * num_ramps, tested, told, None)
    shaping = replay(policy, shape.ramps, shape.head, shape.believed(), costs)
    return _tested(Evidence(shaping, tested, options.metric, options.max_accuracy_loss, options.confidence))


def _tested(evidence: Evidence, words: WordsReached | None = None) -> Reached:
    tested = evidence.test
    chosen = evidence.prepared
    found = outcome(tested, chosen, evidence.metric)
    return Reached(tested.candidates[chosen].tolist(), tested, found, promised(evidence, chosen), evidence, words)


def _choose_of_texts(
    policy: Policy, shape: Seen, tested: ExitTable, counts: Indices, options: PrepareOptions
) -> Reached:
    """The same for texts that leave with all of their words. How many need not be sure is decided before the test."""
    assert shape.counts is not None, "This is a bug: words are words in every part."
    shaping = replay(policy, shape.ramps, shape.head, shape.believed(), tested.costs[:-1].tolist())
    of_shape = {most: of_texts(shaping, shape.counts, most) for most in MOST_UNSURE}

    def told(most: int, test: ExitTable) -> Evidence:
        return Evidence(of_shape[most], test, options.metric, options.max_accuracy_loss, options.confidence)

    def hoped(most: int) -> float:
        evidence = told(most, of_shape[most])
        return outcome(evidence.shape, evidence.prepared, options.metric).cost

    most = min(MOST_UNSURE, key=hoped)
    return _tested(told(most, of_texts(tested, counts, most)), WordsReached(tested, counts, most))


def promised(evidence: Evidence, chosen: Indices) -> ExitPromise | None:
    """What has passed the test; that nothing is lost where nobody leaves needs none."""
    found = outcome(evidence.test, chosen, evidence.metric)
    may_lose = found.cost < 1.0 or evidence.test.reference is not None
    if may_lose and not all(map(evidence.shows, found.losses)):
        return None
    most = max(bound(each, evidence.confidence, evidence.metric) for each in found.losses) if may_lose else 0.0
    return ExitPromise(
        metric=evidence.metric,
        max_loss=evidence.max_loss,
        confidence=evidence.confidence,
        rows=evidence.test.num_inputs,
        counted=None if evidence.metric in OF_ALL else min(each.counted for each in found.losses),
        lost=found.lost.mean,
        bound=min(most, evidence.max_loss),
    )


def retuned(rules: ExitRules, evidence: Evidence, chosen: Indices) -> ExitRules:
    """The same ramps with other thresholds; what is measured of them is measured again, on the inputs of the test."""
    found = outcome(evidence.test, chosen, evidence.metric)
    reached = Reached(evidence.test.candidates[chosen].tolist(), evidence.test, found, promised(evidence, chosen))
    ramps = tuple(_retuned(rules.ramps, reached))
    return rules.model_copy(update={**_measured(reached), "ramps": ramps})


def _retuned(ramps: Sequence[RampRule], reached: Reached) -> Iterator[RampRule]:
    right, places = reached.table.right, reached.outcome.places
    for ramp, (rule, threshold) in enumerate(zip(ramps, reached.thresholds, strict=True)):
        leaving = right[ramp][places == ramp]
        measured = {
            "threshold": threshold,
            "survival": float((places > ramp).mean()),
            "exit_accuracy": float(leaving.mean()) if len(leaving) else None,
        }
        yield rule.model_copy(update=measured)


def _measured(reached: Reached) -> dict[str, Any]:
    right, places = reached.table.right, reached.outcome.places
    everyone = np.arange(len(places))
    return {
        "full_accuracy": float(right[-1].mean()),
        "exit_accuracy": float(right[places, everyone].mean()),
        "agreement": float(reached.table.agrees[places, everyone].mean()),
        "mean_depth_share": reached.outcome.cost,
        "promise": reached.promise,
        "classes": reached.classes,
        "entities": None,
    }


def _rules(
    options: PrepareOptions, temperatures: list[float], reached: Reached, errors: list[tuple[float, float]]
) -> ExitRules:
    ramps = [
        RampRule(
            block=ramp,
            threshold=threshold,
            temperature=temperatures[ramp],
            accuracy=float(reached.table.right[ramp].mean()),
            ece_before=errors[ramp][0],
            ece_after=errors[ramp][1],
        )
        for ramp, threshold in enumerate(reached.thresholds)
    ]
    return ExitRules(
        kind=options.ramp,
        policy=options.policy,
        dtype=options.dtype,
        ramps=tuple(_retuned(ramps, reached)),
        head_temperature=temperatures[-1],
        most_unsure=reached.words.most_unsure if reached.words else 0,
        **_measured(reached),
    )
