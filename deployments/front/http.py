"""The HTTP interface of a network that classifies: its life and its paths."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from starlette.types import ASGIApp

from isobatch.deployments.front import openapi, rerank
from isobatch.deployments.front.api import Api, api_of
from isobatch.deployments.front.open_inference.rest import routes
from isobatch.deployments.front.open_inference.rpc import serving
from isobatch.deployments.front.page import show
from isobatch.deployments.front.predict import OwnForm, Predict
from isobatch.deployments.front.schemas import PREDICTIONS
from isobatch.deployments.front.service import Service

_RERANKING = ("/rerank", "/v1/rerank", "/v2/rerank")
_EXAMPLE = {"query": "a question", "documents": ["a text to be classified", "another one"]}


def create_api(service: Service) -> Api:
    """The ASGI application of a service."""

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        await service.open()
        async with serving(service):
            yield
        await service.close()

    api = api_of(service, "Early-exit inference", life, Api)
    api.direct = _add_paths(api, service)
    api.include_router(routes(service))
    show(api, service)
    return api


def _add_paths(api: Api, service: Service) -> Mapping[str, ASGIApp]:
    """Describe the paths in an application's document, and return what answers them."""
    described = openapi.documented(PREDICTIONS[service.task.name], *openapi.READING)
    body = openapi.predict_body(service.example.value)
    _add(api, "/predict", described, body, "Answer one input or a list of them, in order.")
    direct: dict[str, ASGIApp] = {"/predict": Predict(service, OwnForm(service))}
    if not service.reads_text or service.task.by_token:
        return direct
    described = openapi.documented(rerank.RankedDocuments, *rerank.STATUSES, error=rerank.RerankError)
    described["responses"] |= openapi.problems(401, 403)  # refused before any path is reached, in our own style
    shown = openapi.examples(an_example=_EXAMPLE) if service.relevant is not None else {}
    body = openapi.json_body(openapi.schema_of(rerank.RerankBody), shown)
    for path in _RERANKING:
        _add(api, path, described, body, "Documents by relevance, as Jina, Cohere and vLLM.")
        direct[path] = Predict(service, rerank.RerankForm(service), kind="rerank")
    return direct


def _add(api: Api, path: str, described: dict[str, Any], body: dict[str, Any], about: str) -> None:
    extra = openapi.WITH_INPUTS | body
    api.add_api_route(path, _answered_by_form, methods=["POST"], description=about, openapi_extra=extra, **described)


async def _answered_by_form() -> NoReturn:
    raise AssertionError("This is a bug: `Api` should have handed the request to `Predict`.")
