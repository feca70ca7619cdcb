"""The answer to one input, and the error for a request that gets no answer."""

import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.model import Label, Probability, Sides, Words

# Bytes of an error's sentence. JSON at most doubles them, so an error stays below 1 KiB.
LONGEST_SENTENCE = 480
_CUT = "..."
_LONG_WORD = re.compile(r"(\S{38})\S{4,}(\S{38})|\s{9,}")  # longer than any value that an error quotes, or blank
_LONGEST_VALUE = 60  # characters of a client's value that an error repeats
_LONGEST_LIST = 8  # items of a client's list that an error repeats


@dataclass(frozen=True)
class Step:
    """One launch that an input took part in."""

    block: int  # the first block of the launch
    queued_ms: float  # since the last step, or since the input was admitted
    computed_ms: float  # from the start of the launch until the input left or the launch ended
    inputs: int = 1  # of that launch, this one included


@dataclass(frozen=True)
class Answer:
    """One input's label or labels, or the labels of its words, and the launches that it took part in."""

    label: Label
    score: Probability  # the probability of `label`, after calibration
    exit_block: int  # the block after which the input left
    steps: tuple[Step, ...]
    truncated: bool = False  # the input was longer than the network reads, so its end was cut off
    level: int | None = None  # the level of the cascade that answered, from 0
    words: Words | Sides | None = None  # of a text whose words are labelled, or of a picture whose points are found
    # The calibrated logits of all labels; a row for each word if words are answered, of no and yes if labels are.
    logits: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)

    @property
    def queued_ms(self) -> float:
        return sum(step.queued_ms for step in self.steps)

    @property
    def computed_ms(self) -> float:
        """
        >>> Answer(7, 0.9, 3, (Step(0, 1.0, 2.0), Step(2, 0.5, 3.0))).computed_ms
        5.0
        """
        return sum(step.computed_ms for step in self.steps)


def finite(answers: list[Answer]) -> list[Answer]:
    for position, answer in enumerate(answers):
        if not np.isfinite(answer.score).all():
            raise RefusedError(422, f"input {position} has no finite answer: its numbers are too large")
    return answers


class RefusedError(Exception):
    """A request that gets no answer: the HTTP status, and one short sentence that names the wrong value.

    `shows_overload`: with 503 and 504, whether other requests are the reason. If not, this one was too large or too
    hurried.
    """

    shows_overload = True

    write: Callable[["RefusedError"], Any] | None = None  # its JSON in another server's style; None: in our own

    def __init__(self, status: int, sentence: str, retry_after_s: float | None = None) -> None:
        sentence = brief(sentence)
        super().__init__(status, sentence, retry_after_s)  # all arguments, so that it can be pickled
        self.status = status
        self.sentence = sentence
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.sentence


def brief(sentence: str) -> str:
    """The sentence as one printable line of at most `LONGEST_SENTENCE` bytes, without long words: it may repeat a part
    of a request.

    >>> brief("one\\nline"), len(brief("x" * 90))
    ('one line', 79)
    >>> len(brief("a word " * 10_000))
    480
    """
    if len(sentence) > 2 * LONGEST_SENTENCE:  # so that the work is bounded, too
        sentence = sentence[:LONGEST_SENTENCE] + _CUT + sentence[-LONGEST_SENTENCE:]
    printable = "".join(char if char.isprintable() else " " for char in sentence)
    line = _LONG_WORD.sub(r"\1...\2", printable).encode("utf-8", "replace")
    if len(line) > LONGEST_SENTENCE:
        end = LONGEST_SENTENCE // 3
        line = line[: LONGEST_SENTENCE - end - len(_CUT)] + _CUT.encode() + line[-end:]
    return line.decode("utf-8", "ignore")


def no_text(values: Iterable[object]) -> int | None:
    """The place of the first value that is no text.

    >>> no_text(["a", None]), no_text(["a", "b"])
    (1, None)
    """
    return next((place for place, value in enumerate(values) if not isinstance(value, str)), None)


def shown(value: object) -> str:
    """A client's value, shortened for an error. Only the beginning and the end of a long value are read.

    >>> shown("INT7"), shown({"a": 1}), len(shown("x" * 10_000))
    ("'INT7'", 'an object', 60)
    """
    return "an object" if isinstance(value, dict) else _repr.repr(value)


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _LONGEST_VALUE
_repr.maxlist = _LONGEST_LIST
