"""The HTTP interface of a network that classifies: its life, and its paths, our own and those of other servers."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import Response
from starlette.types import ASGIApp

from isobatch.deployments.front import openapi
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.api import Api, api_of
from isobatch.deployments.front.bodies import json_in, sent_body, unpacked
from isobatch.deployments.front.canary import Canary
from isobatch.deployments.front.headers import headers_in
from isobatch.deployments.front.open_inference.rest import routes
from isobatch.deployments.front.open_inference.rpc import serving
from isobatch.deployments.front.page import show
from isobatch.deployments.front.predict import OwnForm, Predict
from isobatch.deployments.front.protocols import tei, vllm
from isobatch.deployments.front.protocols.forms import TextForm
from isobatch.deployments.front.schemas import PREDICTIONS, ErrorBody
from isobatch.deployments.front.service import Service

_PROBLEMS = openapi.PROBLEMS | {
    424: "The network failed, or it cannot answer such requests.",
    429: "The deadline cannot be met with the waiting requests; try again later.",
}
_TEI = (400, 408, 413, 415, 422, 424, 429)
_VLLM = (400, 404, 408, 413, 415, 500, 503, 504)
_TEXT, _OTHER = "a text to be classified", "another one"
_DOCUMENTS: dict[str, Any] = {"query": "a question", "documents": [_TEXT, _OTHER]}


@dataclass(frozen=True)
class _Path:
    """A path in the document of the interface, and how it answers."""

    path: str
    about: str
    forms: tuple[type[TextForm[Any]], ...]  # of the first one is the example
    example: Mapping[str, Any]
    reply: Any
    statuses: tuple[int, ...]
    error: Any


_CLASSIFY = (vllm.ClassifyForm,), {"input": [_TEXT, _OTHER]}, vllm.ClassifiedTexts, _VLLM
_SCORE = (vllm.ScoreForm,), {"text_1": "a question", "text_2": [_TEXT]}, vllm.ScoredTexts, _VLLM
_RERANK = (vllm.DocumentsForm,), _DOCUMENTS, vllm.RankedDocuments, _VLLM
_PATHS = (
    _Path("/classify", "The probabilities of all labels, as vLLM.", *_CLASSIFY, vllm.VllmError),
    _Path("/v1/classify", "The probabilities of all labels, as SGLang.", *_CLASSIFY, vllm.VllmError),
    _Path("/score", "The relevance of texts to texts, as vLLM.", *_SCORE, vllm.VllmError),
    _Path("/v1/score", "The relevance of texts to texts, as vLLM.", *_SCORE, vllm.VllmError),
    _Path(
        "/rerank", "Documents by relevance, as Jina; with `texts`, as TEI.", (vllm.DocumentsForm, tei.RerankForm),
        _DOCUMENTS, vllm.RankedDocuments | list[tei.Rank], tuple(sorted({*_VLLM, *_TEI})),
        vllm.RerankError | tei.TeiError,
    ),
    _Path("/v1/rerank", "Documents by relevance, as Jina and Cohere.", *_RERANK, vllm.RerankError),
    _Path("/v2/rerank", "Documents by relevance, as Cohere.", *_RERANK, vllm.RerankError),
)  # fmt: skip
_TEI_PREDICT = _Path(
    "/predict", "The probabilities of all labels, as TEI.", (tei.PipelineForm, tei.PredictForm), {"inputs": _TEXT},
    list[tei.LabelProbability] | list[list[tei.LabelProbability]], _TEI, tei.TeiError,
)  # fmt: skip


def create_api(service: Service, canary: Canary | None = None) -> Api:
    """The ASGI application of a service. `canary`: the application that computes a share of POST /predict too."""

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        await service.open()
        async with serving(service):
            yield
        await service.close()

    api = api_of(service, "Early-exit inference", life, Api)
    api.direct = _add_paths(api, service, canary)
    api.include_router(routes(service))
    show(api, service)
    return api


def _add_paths(api: Api, service: Service, canary: Canary | None) -> Mapping[str, ASGIApp]:
    """Describe the paths in an application's document, and return what answers them."""
    direct: dict[str, ASGIApp] = {}
    for each in (*((_TEI_PREDICT,) if service.predicts_as_tei else ()), *(_PATHS if service.classifies_texts else ())):
        described = openapi.documented(each.reply, *each.statuses, error=each.error, about=_PROBLEMS)
        described["responses"] |= openapi.problems(*openapi.BY_GUARD)
        fits = service.relevant is not None or not each.path.endswith(("rerank", "score"))  # these would be refused
        shown = openapi.examples(an_example=dict(each.example)) if fits else {}
        body = openapi.json_body(openapi.either(*(openapi.schema_of(form.body) for form in each.forms)), shown)
        options = {**described, "openapi_extra": openapi.WITH_INPUTS | body, "description": each.about}
        api.add_api_route(each.path, _answered_by_form, methods=["POST"], **options)
        # The first one also writes the refusals before a body is read. Where /predict is TEI's, it is TEI's.
        ordered = reversed(each.forms) if service.predicts_as_tei else each.forms
        forms = [form(service) for form in ordered]
        of_predict = canary if each.path == "/predict" else None
        direct[each.path] = Predict(service, *forms, kind=each.path.removeprefix("/"), canary=of_predict)
    if not service.predicts_as_tei:
        direct["/predict"] = _own_path(api, service, canary)
    if service.reads_text:
        _add_facts(api, service)
    return direct


def _own_path(api: Api, service: Service, canary: Canary | None) -> Predict:
    reply, statuses, error = PREDICTIONS[service.task.name], openapi.READING, ErrorBody
    forms = _TEI_PREDICT.forms if service.classifies_texts else ()
    about = "Answer one input or a list of them, in order"
    if forms:
        about += "; with `truncate` or `raw_scores`, as TEI; with `parameters`, as Hugging Face"
        reply, error = reply | _TEI_PREDICT.reply, error | _TEI_PREDICT.error
        statuses = tuple(sorted({*statuses, *_TEI}))
    described = openapi.documented(reply, *statuses, error=error, about=_PROBLEMS)
    others = (openapi.schema_of(form.body) for form in forms)
    request_format = openapi.WITH_INPUTS | openapi.predict_body(service.example.value, *others)
    options = {**described, "openapi_extra": request_format, "description": f"{about}."}
    api.add_api_route("/predict", _answered_by_form, methods=["POST"], **options)
    return Predict(service, OwnForm(service), *(form(service) for form in forms), canary=canary)


async def _answered_by_form() -> NoReturn:
    raise AssertionError("This is a bug: `Api` should have handed the request to `Predict`.")


def _add_facts(api: Api, service: Service) -> None:
    """Add the paths of TEI that compute nothing."""
    form = tei.TokenizeForm(service)
    described = openapi.documented(list[list[tei.SimpleToken]], *_TEI, error=tei.TeiError, about=_PROBLEMS)
    described["responses"] |= openapi.problems(*openapi.BY_GUARD)
    body = openapi.json_body(openapi.schema_of(tei.TokenizeBody), openapi.examples(a_text={"inputs": _TEXT}))

    @api.post("/tokenize", **described, openapi_extra=body)
    async def tokenize(request: Request) -> Response:
        """The tokens of texts, as TEI."""
        try:
            headers = headers_in(request.scope)
            gives_up_s = service.gives_up_s(headers)
            most = service.config.max_body_bytes
            sent = await sent_body(headers, request.receive, most)

            def work() -> Response:
                return openapi.in_json(form.tokens(json_in(unpacked(headers, sent, most))))

            return await service.long_work.run(work, gives_up_s)
        except RefusedError as refused:
            form.restyle(refused)
            raise

    @api.get("/info", **openapi.documented(tei.ServedInfo, *openapi.BY_GUARD))
    async def info() -> Response:
        """What is served, as TEI."""
        return openapi.in_json(tei.info(service).model_dump())
