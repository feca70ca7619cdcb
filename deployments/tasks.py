"""The tasks of networks: one label for each input, several labels for it, one for each word of a text, or a score.

A `Task` has everything that depends on this: the heads with the task, and the names of answers and their forms as JSON
and as tensors. Exits and comparisons of answers do not depend on it (`profiles/model.py`). Tasks whose answers are maps
are in `map_tasks.py`.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.entities import entities_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.losses import ABSOLUTE_ERROR, MICRO_F1, NDCG, Metric
from isobatch.profiles.model import Label, Probability, Sides, Words, probabilities_in

# Hugging Face's names of problems.
ONE_LABEL = "single_label_classification"
SEVERAL_LABELS = "multi_label_classification"
A_NUMBER = "regression"
Outputs = dict[str, Any]
Tensors = Mapping[str, tuple[str, list[int]]]  # by name: the datatype, and the sizes after the number of inputs

# The value that fills a tensor where an input has fewer words or labels than another one, and its type in numpy.
PADDING: Mapping[str, tuple[Any, Any]] = MappingProxyType(
    {"INT64": (-1, np.int64), "FP32": (0.0, np.float32), "BYTES": ("", object)}
)

ALL, WINNER = "all", "winner"  # the values of `scores` that are no numbers
SCORES = "it must be 'all', 'winner' or a number of labels"


def are_scores(value: object) -> bool:
    """Whether a value says how many labels an answer lists.

    >>> are_scores("all"), are_scores(2), are_scores("2"), are_scores(True), are_scores(0)
    (True, True, False, False, False)
    """
    return value in (ALL, WINNER) or is_count(value)


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def top_of(scores: str | int, labels: int) -> int:
    """How many labels an answer lists besides the winner.

    >>> top_of("winner", 3), top_of("all", 3), top_of(2, 3), top_of(9, 3)
    (0, 3, 2, 3)
    """
    return {ALL: labels, WINNER: 0}[scores] if isinstance(scores, str) else min(scores, labels)


def check_problem(folder: Path, problem: str | None, outputs: int) -> None:
    """Raise UserError unless the head gives labels or one number."""
    if problem not in (None, ONE_LABEL, SEVERAL_LABELS) and not (problem == A_NUMBER and outputs == 1):
        several = f" with {outputs} outputs" if problem == A_NUMBER else ""
        raise UserError(
            f"{folder}: its problem_type is {problem}{several}: only heads that give labels or one number are served"
        )


class TaskAnswer(Protocol):
    """The answer to an input, as far as a task writes it."""

    @property
    def label(self) -> Label: ...

    @property
    def score(self) -> Probability: ...

    @property
    def words(self) -> Words | Sides | None: ...

    @property
    def logits(self) -> NDArray[np.float32] | None: ...


class Task:
    """One label for each input. Another task is a subclass in `TASKS` (map_tasks.py)."""

    name = "classification"
    heads = ""  # the ending of `architectures` in a checkpoint's config.json; "": any that belongs to no other task
    by_token = False  # whether heads and ramps answer every token, not the input as a whole
    by_label = False  # whether each label is answered by itself, yes or no
    by_score = False  # whether the network has one output, which is a score, and no labels to choose from
    by_map = False  # whether the head gives maps of a picture, and ramps are bridges to such heads
    numbers = False  # whether the outputs are scores themselves, not the logits of probabilities
    map_width = 0  # of heat maps, where a label is the cell with the largest number, line by line
    policy = "entropy"  # when an input leaves, if the user does not say
    # What promises may be about; the first one is the default.
    metrics: tuple[Metric, ...] = ("accuracy", "agreement", "worst-class", "macro-f1", "mcc")
    answered = "inputs"  # the plural noun for the things that get a label each
    loaders: Mapping[str, str] = MappingProxyType(  # Hugging Face's classes for networks that read texts or images
        {"text": "AutoModelForSequenceClassification", "image": "AutoModelForImageClassification"}
    )
    tensors: Tensors = MappingProxyType({"label": ("INT64", []), "score": ("FP32", []), "name": ("BYTES", [])})

    @property
    def several(self) -> bool:
        """Whether an input has several answers: one for each word, label, pixel or point."""
        return self.by_token or self.by_label or self.by_map

    def choices(self, num_labels: int) -> int:
        """The number of answers that a policy chooses from."""
        return 2 if self.by_label else num_labels

    def ramp_width(self, num_labels: int) -> int:
        """The outputs of a ramp. Of a score it gives two (`near` in deployments/exits.py)."""
        return 2 if self.by_score else num_labels

    def parts(self, num_labels: int) -> int:
        """The number of answers to an input, where it is the same for all inputs."""
        return num_labels if self.by_label else 1

    def score_sizes(self, num_labels: int) -> list[int]:
        """The sizes of the tensor of `probabilities`, after the number of inputs."""
        return [*self.tensors["score"][1], num_labels]

    def named(self, label: Label, names: Sequence[str]) -> Any:
        """The checkpoint's name for a label."""
        assert isinstance(label, int), "This is a bug: an input has one label."
        return names[label]

    def output(self, answer: TaskAnswer, names: Sequence[str], top: int = 0) -> Outputs:
        """An answer as JSON, with its `top` most probable labels."""
        output = {"label": answer.label, "name": self.named(answer.label, names), "score": answer.score}
        if top:
            output["scores"] = best_labels(self.probabilities([answer])[0], names, top)
        return output

    def parsed(self, output: Outputs, names: Sequence[str]) -> tuple[Label, Any, Probability]:
        """The label, its name and its score from the result of `output`. `names`: those of all labels."""
        return output["label"], output["name"], output["score"]

    def columns(self, answers: Sequence[TaskAnswer], names: Sequence[str]) -> Outputs:
        """Answers as the tensors of `tensors`: numbers as arrays, names as lists."""
        return {
            "label": np.array([answer.label for answer in answers], np.int64),
            "score": np.array([answer.score for answer in answers], np.float32),
            "name": [self.named(answer.label, names) for answer in answers],
        }

    def probabilities(self, answers: Sequence[TaskAnswer]) -> NDArray[np.float32]:
        """The probabilities of all labels, in the order of the labels; a row for each answer."""
        return probabilities_in(self.logits(answers))

    def logits(self, answers: Sequence[TaskAnswer]) -> NDArray[np.float32]:
        """The calibrated logits of all labels, in the order of the labels; a row for each answer."""
        return np.stack([logits_of(answer) for answer in answers])


class Scoring(Task):
    """A score for each input: the sigmoid of the network's one output, which counts as its only label."""

    name = "scoring"
    by_score = True
    metrics = (ABSOLUTE_ERROR, NDCG, "agreement")


class Regression(Scoring):
    """The same without the sigmoid: the output is the answer."""

    name = "regression"
    numbers = True

    def probabilities(self, answers: Sequence[TaskAnswer]) -> NDArray[np.float32]:
        return self.logits(answers)


class MultiLabelClassification(Task):
    """Several labels for each input: those whose probability, the sigmoid of their logit, is above a half.

    An answer has one part for each of the network's labels: in `label` 1 if the input has it and 0 if not, in `score`
    the probability of that, and in `logits` a row of two, for no and for yes.
    """

    name = "multi-label-classification"
    by_label = True
    metrics = (MICRO_F1, "accuracy", "agreement")
    tensors: Tensors = MappingProxyType(
        {"labels": ("INT64", []), "label": ("INT64", [-1]), "score": ("FP32", [-1]), "name": ("BYTES", [-1])}
    )

    def score_sizes(self, num_labels: int) -> list[int]:
        return [num_labels]

    def named(self, label: Label, names: Sequence[str]) -> tuple[str, ...]:
        """The names of the labels that an input has."""
        return tuple(name for name, has in zip(names, parts_of(label), strict=True) if has)

    def output(self, answer: TaskAnswer, names: Sequence[str], top: int = 0) -> Outputs:
        (probabilities,) = self.probabilities([answer])
        own = [label for label, has in enumerate(parts_of(answer.label)) if has]
        own.sort(key=lambda label: -probabilities[label])
        output: Outputs = {"labels": [_scored(label, probabilities, names) for label in own]}
        if top:
            output["scores"] = best_labels(probabilities, names, top)
        return output

    def parsed(self, output: Outputs, names: Sequence[str]) -> tuple[Label, Any, Probability]:
        """The scores of labels that the output does not list are NaN."""
        by_label = {each["label"]: each for each in output["labels"]}
        labels = tuple(int(label in by_label) for label in range(len(names)))
        named = tuple(by_label[label]["name"] for label in sorted(by_label))
        return labels, named, tuple(by_label[label]["score"] if has else nan for label, has in enumerate(labels))

    def columns(self, answers: Sequence[TaskAnswer], names: Sequence[str]) -> Outputs:
        return _padded(self.tensors, [self.output(answer, names)["labels"] for answer in answers])

    def probabilities(self, answers: Sequence[TaskAnswer]) -> NDArray[np.float32]:
        return np.stack([probabilities_in(logits_of(answer))[:, 1] for answer in answers])

    def logits(self, answers: Sequence[TaskAnswer]) -> NDArray[np.float32]:
        return np.stack([np.diff(logits_of(answer))[:, 0] for answer in answers])


class TokenClassification(Task):
    """One label for each word of a text: that of its first token. Special tokens around a text have no answer."""

    name = "token-classification"
    heads = "ForTokenClassification"
    by_token = True
    metrics = ("accuracy", "agreement")
    answered = "words"
    loaders: Mapping[str, str] = MappingProxyType({"text": "AutoModelForTokenClassification"})
    tensors: Tensors = MappingProxyType(
        {
            "words": ("INT64", []),
            "label": ("INT64", [-1]),
            "score": ("FP32", [-1]),
            "name": ("BYTES", [-1]),
            "start": ("INT64", [-1]),
            "end": ("INT64", [-1]),
        }
    )

    def named(self, label: Label, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(names[number] for number in parts_of(label))

    def output(self, answer: TaskAnswer, names: Sequence[str], top: int = 0) -> Outputs:
        tokens = tokens_of(answer, names)
        entities = entities_of(tokens, _words_of(answer).text)
        if top:
            for token, row in zip(tokens, probabilities_in(logits_of(answer)), strict=True):
                token["scores"] = best_labels(row, names, top)
        return {"tokens": tokens, "entities": entities}

    def parsed(self, output: Outputs, names: Sequence[str]) -> tuple[Label, Any, Probability]:
        tokens = output["tokens"]
        labels, named, scores = (tuple(token[part] for token in tokens) for part in ("label", "name", "score"))
        return labels, named, scores

    def columns(self, answers: Sequence[TaskAnswer], names: Sequence[str]) -> Outputs:
        return _padded(self.tensors, [tokens_of(answer, names) for answer in answers])

    def probabilities(self, answers: Sequence[TaskAnswer]) -> NDArray[np.float32]:
        """The same for each word, padded with 0.0 where a text has fewer words than the longest one."""
        rows = [probabilities_in(logits_of(answer)) for answer in answers]
        table = np.zeros((len(rows), max(map(len, rows)), rows[0].shape[1]), np.float32)
        for padded, row in zip(table, rows, strict=True):
            padded[: len(row)] = row
        return table


def logits_of(answer: TaskAnswer) -> NDArray[np.float32]:
    """The logits of an answer, which a network here or a front has given."""
    assert answer.logits is not None, "This is a bug: every answer that leaves a network has logits."
    return answer.logits


def best_labels(probabilities: NDArray[np.float32], names: Sequence[str], top: int) -> list[Outputs]:
    """The most probable labels, the best first.

    >>> [(each["name"], each["label"]) for each in best_labels(np.float32([0.2, 0.7, 0.1]), "abc", 2)]
    [('b', 1), ('a', 0)]
    """
    best = np.argsort(-probabilities, kind="stable")[:top].tolist()
    return [_scored(label, probabilities, names) for label in best]


def _scored(label: int, probabilities: NDArray[np.float32], names: Sequence[str]) -> Outputs:
    return {"label": label, "name": names[label], "score": float(probabilities[label])}


def _padded(tensors: Tensors, rows: Sequence[Sequence[Outputs]]) -> Outputs:
    """Lists of unlike lengths as tensors with one row for each list. A tensor without sizes holds the lengths.

    >>> columns = _padded({"words": ("INT64", []), "start": ("INT64", [-1])}, [[{"start": 4}, {"start": 7}], []])
    >>> columns["words"].tolist(), columns["start"].tolist()
    ([2, 0], [[4, 7], [-1, -1]])
    """
    counts = np.array([len(row) for row in rows], np.int64)
    present = np.arange(counts.max(initial=0)) < counts[:, None]

    def column(name: str, datatype: str) -> NDArray[Any]:
        table = np.full(present.shape, *PADDING[datatype])
        table[present] = [each[name] for row in rows for each in row]
        return table

    return {name: column(name, datatype) if sizes else counts for name, (datatype, sizes) in tensors.items()}


def tokens_of(answer: TaskAnswer, names: Sequence[str]) -> list[Outputs]:
    words, labels = _words_of(answer), parts_of(answer.label)
    return [
        {"label": label, "name": names[label], "score": score, "word": words.text[at:end], "start": at, "end": end}
        for label, score, at, end in zip(labels, parts_of(answer.score), words.starts, words.ends, strict=True)
    ]


def parts_of(value: Any) -> Any:
    """The parts of an answer: one for each word, label, pixel or point."""
    assert isinstance(value, tuple), "This is a bug: every word, label, pixel or point has an answer."
    return value


def _words_of(answer: TaskAnswer) -> Words:
    assert isinstance(answer.words, Words), "This is a bug: the words of a text are known where it was encoded."
    return answer.words


CLASSIFICATION = Task()
LABELS = MultiLabelClassification()
TOKENS = TokenClassification()
SCORING, REGRESSION = Scoring(), Regression()


def relevant_label(names: Sequence[str], label: str | None) -> int | None:
    """The number of the label that says that a text is relevant; None: no label is named, and there are several.

    >>> relevant_label(("no", "yes"), "yes"), relevant_label(("no", "yes"), None), relevant_label(("score",), None)
    (1, None, 0)
    """
    if label is not None and label not in names:
        raise UserError(f"relevant_label = {label!r}: the network's labels are {', '.join(names[:20])}")
    return names.index(label) if label is not None else 0 if len(names) == 1 else None


def task_of(model: object) -> Task:
    """The task of a network; one that declares none classifies its inputs."""
    task: Task = getattr(model, "task", CLASSIFICATION)
    return task
