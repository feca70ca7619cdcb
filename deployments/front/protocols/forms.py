"""The common parts of other servers' forms: the check of a body, the form of errors, and the score of a document."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from isobatch.deployments.front.answers import Answer, RefusedError, no_text, shown
from isobatch.deployments.front.bodies import validated
from isobatch.deployments.front.incoming import Content
from isobatch.deployments.front.predict import Form, encode
from isobatch.deployments.front.service import Service
from isobatch.deployments.transport.packed import Packed


class Body(BaseModel):
    """The body of a request. Unknown fields are refused: a client that sends one expects an effect."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


AnyBody = TypeVar("AnyBody", bound=Body)


def _texts(value: object) -> object:
    """
    >>> _texts("a text"), _texts(["two", "texts"])
    (['a text'], ['two', 'texts'])
    """
    texts = [value] if isinstance(value, str) else value
    if texts == []:
        raise ValueError("must be a text or at least one text in a list")
    rule = "must be a text or a list of texts; numbers of tokens and parts of chats are not accepted"
    if not isinstance(texts, list):
        raise ValueError(rule)
    if (place := no_text(texts)) is not None:
        raise ValueError(f"{rule} (value {place} is no text)")
    return texts


_SEVERAL = {"type": "array", "items": {"type": "string"}, "minItems": 1}
Texts = Annotated[list[str], BeforeValidator(_texts), WithJsonSchema({"anyOf": [{"type": "string"}, _SEVERAL]})]


class TextForm(Form, Generic[AnyBody]):
    """A form of another server, whose inputs are texts or pairs of texts."""

    body: type[AnyBody]
    statuses: ClassVar[Mapping[int, int]]  # of errors, where this server has others than ours
    marks: ClassVar[frozenset[str]] = frozenset()  # fields that tell the form apart from others of its path
    wrong = 400  # the status for a body with other fields or values

    def __init__(self, service: Service) -> None:
        self.service = service

    @staticmethod
    def error(refused: RefusedError) -> Any:
        raise NotImplementedError

    def marked(self, content: object) -> bool:
        return isinstance(content, dict) and not self.marks.isdisjoint(content)

    def restyle(self, refused: RefusedError) -> None:
        refused.status, refused.write = self.statuses.get(refused.status, refused.status), self.error

    def read(self, content: object) -> Content[bytes]:
        body = self.checked(content)
        inputs = self.inputs(body)
        return Content(inputs, lambda answers: encode(self.reply(body, inputs, answers)), best=self.best(body))

    def best(self, body: AnyBody) -> int:
        """How many of the scores are returned, the highest ones; 0: all."""
        return 0

    def inputs(self, body: AnyBody) -> Packed:
        raise NotImplementedError

    def reply(self, body: AnyBody, inputs: Packed, answers: Sequence[Answer]) -> Any:
        raise NotImplementedError

    def checked(self, content: object) -> AnyBody:
        """The body of a request; raises a `RefusedError` that names the first wrong value.

        A field that is null counts as absent: clients send all their fields, with null for each that is not set.
        """
        if isinstance(content, dict):
            content = {name: value for name, value in content.items() if value is not None}
        if unknown := isinstance(content, dict) and content.keys() - _names_of(self.body):
            known = ", ".join(self.body.model_fields)
            raise RefusedError(self.wrong, f"{shown(min(unknown))} is not accepted; there are: {known}")
        return validated(self.body, content, self.wrong)

    def encoded(self, inputs: Sequence[Any], truncates: bool | None, too_long: int) -> Packed:
        """The encoded inputs. `truncates`: whether texts that are too long are cut, or refused with the status
        `too_long`; None: as this server is configured."""
        packed = self.service.packed(inputs, as_configured=truncates is None)
        if packed.truncated and truncates is False:
            raise RefusedError(too_long, f"input {min(packed.truncated)} has more tokens than the network reads")
        return packed

    def check_count(self, inputs: int) -> None:
        """Raise `RefusedError` for too many inputs."""
        self.service.sizes.check_count(inputs)

    def pairs(self, first: Iterable[str], second: Sequence[str]) -> list[list[str]]:
        """Texts side by side, as many as there are second ones; millions of pairs would take seconds."""
        self.check_count(len(second))
        return [list(pair) for pair in zip(first, second, strict=False)]

    def label_scores(self, answers: Sequence[Answer], raw: bool) -> NDArray[np.float32]:
        """The probabilities of all labels, or their logits (`raw`); a row for each answer."""
        task = self.service.task
        return task.logits(answers) if raw else task.probabilities(answers)

    def relevances(self, answers: Sequence[Answer], raw: bool) -> list[float]:
        """The score of each document: that of the relevant label."""
        scores: list[float] = self.label_scores(answers, raw)[:, self.service.relevant].tolist()
        return scores

    def check_relevant(self, status: int) -> None:
        """Raise `RefusedError` if it is not known which of the network's labels means that a document is relevant."""
        if self.service.relevant is None:
            labels = f"this network has {len(self.service.labels)} labels"
            problem = f"{labels}, and none of them is named as that of relevant texts"
            raise RefusedError(status, f"{problem}: it is not a reranker (relevant_label: NAME in args: makes it one)")


@cache
def _names_of(body: type[Body]) -> set[str]:
    """The names of the fields of a body, with those that other versions of the server use."""
    names = {
        name: field.validation_alias if isinstance(field.validation_alias, AliasChoices) else AliasChoices(name)
        for name, field in body.model_fields.items()
    }
    return {str(choice) for choices in names.values() for choice in choices.choices}


def ranked(scores: Sequence[float]) -> list[int]:
    """The positions of scores, the highest first.

    >>> ranked([0.2, 0.9, 0.2])
    [1, 0, 2]
    """
    return sorted(range(len(scores)), key=lambda position: -scores[position])
