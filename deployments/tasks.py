"""What a network answers: one label for each input, or one for each word of a text.

A `Task` is all that depends on it: which heads have it, how an answer is named, written as JSON, and as tensors. What
leaves, and how two answers compare, follows from the answers themselves (`profiles/model.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from profiles.errors import UserError
from profiles.model import Label, Probability, Words

ONE_LABEL = "single_label_classification"  # as Hugging Face calls it
Outputs = dict[str, Any]
OUTSIDE = "O"  # what words are called that belong to no entity
Tensors = Mapping[str, tuple[str, list[int]]]  # by name: the datatype, and the sizes behind the number of inputs


def check_one_label(folder: Path, problem: str | None) -> None:
    """Only one label an input is served: such heads alone say by a softmax how sure they are."""
    if problem not in (None, ONE_LABEL):
        raise UserError(f"{folder}: its problem_type is {problem}: only heads that give one label an input are served")


class TaskAnswer(Protocol):
    """What an input was answered, as a task writes it."""

    @property
    def label(self) -> Label: ...

    @property
    def score(self) -> Probability: ...

    @property
    def words(self) -> Words | None: ...


class Task(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def heads(self) -> str:
        """How `architectures` in a checkpoint's config.json end; "": however those of no other task do."""
        ...

    @property
    def by_token(self) -> bool:
        """Whether heads and ramps answer every token, and not an input as a whole."""
        ...

    @property
    def answered(self) -> str:
        """What has a label each, in words."""
        ...

    @property
    def loaders(self) -> Mapping[str, str]:
        """Hugging Face's class for networks that read texts, or images."""
        ...

    @property
    def tensors(self) -> Tensors:
        """What `columns` gives."""
        ...

    def named(self, label: Label, names: Sequence[str]) -> Any:
        """What the checkpoint calls an answer."""
        ...

    def output(self, told: TaskAnswer, names: Sequence[str]) -> Outputs:
        """An answer as JSON."""
        ...

    def heard(self, output: Outputs) -> tuple[Label, Any, Probability]:
        """The answer, its name and its score in what `output` gives."""
        ...

    def columns(self, told: Sequence[TaskAnswer], names: Sequence[str]) -> Outputs:
        """Answers as tensors: numbers as arrays, names as lists."""
        ...


class Classification:
    """One label for each input."""

    name, heads, by_token, answered = "classification", "", False, "inputs"
    loaders: Mapping[str, str] = MappingProxyType(
        {"text": "AutoModelForSequenceClassification", "image": "AutoModelForImageClassification"}
    )
    tensors: Tensors = MappingProxyType({"label": ("INT64", []), "score": ("FP32", []), "name": ("BYTES", [])})

    def named(self, label: Label, names: Sequence[str]) -> str:
        assert isinstance(label, int), "This is a bug: an input has one label."
        return names[label]

    def output(self, told: TaskAnswer, names: Sequence[str]) -> Outputs:
        return {"label": told.label, "name": self.named(told.label, names), "score": told.score}

    def heard(self, output: Outputs) -> tuple[Label, Any, Probability]:
        return output["label"], output["name"], output["score"]

    def columns(self, told: Sequence[TaskAnswer], names: Sequence[str]) -> Outputs:
        return {
            "label": np.array([each.label for each in told], np.int64),
            "score": np.array([each.score for each in told], np.float32),
            "name": [self.named(each.label, names) for each in told],
        }


class TokenClassification:
    """One label for each word of a text: that of its first token. What surrounds a text has no answer."""

    name, heads, by_token, answered = "token-classification", "ForTokenClassification", True, "words"
    loaders: Mapping[str, str] = MappingProxyType({"text": "AutoModelForTokenClassification"})
    # Texts with fewer words than the longest of a request have -1, 0.0 and "" behind their ends.
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
        return tuple(names[each] for each in _several(label))

    def output(self, told: TaskAnswer, names: Sequence[str]) -> Outputs:
        tokens = tokens_of(told, names)
        return {"tokens": tokens, "entities": entities_of(tokens, _words_of(told).text)}

    def heard(self, output: Outputs) -> tuple[Label, Any, Probability]:
        labels, names, scores = (tuple(each[part] for each in output["tokens"]) for part in ("label", "name", "score"))
        return labels, names, scores

    def columns(self, told: Sequence[TaskAnswer], names: Sequence[str]) -> Outputs:
        counts = np.array([len(_words_of(each).starts) for each in told], np.int64)
        present = np.arange(counts.max(initial=0)) < counts[:, None]

        def padded(rows: Sequence[Sequence[Any]], dtype: Any, nothing: Any) -> NDArray[Any]:
            side_by_side = np.full(present.shape, nothing, dtype)
            side_by_side[present] = [value for row in rows for value in row]
            return side_by_side

        return {
            "words": counts,
            "label": padded([_several(each.label) for each in told], np.int64, -1),
            "score": padded([_several(each.score) for each in told], np.float32, 0.0),
            "name": padded([self.named(each.label, names) for each in told], object, ""),
            "start": padded([_words_of(each).starts for each in told], np.int64, -1),
            "end": padded([_words_of(each).ends for each in told], np.int64, -1),
        }


def tokens_of(told: TaskAnswer, names: Sequence[str]) -> list[Outputs]:
    """Every word with its label."""
    words, labels = _words_of(told), _several(told.label)
    return [
        {"label": label, "name": names[label], "score": score, "word": words.text[at:end], "start": at, "end": end}
        for label, score, at, end in zip(labels, _several(told.score), words.starts, words.ends, strict=True)
    ]


@dataclass(frozen=True)
class Tag:
    """What a label says of a word: of which kind its entity is (""; of none), and where the word stands in it."""

    place: str
    kind: str

    @classmethod
    def of(cls, name: str) -> "Tag":
        """A label of any of the usual schemes: BIO, BIOES, BILOU, or kinds alone.

        >>> [(tag.place, tag.kind) for tag in map(Tag.of, ("B-PER", "L-PER", "PER", "O"))]
        [('B', 'PER'), ('E', 'PER'), ('I', 'PER'), ('', '')]
        """
        if name == OUTSIDE:
            return cls("", "")
        place = PLACES.get(name[:2])
        return cls(place, name[2:]) if place else cls("I", name)

    def follows(self, before: "Tag") -> bool:
        """Whether the word belongs to the same entity as the one before it."""
        return self.kind == before.kind and before.place in ("B", "I") and self.place in ("I", "E")


NOWHERE = Tag("", "")
PLACES = {"B-": "B", "I-": "I", "E-": "E", "L-": "E", "S-": "S", "U-": "S"}  # begins, inside, ends, single


def entities_of(tokens: Sequence[Outputs], text: str) -> list[Outputs]:
    """Neighbours of one kind together, as transformers' pipeline does it with `aggregation_strategy="first"`.

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
            "score": sum(each["score"] for each in group) / len(group),
            "word": text[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for kind, group in groups
    ]


def _several(value: Any) -> Any:
    assert isinstance(value, tuple), "This is a bug: every word has an answer."
    return value


def _words_of(told: TaskAnswer) -> Words:
    assert told.words, "This is a bug: the words of a text are known where it was encoded."
    return told.words


CLASSIFICATION, TOKENS = Classification(), TokenClassification()
TASKS: tuple[Task, ...] = (CLASSIFICATION, TOKENS)


def task_of(model: object) -> Task:
    """What a network answers; one that does not say so classifies its inputs."""
    task: Task = getattr(model, "task", CLASSIFICATION)
    return task
