"""The interfaces of vLLM and SGLang: POST /classify, /score, and the /rerank that they share with Jina and Cohere."""

import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from isobatch.deployments.front.answers import Answer, RefusedError, no_text, shown
from isobatch.deployments.front.protocols import forms
from isobatch.deployments.front.schemas import Schema
from isobatch.deployments.transport.packed import Packed

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


def _about(refused: RefusedError) -> dict[str, Any]:
    kind = _TYPES.get(refused.status, "BadRequestError" if refused.status < 500 else "InternalServerError")
    return {"message": refused.sentence, "type": kind, "param": None, "code": refused.status}


class VllmErrorAbout(Schema):
    message: str = Field(description="One sentence that names the wrong value.")
    type: str
    param: None
    code: int


class VllmError(Schema):
    error: VllmErrorAbout


class RerankError(VllmError):
    detail: str
    message: str


class _VllmBody(forms.Body):
    model: str | None = Field(None, description="The name of the served network; none: the same.")
    truncate_prompt_tokens: Literal[-1] | None = Field(
        None, description="-1: texts are cut at the length that the network reads."
    )
    use_activation: bool | None = Field(
        None,
        validation_alias=AliasChoices("use_activation", "activation", "softmax"),
        description="False: logits, divided by their temperature, in place of probabilities.",
    )
    priority: Literal[0] = 0
    user: str | None = None
    rid: str | None = Field(None, description="SGLang's name of a request; it has no effect.")

    @property
    def raw(self) -> bool:
        return self.use_activation is False

    @property
    def truncates(self) -> bool:
        return self.truncate_prompt_tokens is not None


class _VllmForm(forms.TextForm[Any]):
    statuses: ClassVar[Mapping[int, int]] = {422: 400}

    @staticmethod
    def error(refused: RefusedError) -> Any:
        return {"error": _about(refused)}

    def checked(self, content: object) -> Any:
        body = super().checked(content)
        if body.model not in (None, self.service.name):
            raise RefusedError(404, f"the model {shown(body.model)} does not exist: this is {self.service.name!r}")
        return body

    def listed(self, prefix: str, inputs: Packed, **content: Any) -> dict[str, Any]:
        """A reply with this content, and the tokens that were read."""
        tokens = 0 if inputs.lengths is None else int(inputs.lengths.sum())
        used = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
        about = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return {**about, "model": self.service.name, **content, "usage": used}


class UsedTokens(Schema):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0]
    prompt_tokens_details: None


class _Listed(Schema):
    id: str
    object: Literal["list"]
    created: int = Field(description="Seconds since 1970.")
    model: str
    usage: UsedTokens


class ClassifyBody(_VllmBody):
    """A request for the probabilities of all labels."""

    input: forms.Texts = Field(description="A text or a list of texts.")


class ClassifiedText(Schema):
    index: int
    label: str
    probs: list[float] = Field(description="The probabilities of all labels, in the order of the labels.")
    num_classes: int


class ClassifiedTexts(_Listed):
    data: list[ClassifiedText]


class ClassifyForm(_VllmForm):
    """POST /classify."""

    body = ClassifyBody

    def inputs(self, body: ClassifyBody) -> Packed:
        return self.encoded(body.input, body.truncates, 400)

    def reply(self, body: ClassifyBody, inputs: Packed, answers: Sequence[Answer]) -> Any:
        labels = self.service.labels
        rows = self.label_scores(answers, body.raw)
        data = [
            {"index": index, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(labels)}
            for index, row in enumerate(rows)
        ]
        return self.listed("classify", inputs, data=data)


class ScoreBody(_VllmBody):
    """A request for the relevance of texts to texts: one to one, or one to many."""

    text_1: forms.Texts = Field(
        validation_alias=AliasChoices("text_1", "data_1", "queries"), description="The queries."
    )
    text_2: forms.Texts = Field(
        validation_alias=AliasChoices("text_2", "data_2", "documents"), description="The documents."
    )


class ScoredText(Schema):
    index: int
    object: Literal["score"]
    score: float


class ScoredTexts(_Listed):
    data: list[ScoredText]


class ScoreForm(_VllmForm):
    """POST /score."""

    body = ScoreBody

    def inputs(self, body: ScoreBody) -> Packed:
        self.check_relevant(400)
        queries, documents = body.text_1, body.text_2
        if len(queries) not in (1, len(documents)):
            numbers = f"text_1 has {len(queries)} texts and text_2 has {len(documents)}"
            raise RefusedError(400, f"{numbers}: they must be 1 and any number, or the same number")
        pairs = self.pairs(queries if len(queries) > 1 else repeat(queries[0]), documents)
        return self.encoded(pairs, body.truncates, 400)

    def reply(self, body: ScoreBody, inputs: Packed, answers: Sequence[Answer]) -> Any:
        scores = self.relevances(answers, body.raw)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return self.listed("score", inputs, data=data)


def _documents(value: object) -> object:
    """
    >>> _documents(["a text", {"text": "another"}])
    ['a text', 'another']
    """
    listed = value if isinstance(value, list) else []
    texts = [each["text"] if isinstance(each, dict) and each.keys() == {"text"} else each for each in listed]
    rule = 'must be a list of at least one document: a text, or {"text": ...} without other fields'
    if not texts:
        raise ValueError(rule)
    if (place := no_text(texts)) is not None:
        raise ValueError(f"{rule} (value {place} is neither)")
    return texts


class DocumentText(Schema):
    text: str


class DocumentsBody(_VllmBody):
    """A request for the order of documents by their relevance to a query."""

    query: str
    documents: Annotated[list[str], BeforeValidator(_documents)] = Field(
        description='Texts, or objects with one: {"text": ...}.',
        json_schema_extra={"minItems": 1, "items": {"anyOf": [{"type": "string"}, DocumentText.model_json_schema()]}},
    )
    top_n: int | None = Field(None, ge=0, description="How many of the best are returned; none or 0: all.")
    return_documents: bool = Field(True, description="Repeat the documents in the answer.")


class RankedDocument(Schema):
    index: int = Field(description="The position of the document in the request.")
    relevance_score: float
    document: DocumentText | None = None


class RankedDocuments(_Listed):
    results: list[RankedDocument]


class DocumentsForm(_VllmForm):
    """POST /rerank with `documents`: Jina's, Cohere's and vLLM's, which differ only in fields that others ignore."""

    body = DocumentsBody
    marks = frozenset({"documents"})

    @staticmethod
    def error(refused: RefusedError) -> Any:
        """Jina's clients read `detail`, Cohere's `message`, vLLM's `error`."""
        return {"error": _about(refused), "detail": refused.sentence, "message": refused.sentence}

    def best(self, body: DocumentsBody) -> int:
        return body.top_n or 0

    def inputs(self, body: DocumentsBody) -> Packed:
        self.check_relevant(400)
        pairs = self.pairs(repeat(body.query), body.documents)
        return self.encoded(pairs, body.truncates or None, 400)

    def reply(self, body: DocumentsBody, inputs: Packed, answers: Sequence[Answer]) -> Any:
        scores = self.relevances(answers, body.raw)
        results: list[dict[str, Any]] = []
        for index in forms.ranked(scores)[: body.top_n or None]:
            results.append({"index": index, "relevance_score": scores[index]})
            if body.return_documents:
                results[-1]["document"] = {"text": body.documents[index]}
        return self.listed("rerank", inputs, results=results)
