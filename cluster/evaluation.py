"""The quality of a network's answers with and without exits, on inputs that it has not seen."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.table import Table

from isobatch.cluster.client import outputs_from
from isobatch.deployments.map_tasks import Keypoints
from isobatch.deployments.models import load_served
from isobatch.deployments.models.backends import block_ranges, make_ready, on_backend, weights_dtype
from isobatch.deployments.models.checkpoint import usual_dtype
from isobatch.deployments.models.loading import resolve_device
from isobatch.deployments.models.predict import AT_ONCE, PredictedAnswer, predict
from isobatch.deployments.models.ramps import ClassFigures, RampDtype, read_rules
from isobatch.deployments.models.served_model import BlockRange, ServedModel
from isobatch.deployments.named import INT8
from isobatch.deployments.points import are_near
from isobatch.deployments.prepare.entities import entity_f1, of_words
from isobatch.deployments.prepare.report import by_class
from isobatch.deployments.prepare.scores import range_of_scores, true_scores
from isobatch.deployments.progress import show
from isobatch.deployments.tasks import Task, task_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.losses import (
    ABSOLUTE_ERROR,
    MEAN_IOU,
    MICRO_F1,
    NAMES,
    NDCG,
    STEADY,
    EntityF1,
    Floats,
    Indices,
    Interval,
    Labels,
    ListNdcg,
    Metric,
    PooledF1,
    ScoreFigures,
    losses_by_class,
    mean_loss,
    picture_iou,
    score_loss,
    scored,
)
from isobatch.profiles.model import Words
from isobatch.profiles.promise import RULES, ExitPromise
from isobatch.profiles.ranking import RankedLists

Predicted = Sequence[PredictedAnswer]
SCORE_NAMES: Mapping[Metric, str] = {
    "macro-f1": "macro-F1",
    "mcc": "MCC",
    "micro-f1": "micro-F1",
    "mean-iou": "mean IoU",
    "worst-class": "recall, worst class",
    "absolute-error": "error of scores",
    "ndcg@10": "NDCG@10",
}


@dataclass(frozen=True)
class Evaluation:
    """`lost` is what exits cost, input by input: its interval is narrower than those of both accuracies."""

    inputs: int
    agreement: Interval
    depth: Interval  # the share of the blocks that an input runs
    full_accuracy: Interval | None = None  # None: the inputs have no labels
    accuracy: Interval | None = None
    lost: Interval | None = None
    scores: Mapping[Metric, ScoreFigures] = field(default_factory=dict)
    classes: tuple[ClassFigures, ...] = ()
    entities: EntityF1 | None = None  # None: the network names none

    def lost_of(self, metric: Metric) -> Interval | None:
        if metric == "agreement":
            return Interval(1 - self.agreement.mean, self.agreement.within)
        return self.lost if metric == "accuracy" else self.scores[metric].lost if metric in self.scores else None

    def as_json(self) -> str:
        classes = [each.model_dump() for each in self.classes]
        return json.dumps({"schema_version": 1, **asdict(self), "classes": classes}, indent=2)


def _compared(exits: Predicted, num_blocks: int, agreement: Interval) -> Evaluation:
    """The figures that need no labels."""
    return Evaluation(len(exits), agreement, _mean(np.array([(each.exit_block + 1) / num_blocks for each in exits])))


def evaluated(full: Predicted, exits: Predicted, truth: NDArray[np.int64] | None, num_blocks: int) -> Evaluation:
    """`full` and `exits` are the answers without exits and with them, to the same inputs."""
    full_answers, early = (np.array([each.label for each in answers]) for answers in (full, exits))
    known = _compared(exits, num_blocks, _share(full_answers == early))
    if truth is None:
        return known
    lost = (full_answers == truth).astype(float) - (early == truth)
    classes = by_class(truth, full_answers, early)
    rated: tuple[Metric, ...] = ("macro-f1", "mcc")
    scores = {metric: _scored(metric, truth, full_answers, early) for metric in rated}
    scores["worst-class"] = _worst(truth, full_answers, early)
    before, after = _share(full_answers == truth), _share(early == truth)
    return replace(known, full_accuracy=before, accuracy=after, lost=_of_losses(lost), scores=scores, classes=classes)


def evaluated_words(
    full: Predicted, exits: Predicted, truth: Indices | None, given: Indices | None,
    num_blocks: int, names: Sequence[str],
) -> Evaluation:  # fmt: skip
    """The same where words are answered: shares of a text's words, and every text counts alike.

    `truth` has the labels of all words, `given` the number of words of each text, `names` the names of the labels.
    """
    counts = np.array([len(_labels(each)) for each in full])
    if not counts.any():
        raise UserError("no text has a word that the network answers: there is nothing to compare")
    full_answers, early = (np.concatenate([_labels(each) for each in answers]) for answers in (full, exits))

    def of_texts(of_words: NDArray[Any]) -> NDArray[np.float64]:
        sums = np.bincount(np.repeat(np.arange(len(counts)), counts), weights=of_words, minlength=len(counts))
        shares: NDArray[np.float64] = sums[counts > 0] / counts[counts > 0]
        return shares

    known = _compared(exits, num_blocks, _of_losses(of_texts(full_answers == early)))
    if truth is None or given is None:
        return known
    numbers = np.concatenate([np.array(each.words.numbers, np.int64) for each in full if isinstance(each.words, Words)])
    right = of_words(truth, given, counts, numbers)
    entities = entity_f1(right, full_answers, early, counts, names)
    known = replace(known, classes=by_class(right, full_answers, early), entities=entities)
    return _with_accuracy(known, *(of_texts(answers == right) for answers in (full_answers, early)))


def _with_accuracy(known: Evaluation, in_full: NDArray[np.float64], with_exits: NDArray[np.float64]) -> Evaluation:
    """The same with accuracy, from the share of each input that is right."""
    before, after, lost = map(_of_losses, (in_full, with_exits, in_full - with_exits))
    return replace(known, full_accuracy=before, accuracy=after, lost=lost)


def evaluated_labels(full: Predicted, exits: Predicted, truth: Indices | None, num_blocks: int) -> Evaluation:
    """The same where inputs have several labels: shares of an input's labels that are rightly given or not given."""
    full_answers, early = (np.array([each.label for each in answers]) for answers in (full, exits))
    known = _compared(exits, num_blocks, _of_losses((full_answers == early).mean(axis=1)))
    if truth is None:
        return known
    before, after = (
        PooledF1((answers & truth).sum(axis=1), (answers + truth).sum(axis=1)) for answers in (full_answers, early)
    )
    lost = before.loss(after)
    f1, f1_early = (Interval.of(each.value, each.influence.std() / len(exits) ** 0.5) for each in (before, after))
    scores = {MICRO_F1: ScoreFigures(f1, f1_early, Interval.of(lost.mean, lost.error))}
    known = replace(known, scores=scores, classes=by_class(truth, full_answers, early))
    return _with_accuracy(known, *((answers == truth).mean(axis=1) for answers in (full_answers, early)))


def evaluated_scores(
    full: Predicted, exits: Predicted, truth: NDArray[Any] | None,
    lists: Indices | None, num_blocks: int, tolerance: float, are_numbers: bool,
) -> Evaluation:  # fmt: skip
    """The same where inputs have a score. `lists`: the number of each document's list, whose relevance is the truth."""
    in_full, early = (np.array([each.score for each in answers]) for answers in (full, exits))
    known = _compared(exits, num_blocks, _share(np.abs(in_full - early) <= tolerance))
    if truth is None:
        return known
    scores = dict[Metric, ScoreFigures]()
    if lists is not None:
        ranked = RankedLists(lists, truth)
        scores[NDCG] = ListNdcg.of(ranked.ndcg(in_full), ranked.ndcg(early))
    right = true_scores(truth, lists, are_numbers)
    if are_numbers and not np.ptp(right):
        raise UserError(f"every label is {right[0]:g}, but errors are shares of the labels' range: give others, too")
    width = range_of_scores(in_full, right, are_numbers).width
    before, after = (np.minimum(np.abs(answers - right) / width, 1.0) for answers in (in_full, early))
    scores[ABSOLUTE_ERROR] = ScoreFigures(_mean(before), _mean(after), _of_losses(after - before))
    return replace(known, scores=scores)


def evaluated_pixels(full: Predicted, exits: Predicted, truth: Indices | None, num_blocks: int) -> Evaluation:
    """The same where pixels are labelled: shares of a picture's pixels, of those that have a label in `truth`."""
    full_answers, early = (np.array([each.label for each in answers]) for answers in (full, exits))
    known = _compared(exits, num_blocks, _of_losses((full_answers == early).mean(axis=1)))
    if truth is None:
        return known
    labelled = truth >= 0
    some = labelled.any(axis=1)
    if not some.any():
        raise UserError("no pixel of these pictures has a label: nothing can be right")
    size = 1 + int(max(truth.max(), full_answers.max(), early.max()))
    iou, iou_early = (picture_iou(truth[some], answers[some], size) for answers in (full_answers, early))
    scores = {MEAN_IOU: ScoreFigures(*map(_of_losses, (iou, iou_early, iou - iou_early)))}
    classes = by_class(truth[labelled], full_answers[labelled], early[labelled])
    right = ((answers == truth)[some].sum(axis=1) / labelled[some].sum(axis=1) for answers in (full_answers, early))
    return _with_accuracy(replace(known, scores=scores, classes=classes), *right)


def evaluated_points(
    full: Predicted, exits: Predicted, truth: Floats | None, num_blocks: int, task: Keypoints, tolerance: float
) -> Evaluation:
    """The same where points are found: shares of a picture's points that are near, of those that `truth` has (PCK)."""
    in_full, early = (task.on_maps(np.array([each.label for each in answers])) for answers in (full, exits))
    known = _compared(exits, num_blocks, _of_losses(are_near(in_full, early, tolerance).mean(axis=1)))
    if truth is None:
        return known
    there = ~np.isnan(truth[..., 0])
    some = there.any(axis=1)
    if not some.any():
        raise UserError("no point of these pictures has a place: nothing can be right")
    near = (are_near(answers, truth, tolerance)[some].sum(axis=1) for answers in (in_full, early))
    return _with_accuracy(known, *(each / there[some].sum(axis=1) for each in near))


def _labels(answer: PredictedAnswer) -> Labels:
    return np.array(answer.label, np.int64)


def _of_losses(shares: NDArray[np.float64]) -> Interval:
    """The mean and its interval, as in prepare: one input more than was seen is assumed to lose."""
    return Interval.of(float(shares.mean()), mean_loss(shares).error)


def _scored(metric: Metric, truth: Labels, full: Labels, exits: Labels) -> ScoreFigures:
    lost = score_loss(metric, truth, full, exits)
    before, after = (Interval.of(*scored(metric, truth, answers)) for answers in (full, exits))
    return ScoreFigures(before, after, Interval.of(lost.mean, lost.error))


def _worst(truth: Labels, full: Labels, exits: Labels) -> ScoreFigures:
    """The least recall of any class, in full and with exits, and the greatest loss. These may be of three classes."""
    here = [truth == label for label in np.unique(truth)]

    def least(answers: Labels) -> Interval:
        return min((_share(answers[of_class] == truth[of_class]) for of_class in here), key=lambda each: each.mean)

    lost = losses_by_class((full == truth).astype(float) - (exits == truth), truth)
    most = max(lost, key=lambda each: float(each.mean))
    return ScoreFigures(least(full), least(exits), Interval.of(most.mean, most.error))


def _share(right: NDArray[np.bool_]) -> Interval:
    """The share of right answers. Its interval counts two more right and two more wrong ones, so it is never empty."""
    count, shrunk = len(right), (right.sum() + 2) / (len(right) + 4)
    return Interval(float(right.mean()), float(STEADY * np.sqrt(shrunk * (1 - shrunk) / (count + 4))))


def _mean(values: NDArray[np.float64]) -> Interval:
    return Interval(float(values.mean()), float(STEADY * values.std() / np.sqrt(len(values))))


def table(evaluation: Evaluation) -> Table:
    rows = Table("", title=f"{evaluation.inputs:,} inputs; ±: 95 % intervals", box=SIMPLE, title_justify="left")
    for heading in ("in full", "with exits", "lost by exits"):
        rows.add_column(heading, justify="right", no_wrap=True)
    if evaluation.full_accuracy:
        rows.add_row("accuracy", *map(str, (evaluation.full_accuracy, evaluation.accuracy, evaluation.lost)))
    scores: dict[str, ScoreFigures] = {"F1 of entities": evaluation.entities} if evaluation.entities else {}
    scores |= {SCORE_NAMES[metric]: each for metric, each in evaluation.scores.items()}
    for name, each in scores.items():
        rows.add_row(name, *map(str, (each.full, each.exits, each.lost)))
    if "worst-class" in evaluation.scores:
        rows.caption, rows.caption_justify = "lost of a recall: by the class that loses most", "left"
    same = "near the full network's" if ABSOLUTE_ERROR in evaluation.scores else "the full network's answer"
    rows.add_row(same, "", str(evaluation.agreement), "")
    rows.add_row("blocks run per input", "", str(evaluation.depth), "")
    return rows


def broken_promise(promise: ExitPromise, evaluation: Evaluation) -> str | None:
    """A sentence that these inputs lose more than was promised; None: they do not, or their loss is not known."""
    lost = evaluation.lost_of(promise.metric)
    if lost is None or lost.mean - lost.within <= promise.max_loss:
        return None
    return (
        f"the promise is a loss of at most {100 * promise.max_loss:.4g} % of {NAMES[promise.metric]}; "
        f"these inputs lose {lost}: they are not of the kind that it was tested on"
    )


def loaded(folder: Path, device: str, dtype: RampDtype | None) -> ServedModel:
    """The network in this precision; None: in the one that its ramps were made for, else in the usual one."""
    rules = folder / RULES
    if not dtype:
        dtype = read_rules(rules).dtype if rules.is_file() else usual_dtype(folder, resolve_device(device))
    device = "cpu" if dtype == INT8 and device == "auto" else device
    exact = load_served(folder, device, weights_dtype(dtype))
    if dtype != INT8:
        return on_backend(exact, folder, "torch")
    network = on_backend(exact, folder, "onnx", int8=True)
    blocks = network.num_blocks
    make_ready(network, folder, [*block_ranges(network, 0, blocks, network.ramp_blocks), BlockRange(0, blocks)])
    return network


def answered(network: ServedModel, values: Sequence[Any], exits: bool = True) -> list[PredictedAnswer]:
    starts = range(0, len(values), AT_ONCE)
    return [
        each
        for start in show(starts, "answering with exits" if exits else "answering in full")
        for each in predict(network, values[start : start + AT_ONCE], exits)
    ]


def served(
    url: str, values: Sequence[Any], headers: Mapping[str, str], task: Task, names: Sequence[str]
) -> list[PredictedAnswer]:
    outputs = show(outputs_from(url, values, headers), "asking the server", len(values))
    try:
        return [PredictedAnswer(*task.parsed(each, names), each["exit_block"]) for each in outputs]
    except (LookupError, TypeError) as error:
        raise UserError(f"{url} serves another network: its answers are not those of {task.name}") from error


def check_same_network(url: str, answers: Predicted, network: ServedModel) -> None:
    """Raise UserError if this network cannot have given these answers, so that no other is measured in its place."""
    labels, num_blocks = network.labels, network.num_blocks
    for each in answers:
        name = None
        with suppress(IndexError):  # it has no such label
            name = task_of(network).named(each.label, labels)
        if not (name == each.name and each.exit_block < num_blocks):
            answer = f"{each.name!r} (label {each.label})"[:100]  # a map is long
            raise UserError(
                f"{url} serves another network: it answers {answer} at block {each.exit_block}; this one has "
                f"{num_blocks} blocks and knows {', '.join(labels[:10])}"
            )


def check_same_sizes(url: str | None, full: Predicted, exits: Predicted) -> None:
    """Raise UserError if the server, which gave `exits`, answers more or fewer words, pixels or points of an input than
    this network. Without a server both are this network's."""
    for number, answers in enumerate(zip(full, exits, strict=True), start=1):
        own, others = (np.size(each.label) for each in answers)
        if own != others:
            parts = f"it answers {others} parts of input {number}, this one {own}"
            raise UserError(f"{url} serves another network: {parts}: evaluate the network that it serves")
