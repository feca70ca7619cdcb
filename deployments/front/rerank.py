"""POST /rerank: documents by their relevance to a query, as Jina, Cohere and vLLM answer."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from isobatch.deployments.front.answers import Answer, RefusedError, shown
from isobatch.deployments.front.bodies import validated
from isobatch.deployments.front.predict import Form, encode
from isobatch.deployments.front.schemas import Schema
from isobatch.deployments.front.service import Content, Service
from isobatch.deployments.transport.packed import Packed

STATUSES = (400, 404, 408, 413, 415, 500, 503, 504)
_TYPES = {404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


class RerankErrorAbout(Schema):
    message: str = Field(description="One sentence that names the wrong value.")
    type: str
    param: None
    code: int


class RerankError(Schema):
    """Jina's clients read `detail`, Cohere's `message`, vLLM's `error`."""

    error: RerankErrorAbout
    detail: str
    message: str


class _Body(BaseModel):
    """Unknown fields are refused: a client that sends one expects an effect."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class _Document(_Body):
    text: str


class RerankBody(_Body):
    """A request for the order of documents by their relevance to a query."""

    model: str | None = Field(None, description="The name of the served network; none: the same.")
    query: str
    documents: list[str | _Document] = Field(description='Texts, or objects with one: {"text": ...}.')
    top_n: int | None = Field(None, ge=0, description="How many of the best are returned; none or 0: all.")
    return_documents: bool = Field(True, description="Repeat the documents in the answer.")
    use_activation: bool | None = Field(
        None, description="False: logits, divided by their temperature, in place of probabilities."
    )
    user: str | None = Field(None, description="It has no effect.")

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class DocumentText(Schema):
    text: str


class RankedDocument(Schema):
    index: int = Field(description="The position of the document in the request.")
    relevance_score: float
    document: DocumentText | None = None


class UsedTokens(Schema):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0]
    prompt_tokens_details: None


class RankedDocuments(Schema):
    id: str
    object: Literal["list"]
    created: int = Field(description="Seconds since 1970.")
    model: str
    results: list[RankedDocument]
    usage: UsedTokens


class RerankForm(Form):
    """The requests of Jina, Cohere and vLLM, which differ only in fields that others ignore."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def restyle(self, refused: RefusedError) -> None:
        refused.status, refused.write = 400 if refused.status == 422 else refused.status, _written_error

    def read(self, content: object) -> Content[bytes]:
        service = self._service
        if unknown := isinstance(content, dict) and content.keys() - RerankBody.model_fields.keys():
            known = ", ".join(RerankBody.model_fields)
            raise RefusedError(400, f"{shown(min(unknown))} is not accepted; there are: {known}")
        body = validated(RerankBody, content)
        if body.model not in (None, service.name):
            raise RefusedError(404, f"the model {shown(body.model)} does not exist: this is {service.name!r}")
        if service.relevant is None:
            labels = f"this network has {len(service.labels)} labels"
            problem = f"{labels}, and none of them is named as that of relevant texts"
            raise RefusedError(400, f"{problem}: it is not a reranker (relevant_label: NAME in args: makes it one)")
        inputs = service.packed([[body.query, text] for text in body.texts])
        return Content(inputs, lambda answers: encode(self._reply(body, inputs, answers)), best=body.top_n or 0)

    def _reply(self, body: RerankBody, inputs: Packed, answers: Sequence[Answer]) -> dict[str, Any]:
        task = self._service.task
        rows = task.logits(answers) if body.use_activation is False else task.probabilities(answers)
        scores, results = rows[:, self._service.relevant].tolist(), list[dict[str, Any]]()
        for index in sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n or None]:
            results.append({"index": index, "relevance_score": scores[index]})
            if body.return_documents:
                results[-1]["document"] = {"text": body.texts[index]}
        tokens = 0 if inputs.lengths is None else int(inputs.lengths.sum())
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self._service.name,
            "results": results,
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }


def _written_error(refused: RefusedError) -> dict[str, Any]:
    kind = _TYPES.get(refused.status, "BadRequestError" if refused.status < 500 else "InternalServerError")
    about = {"message": refused.sentence, "type": kind, "param": None, "code": refused.status}
    return {"error": about, "detail": refused.sentence, "message": refused.sentence}
