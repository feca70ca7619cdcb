"""The tasks of networks: one label for each input, several labels for it, one for each word of a text, or a score.

A `Task` is everything that depends on this: which heads have the task, and how answers are named and written as JSON
and as tensors. Exits and comparisons of answers do not depend on it (`profiles/model.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.errors import UserError
from isobatch.profiles.losses import ABSOLUTE_ERROR, MICRO_F1, NDCG, Metric
from isobatch.profiles.model import Label, Probability, Words, probabilities_in

# Hugging Face's names of problems.
ONE_LABEL = "single_label_classification"
SEVERAL_LABELS = "multi_label_classification"
A_NUMBER = "regression"
Outputs = dict[str, Any]
OUTSIDE = "O"  # the label of words that belong to no entity
Tensors = Mapping[str, tuple[str, list[int]]]  # by name: the datatype, and the sizes after the number of inputs

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
    def words(self) -> Words | None: ...

    @property
    def logits(self) -> NDArray[np.float32] | None: ...


class Task:
    """One label for each input. Another task is a subclass, and stands in `TASKS`."""

    name = "classification"
    heads = ""  # the ending of `architectures` in a checkpoint's config.json; "": any that belongs to no other task
    by_token = False  # whether heads and ramps answer every token, not the input as a whole
    by_label = False  # whether each label is answered by itself, yes or no
    by_score = False  # whether the network has one output, which is a score, and no labels to choose from
    numbers = False  # whether that score is the output itself, not its sigmoid
    # What promises may be about; the first one is the default.
    metrics: tuple[Metric, ...] = ("accuracy", "agreement", "worst-class", "macro-f1", "mcc")
    answered = "inputs"  # the plural noun for the things that get a label each
    loaders: Mapping[str, str] = MappingProxyType(  # Hugging Face's classes for networks that read texts or images
        {"text": "AutoModelForSequenceClassification", "image": "AutoModelForImageClassification"}
    )
    tensors: Tensors = MappingProxyType({"label": ("INT64", []), "score": ("FP32", []), "name": ("BYTES", [])})

    @property
    def several(self) -> bool:
        """Whether an input has several answers: one for each word, or for each label."""
        return self.by_token or self.by_label

    def choices(self, num_labels: int) -> int:
        """The number of answers among which a policy sees one chosen."""
        return 2 if self.by_label else num_labels

    def ramp_width(self, num_labels: int) -> int:
        """The outputs of a ramp. Of a score it gives two (`near` in deployments/exits.py)."""
        return 2 if self.by_score else num_labels

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
    # Inputs with fewer labels than another input of the request are padded with -1, 0.0 and "".
    tensors: Tensors = MappingProxyType(
        {
            "labels": ("INT64", []),
            "label": ("INT64", [-1]),
            "score": ("FP32", [-1]),
            "name": ("BYTES", [-1]),
        }
    )

    def named(self, label: Label, names: Sequence[str]) -> tuple[str, ...]:
        """The names of the labels that an input has."""
        return tuple(name for name, has in zip(names, _parts_of(label), strict=True) if has)

    def output(self, answer: TaskAnswer, names: Sequence[str], top: int = 0) -> Outputs:
        (probabilities,) = self.probabilities([answer])
        own = [label for label, has in enumerate(_parts_of(answer.label)) if has]
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
        listed = [self.output(answer, names)["labels"] for answer in answers]
        counts = np.array([len(labels) for labels in listed], np.int64)

        def column(part: str, dtype: Any, padding: Any) -> NDArray[Any]:
            return _padded(counts, [[each[part] for each in labels] for labels in listed], dtype, padding)

        return {
            "labels": counts,
            "label": column("label", np.int64, -1),
            "score": column("score", np.float32, 0.0),
            "name": column("name", object, ""),
        }

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
    # Texts with fewer words than the longest of a request are padded with -1, 0.0 and "".
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
        return tuple(names[number] for number in _parts_of(label))

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
        counts = np.array([len(_words_of(answer).starts) for answer in answers], np.int64)

        def padded(rows: Sequence[Sequence[Any]], dtype: Any, padding: Any) -> NDArray[Any]:
            return _padded(counts, rows, dtype, padding)

        return {
            "words": counts,
            "label": padded([_parts_of(answer.label) for answer in answers], np.int64, -1),
            "score": padded([_parts_of(answer.score) for answer in answers], np.float32, 0.0),
            "name": padded([self.named(answer.label, names) for answer in answers], object, ""),
            "start": padded([_words_of(answer).starts for answer in answers], np.int64, -1),
            "end": padded([_words_of(answer).ends for answer in answers], np.int64, -1),
        }

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


def _padded(counts: NDArray[np.int64], rows: Sequence[Sequence[Any]], dtype: Any, padding: Any) -> NDArray[Any]:
    """Rows of unlike lengths (`counts`) as one table."""
    present = np.arange(counts.max(initial=0)) < counts[:, None]
    table = np.full(present.shape, padding, dtype)
    table[present] = [value for row in rows for value in row]
    return table


def tokens_of(answer: TaskAnswer, names: Sequence[str]) -> list[Outputs]:
    """Every word with its label."""
    words, labels = _words_of(answer), _parts_of(answer.label)
    return [
        {"label": label, "name": names[label], "score": score, "word": words.text[at:end], "start": at, "end": end}
        for label, score, at, end in zip(labels, _parts_of(answer.score), words.starts, words.ends, strict=True)
    ]


@dataclass(frozen=True)
class Tag:
    """The meaning of a word's label: the kind of its entity ("": none), and the word's place in the entity."""

    place: str
    kind: str

    @classmethod
    def of(cls, name: str) -> "Tag":
        """Parse a label of any common scheme: BIO, BIOES, BILOU, or kinds alone.

        >>> [(tag.place, tag.kind) for tag in map(Tag.of, ("B-PER", "L-PER", "PER", "O"))]
        [('B', 'PER'), ('E', 'PER'), ('I', 'PER'), ('', '')]
        """
        if name == OUTSIDE:
            return cls("", "")
        place = PLACES.get(name[:2])
        return cls(place, name[2:]) if place else cls("I", name)

    def follows(self, before: "Tag") -> bool:
        """Whether the word belongs to the same entity as the word before it."""
        return self.kind == before.kind and before.place in ("B", "I") and self.place in ("I", "E")


NOWHERE = Tag("", "")
PLACES = {"B-": "B", "I-": "I", "E-": "E", "L-": "E", "S-": "S", "U-": "S"}  # begins, inside, ends, single


def entities_of(tokens: Sequence[Outputs], text: str) -> list[Outputs]:
    """Join neighbouring words of one kind, as transformers' pipeline does with `aggregation_strategy="first"`.

    >>> named = [("B-PER", 0.9, 0, 3), ("I-PER", 0.7, 4, 7), ("O", 0.9, 8, 11), ("B-LOC", 0.5, 12, 15)]
    >>> tokens = [{"name": name, "score": score, "start": start, "end": end} for name, score, start, end in named]
    >>> [(each["entity_group"], each["score"], each["word"]) for each in entities_of(tokens, "Ada Bee saw Rom")]
    [('PER', 0.8, 'Ada Bee'), ('LOC', 0.5, 'Rom')]
    """
    groups: list[tuple[str, list[Outputs]]] = []
    before = NOWHERE
    for token in tokens:
        tag = Tag.of(token["name"])
        if tag.follows(before):
            groups[-1][1].append(token)
        elif tag.kind:
            groups.append((tag.kind, [token]))
        before = tag
    return [
        {
            "entity_group": kind,
            "score": sum(token["score"] for token in group) / len(group),
            "word": text[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for kind, group in groups
    ]


def _parts_of(value: Any) -> Any:
    """The parts of an answer: one for each word, or for each label."""
    assert isinstance(value, tuple), "This is a bug: every word, or every label, has an answer."
    return value


def _words_of(answer: TaskAnswer) -> Words:
    assert answer.words, "This is a bug: the words of a text are known where it was encoded."
    return answer.words


CLASSIFICATION = Task()
LABELS = MultiLabelClassification()
TOKENS = TokenClassification()
SCORING, REGRESSION = Scoring(), Regression()
TASKS: tuple[Task, ...] = (CLASSIFICATION, LABELS, TOKENS, SCORING, REGRESSION)


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
