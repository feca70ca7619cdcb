"""The interface of text-embeddings-inference (TEI): POST /predict, /rerank and /tokenize, GET /info; and of Hugging
Face's InferenceClient: POST /predict."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, FailFast, Field

from isobatch.deployments.front.answers import Answer, RefusedError
from isobatch.deployments.front.api import VERSION
from isobatch.deployments.front.protocols import forms
from isobatch.deployments.front.schemas import Schema
from isobatch.deployments.front.service import Service
from isobatch.deployments.models.encode import CHARACTERS_PER_TOKEN, TextEncoder
from isobatch.deployments.transport.packed import Packed
from isobatch.profiles.model import probabilities_in

_TYPES = {
    413: "validation", 422: "tokenizer", 424: "backend", 429: "overloaded", 500: "backend", 503: "overloaded",
    504: "overloaded",
}  # fmt: skip
TOO_MANY = 413  # TEI's status for inputs that are too many or too long
MOST_CHARACTERS = 2**20  # of the texts of one request to /tokenize, together
MOST_TOKENIZED = 2**16  # tokens of the answer to one, each of which takes about 100 bytes


class TeiError(Schema):
    error: str = Field(description="One sentence that names the wrong value.")
    error_type: str


class _TruncatingBody(forms.Body):
    truncate: bool | None = Field(None, description="Cut texts that are too long; none: as this server is configured.")
    truncation_direction: Literal["right", "Right"] = Field("right", description="Texts are cut at their end.")
    raw_scores: bool = Field(False, description="Logits, divided by their temperature, in place of probabilities.")


def _pieces(value: object) -> object:
    """TEI's inputs: a text, a pair of texts, or a list of lists of one or two texts."""
    if isinstance(value, str):
        return value
    lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if not all(
        isinstance(each, list) and len(each) in (1, 2) and all(isinstance(text, str) for text in each) for each in lists
    ):
        raise ValueError("must be a text, a pair of texts, or a list of [text] and [text, text]")
    return value


class PredictBody(_TruncatingBody):
    """A request for the probabilities of all labels."""

    inputs: Annotated[Any, BeforeValidator(_pieces)] = Field(
        description="A text, a pair of texts, or a list of [text] or [text, text]."
    )


class LabelProbability(Schema):
    score: float
    label: str


class _TeiForm(forms.TextForm[Any]):
    statuses: ClassVar[Mapping[int, int]] = {500: 424, 503: 429, 504: 429}
    wrong = 422

    @staticmethod
    def error(refused: RefusedError) -> Any:
        return {"error": refused.sentence, "error_type": _TYPES.get(refused.status, "validation")}

    def label_scores(self, answers: Sequence[Answer], raw: bool) -> NDArray[np.float32]:
        """TEI takes the sigmoid of any single output, a number as well."""
        scores = super().label_scores(answers, raw)
        return probabilities_in(scores) if self.service.task.numbers and not raw else scores

    def check_count(self, inputs: int) -> None:
        if inputs > (most := self.service.sizes.max_inputs):
            raise RefusedError(TOO_MANY, f"batch size {inputs} > maximum allowed batch size {most}")


class PredictForm(_TeiForm):
    """POST /predict: every label with its probability, the most probable first."""

    body = PredictBody
    marks = frozenset({"truncate", "raw_scores", "truncation_direction"})

    def inputs(self, body: PredictBody) -> Packed:
        if self.service.task.by_label and not body.raw_scores:
            problem = "this network gives several labels, of which the softmax of this interface says nothing"
            raise RefusedError(424, f"{problem}: ask with raw_scores: true, and take the sigmoid of each score")
        inputs = body.inputs if _is_batch(body) else [body.inputs]
        self.check_count(len(inputs))
        texts = [each[0] if isinstance(each, list) and len(each) == 1 else each for each in inputs]  # [text] is a text
        return self.encoded(texts, body.truncate, TOO_MANY)

    def reply(self, body: PredictBody, inputs: Packed, answers: Sequence[Answer]) -> Any:
        rows, names = self.label_scores(answers, body.raw_scores).tolist(), self.service.labels
        lists = [[{"score": row[label], "label": names[label]} for label in forms.ranked(row)] for row in rows]
        return lists if _is_batch(body) else lists[0]


def _is_batch(body: PredictBody) -> bool:
    return isinstance(body.inputs, list) and isinstance(body.inputs[0], list)


class PipelineParameters(forms.Body):
    """What a pipeline of transformers may be called with."""

    top_k: int | None = Field(None, ge=1, description="How many of the best labels are returned; none: all.")
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = Field(
        None, description="none: logits, divided by their temperature, in place of probabilities."
    )


class PipelineBody(forms.Body):
    """A request for the probabilities of all labels, as InferenceClient sends it."""

    inputs: forms.Texts
    parameters: PipelineParameters = PipelineParameters()


class PipelineForm(forms.TextForm[Any]):
    """POST /predict with `parameters`: a list of labels for each text, the most probable first."""

    body = PipelineBody
    marks = frozenset({"parameters"})
    statuses: ClassVar[Mapping[int, int]] = {}
    wrong = 422
    error = staticmethod(_TeiForm.error)

    def inputs(self, body: PipelineBody) -> Packed:
        task, function = self.service.task, body.parameters.function_to_apply
        own = "none" if task.numbers else "sigmoid" if task.by_label or task.by_score else "softmax"
        if function not in (None, "none", own):
            fits = " or ".join(dict.fromkeys((own, "none")))
            raise RefusedError(422, f"parameters.function_to_apply = {function!r}: for this network it must be {fits}")
        return self.encoded(body.inputs, None, TOO_MANY)

    def reply(self, body: PipelineBody, inputs: Packed, answers: Sequence[Answer]) -> Any:
        wanted, names = body.parameters, self.service.labels
        rows = self.label_scores(answers, wanted.function_to_apply == "none").tolist()
        best = [forms.ranked(row)[: wanted.top_k] for row in rows]
        return [
            [{"score": row[at], "label": names[at]} for at in places] for row, places in zip(rows, best, strict=True)
        ]


class RerankBody(_TruncatingBody):
    """A request for the order of texts by their relevance to a query."""

    query: str
    texts: Annotated[list[str], FailFast()]  # an error for each of millions would take gigabytes
    return_text: bool = Field(False, description="Repeat the texts in the answer.")


class Rank(Schema):
    index: int = Field(description="The position of the text in the request.")
    text: str | None = None
    score: float


class RerankForm(_TeiForm):
    """POST /rerank with `texts`."""

    body = RerankBody
    marks = frozenset({"texts"})

    def inputs(self, body: RerankBody) -> Packed:
        self.check_relevant(424)
        if not body.texts:
            raise RefusedError(TOO_MANY, "`texts` cannot be empty")
        return self.encoded(self.pairs(repeat(body.query), body.texts), body.truncate, TOO_MANY)

    def reply(self, body: RerankBody, inputs: Packed, answers: Sequence[Answer]) -> Any:
        scores = self.relevances(answers, body.raw_scores)
        return [
            {"index": index, **({"text": body.texts[index]} if body.return_text else {}), "score": scores[index]}
            for index in forms.ranked(scores)
        ]


class TokenizeBody(forms.Body):
    """A request for the tokens of texts."""

    inputs: forms.Texts
    add_special_tokens: bool = True


class SimpleToken(Schema):
    id: int
    text: str
    special: bool
    start: int | None = Field(description="The position of its first character in the text.")
    stop: int | None


class TokenizeForm(_TeiForm):
    """POST /tokenize, which computes nothing."""

    body = TokenizeBody

    def tokens(self, content: object) -> list[list[dict[str, Any]]]:
        body, encoder = self.checked(content), self.service.texts
        if encoder is None or not encoder.tokenizer.is_fast:
            raise RefusedError(424, "this network has no tokenizer that gives the positions of tokens")
        self.check_count(len(body.inputs))
        most = CHARACTERS_PER_TOKEN * encoder.longest
        if longest := next((text for text in body.inputs if len(text) > most), None):
            raise RefusedError(TOO_MANY, f"a text has {len(longest)} characters: {most} are allowed")
        if (total := sum(map(len, body.inputs))) > MOST_CHARACTERS:
            raise RefusedError(TOO_MANY, f"the texts have {total} characters together: {MOST_CHARACTERS} are allowed")
        tokens, count = list[list[dict[str, Any]]](), 0
        for text in body.inputs:
            encoding = _encoding(encoder, text, body.add_special_tokens)
            if (count := count + len(encoding["input_ids"])) > MOST_TOKENIZED:
                raise RefusedError(TOO_MANY, f"the texts have {count} tokens or more: {MOST_TOKENIZED} are allowed")
            tokens.append(_simple(encoder, text, encoding))
        return tokens


def _encoding(encoder: TextEncoder, text: str, special: bool) -> Mapping[str, Any]:
    encoding: Mapping[str, Any] = encoder.tokenizer(
        text, add_special_tokens=special, truncation=False, return_offsets_mapping=True, return_special_tokens_mask=True
    )
    return encoding


def _simple(encoder: TextEncoder, text: str, encoding: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = encoder.tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    return [
        {"id": number, "text": name, "special": True, "start": None, "stop": None}
        if is_special
        else {"id": number, "text": text[start:stop], "special": False, "start": start, "stop": stop}
        for number, name, is_special, (start, stop) in zip(
            encoding["input_ids"], names, encoding["special_tokens_mask"], encoding["offset_mapping"], strict=True
        )
    ]


class ServedInfo(Schema):
    """What is served. Fields that have no meaning here are null."""

    model_id: str
    model_sha: None = None
    model_dtype: str
    model_type: dict[Literal["classifier", "reranker"], dict[Literal["id2label", "label2id"], dict[str, Any]]]
    max_concurrent_requests: int
    max_input_length: int | None
    max_batch_tokens: None = None
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int = 1
    version: str = VERSION
    sha: None = None
    docker_label: None = None


def info(service: Service) -> ServedInfo:
    """The content of GET /info."""
    config, numbered = service.config, list(enumerate(service.labels))
    by_number, by_name = {str(number): name for number, name in numbered}, {name: number for number, name in numbered}
    names = {"id2label": by_number, "label2id": by_name}
    return ServedInfo(
        model_id=service.name,
        model_dtype=config.dtype,
        model_type={"classifier" if service.relevant is None else "reranker": names},
        max_concurrent_requests=config.max_inside_all,
        max_input_length=service.texts.longest if service.texts else None,
        max_batch_requests=None if config.planned else config.max_batch,
        max_client_batch_size=config.most_inputs,
        auto_truncate=config.too_long == "truncate",
    )
