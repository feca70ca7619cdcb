"""The protocol's paths over HTTP."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.front.answers import Answer
from deployments.front.bodies import size_of
from deployments.front.open_inference import protocol
from deployments.front.open_inference.protocol import VERSION, check
from deployments.front.open_inference.requests import InferRequest, InferResponse, schema_of
from deployments.front.open_inference.tensors import JSON_BYTES_HEADER, read, write
from deployments.front.service import Content, Service

_OCTETS = {"schema": {"type": "string", "format": "binary"}}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": schema_of(InferRequest)}, "application/octet-stream": _OCTETS},
    }
}


def routes(
    service: Service, body_of: Callable[[Request], Awaitable[bytes]], within_s: Callable[[Request], float | None]
) -> APIRouter:
    """`/v2/...` for this service."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("")
    async def server() -> dict[str, Any]:
        """What speaks here."""
        return protocol.server()

    @router.get("/health/live")
    async def live() -> Response:
        """Alive."""
        return Response()

    @router.get("/health/ready")
    async def ready() -> Response:
        """Every part of the network has a replica."""
        return Response(status_code=503 if await service.missing() else 200)

    @router.get("/models/{name}")
    @router.get("/models/{name}/versions/{version}")
    async def metadata(name: str, version: str = VERSION) -> dict[str, Any]:
        """One tensor goes in, whose first dimension counts the inputs; what comes out has a row for each."""
        check(service, name, version)
        return protocol.metadata(service) | {"properties": {"promise": service.promised}}

    @router.get("/models/{name}/ready")
    @router.get("/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str = VERSION) -> Response:
        """The one model that there is has a replica for each of its parts."""
        check(service, name, version)
        return await ready()

    @router.get("/models/{name}/config")
    @router.get("/models/{name}/versions/{version}/config")
    async def configuration(name: str, version: str = VERSION) -> dict[str, Any]:
        """As much of Triton's configuration as perf_analyzer asks for."""
        check(service, name, version)
        return protocol.configuration(service)

    @router.get("/models/{name}/stats")
    @router.get("/models/{name}/versions/{version}/stats")
    async def statistics(name: str, version: str = VERSION) -> dict[str, Any]:
        """Counts and times since the start, as Triton tells them."""
        check(service, name, version)
        return await protocol.statistics(service)

    described: dict[str, Any] = {
        "response_model": InferResponse,
        "response_model_exclude_none": True,
        "openapi_extra": _BODY,
    }

    @router.post("/models/{name}/infer", **described)
    @router.post("/models/{name}/versions/{version}/infer", **described)
    async def infer(request: Request, name: str, version: str = VERSION) -> Response:
        """Answer every row of the one tensor; JSON, or binary where the request says so."""
        with service.counted():
            check(service, name, version)
            headers = dict(request.scope["headers"])
            visit = service.visit("rest", size_of(headers), headers, within_s(request))
            body, json_size = await body_of(request), request.headers.get(JSON_BYTES_HEADER)
            reply, json_bytes = await service.answer(visit, lambda: _content(service, body, json_size))
        if json_bytes is None:
            return Response(reply, media_type="application/json")
        return Response(reply, headers={JSON_BYTES_HEADER: str(json_bytes)}, media_type="application/octet-stream")

    return router


def _content(service: Service, body: bytes, json_size: str | None) -> Content[tuple[bytes, int | None]]:
    asked = read(body, json_size, service.sizes)

    def written(answers: list[Answer]) -> tuple[bytes, int | None]:
        return write(asked, service.name, protocol.columns(service, answers))

    return Content(service.encoded_each(asked.values), written, asked.within_s)
