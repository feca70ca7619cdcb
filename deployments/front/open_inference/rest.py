"""The protocol's paths over HTTP."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.front.answers import Answer
from deployments.front.bodies import size_of
from deployments.front.open_inference import protocol
from deployments.front.open_inference.protocol import VERSION, check
from deployments.front.open_inference.requests import InferResponse
from deployments.front.open_inference.schemas import (
    AS_BYTES,
    ModelConfiguration,
    ModelMetadata,
    ServerMetadata,
    ServerStatistics,
    infer_body,
)
from deployments.front.open_inference.tensors import JSON_BYTES_HEADER, read, write
from deployments.front.openapi import READING, WITH_INPUTS, problems, told
from deployments.front.service import Content, Service

_EMPTY: dict[int | str, dict[str, Any]] = {
    200: {"description": "Yes.", "content": {}},
    503: {"description": "Not now.", "content": {}},
}


def routes(
    service: Service, body_of: Callable[[Request], Awaitable[bytes]], within_s: Callable[[Request], float | None]
) -> APIRouter:
    """`/v2/...` for this service."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("", **told(ServerMetadata, 401, 500))
    async def server() -> dict[str, Any]:
        """What speaks here."""
        return protocol.server()

    @router.get("/health/live", responses={200: _EMPTY[200]}, response_class=Response)
    async def live() -> Response:
        """Alive."""
        return Response()

    @router.get("/health/ready", responses=_EMPTY, response_class=Response)
    async def ready() -> Response:
        """Every part of the network has a replica."""
        return Response(status_code=503 if await service.missing() else 200)

    about = 401, 404, 500

    @router.get("/models/{name}", **told(ModelMetadata, *about))
    @router.get("/models/{name}/versions/{version}", **told(ModelMetadata, *about))
    async def metadata(name: str, version: str = VERSION) -> dict[str, Any]:
        """One tensor goes in, whose first dimension counts the inputs; what comes out has a row for each."""
        check(service, name, version)
        return protocol.metadata(service) | {"properties": {"promise": service.promised}}

    readiness: dict[str, Any] = {"responses": {**_EMPTY, **problems(*about)}, "response_class": Response}

    @router.get("/models/{name}/ready", **readiness)
    @router.get("/models/{name}/versions/{version}/ready", **readiness)
    async def model_ready(name: str, version: str = VERSION) -> Response:
        """The one model that there is has a replica for each of its parts."""
        check(service, name, version)
        return await ready()

    @router.get("/models/{name}/config", **told(ModelConfiguration, *about))
    @router.get("/models/{name}/versions/{version}/config", **told(ModelConfiguration, *about))
    async def configuration(name: str, version: str = VERSION) -> dict[str, Any]:
        """As much of Triton's configuration as perf_analyzer asks for."""
        check(service, name, version)
        return protocol.configuration(service)

    @router.get("/models/{name}/stats", **told(ServerStatistics, *about))
    @router.get("/models/{name}/versions/{version}/stats", **told(ServerStatistics, *about))
    async def statistics(name: str, version: str = VERSION) -> dict[str, Any]:
        """Counts and times since the start, as Triton tells them."""
        check(service, name, version)
        return await protocol.statistics(service)

    described = told(InferResponse, *READING, 404)
    described["responses"][200] |= AS_BYTES
    described["openapi_extra"] = WITH_INPUTS | infer_body(service.example.value)

    @router.post("/models/{name}/infer", **described)
    @router.post("/models/{name}/versions/{version}/infer", **described)
    async def infer(request: Request, name: str, version: str = VERSION) -> Response:
        """Answer every row of the one tensor; JSON, or binary where the request says so."""
        headers = dict(request.scope["headers"])
        with service.counted("rest", headers):
            check(service, name, version)
            visit = service.visit("rest", size_of(headers), headers, within_s(request))
            body, json_size = await body_of(request), request.headers.get(JSON_BYTES_HEADER)
            reply, json_bytes = await service.answer(visit, lambda: _content(service, body, json_size), len(body))
        if json_bytes is None:
            return Response(reply, media_type="application/json")
        return Response(reply, headers={JSON_BYTES_HEADER: str(json_bytes)}, media_type="application/octet-stream")

    return router


def _content(service: Service, body: bytes, json_size: str | None) -> Content[tuple[bytes, int | None]]:
    asked = read(body, json_size, service.sizes)

    def written(answers: list[Answer]) -> tuple[bytes, int | None]:
        return write(asked, service.name, protocol.columns(service, answers))

    return Content(service.encoded_each(asked.values), written, asked.within_s)
