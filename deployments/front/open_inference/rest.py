"""The protocol's paths over HTTP."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from isobatch.deployments.front.answers import Answer
from isobatch.deployments.front.bodies import sent_body, size_of, unpacked
from isobatch.deployments.front.headers import headers_in
from isobatch.deployments.front.incoming import Content
from isobatch.deployments.front.open_inference import protocol, schemas
from isobatch.deployments.front.open_inference.protocol import VERSION, DescribedModel, check, check_outputs, model_of
from isobatch.deployments.front.open_inference.tensors import JSON_BYTES_HEADER, read, write
from isobatch.deployments.front.openapi import BY_GUARD, READING, WITH_INPUTS, documented
from isobatch.deployments.front.service import Service


def _readiness(reply: type[schemas.ServerReady], *statuses: int) -> dict[str, Any]:
    route = documented(reply, *statuses)
    route["responses"][503] = {"model": reply, "description": "Not now."}
    return route


def routes(service: Service) -> APIRouter:
    """The paths `/v2/...` of a service."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])
    model = model_of(service)

    @router.get("", **documented(schemas.ServerMetadata, *BY_GUARD, 500))
    async def server() -> dict[str, Any]:
        """The server's name, version and extensions."""
        return protocol.server(model)

    @router.get("/health/live", **documented(schemas.ServerLive))
    async def live() -> dict[str, bool]:
        """The server is alive."""
        return {"live": True}

    @router.get("/health/ready", **_readiness(schemas.ServerReady))
    async def ready(response: Response) -> dict[str, Any]:
        """Every part of the network has a replica."""
        missing = bool(await service.missing())
        response.status_code = 503 if missing else 200
        return {"ready": not missing}

    errors = *BY_GUARD, 404, 500

    @router.get("/models/stats", **documented(schemas.ServerStatistics, *errors))  # before the path of any name
    @router.get("/models/{name}/stats", **documented(schemas.ServerStatistics, *errors))
    @router.get("/models/{name}/versions/{version}/stats", **documented(schemas.ServerStatistics, *errors))
    async def statistics(name: str = model.name, version: str = VERSION) -> dict[str, Any]:
        """Counts and times since the start, in Triton's format."""
        check(model, name, version)
        return await protocol.statistics(service)

    @router.get("/models/{name}", **documented(schemas.ModelMetadata, *errors))
    @router.get("/models/{name}/versions/{version}", **documented(schemas.ModelMetadata, *errors))
    async def metadata(name: str, version: str = VERSION) -> dict[str, Any]:
        """The input and output tensors. The first dimension of each is the number of inputs."""
        check(model, name, version)
        return protocol.metadata(model) | {"properties": {"promise": service.promised}}

    @router.get("/models/{name}/ready", **_readiness(schemas.ModelReady, *errors))
    @router.get("/models/{name}/versions/{version}/ready", **_readiness(schemas.ModelReady, *errors))
    async def model_ready(response: Response, name: str, version: str = VERSION) -> dict[str, Any]:
        """Every part of the model has a replica."""
        check(model, name, version)
        return {"name": name} | await ready(response)

    @router.get("/models/{name}/config", **documented(schemas.ModelConfiguration, *errors))
    @router.get("/models/{name}/versions/{version}/config", **documented(schemas.ModelConfiguration, *errors))
    async def configuration(name: str, version: str = VERSION) -> dict[str, Any]:
        """The part of Triton's configuration that perf_analyzer reads."""
        check(model, name, version)
        return protocol.configuration(model)

    described = documented(schemas.InferResponse, *READING, 404)
    described["responses"][200] |= schemas.AS_BYTES
    described["openapi_extra"] = WITH_INPUTS | schemas.infer_body(service.example.value)

    @router.post("/models/{name}/infer", **described)
    @router.post("/models/{name}/versions/{version}/infer", **described)
    async def infer(request: Request, name: str, version: str = VERSION) -> Response:
        """Answer every row of the input tensor, in JSON or binary as requested."""
        headers = headers_in(request.scope)
        with service.counted("rest", headers):
            check(model, name, version)
            incoming = service.register("rest", size_of(headers), headers)
            sent = await sent_body(headers, request.receive, service.config.max_body_bytes)
            json_size = request.headers.get(JSON_BYTES_HEADER)
            read = partial(_content, service, model, headers, sent, json_size)
            reply, json_bytes = await service.answer(incoming, read, len(sent))
        if json_bytes is None:
            return Response(reply, media_type="application/json")
        return Response(reply, headers={JSON_BYTES_HEADER: str(json_bytes)}, media_type="application/octet-stream")

    return router


def _content(
    service: Service, model: DescribedModel, headers: Mapping[bytes, bytes], sent: bytes, json_size: str | None
) -> Content[tuple[bytes, int | None]]:
    body = unpacked(headers, sent, service.config.max_body_bytes)
    request = read(body, json_size, service.sizes, not service.reads_pictures)
    names = model.usual_outputs if request.outputs is None else request.outputs
    check_outputs(model, names, request.best)
    protocol.check_scores(service, names, len(request.values))

    def written(answers: list[Answer]) -> tuple[bytes, int | None]:
        return write(request, service.name, protocol.columns(service, answers, names, request.best))

    return Content(service.encoded_each(request.values), written, request.within_s)
