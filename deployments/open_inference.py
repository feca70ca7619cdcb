"""The paths of the Open Inference Protocol (v2) over HTTP: what Triton's clients and KServe ask for."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.answers import Answer, RefusedError
from deployments.service import Service
from deployments.tensors import BYTES, HEADER, read, write

VERSION = "1"
_OUTPUTS = {"label": "INT64", "score": "FP32", "exit_block": "INT64", "name": BYTES}


def routes(
    service: Service, body_of: Callable[[Request], Awaitable[bytes]], within_s: Callable[[Request], float | None]
) -> APIRouter:
    """`/v2/...` for this service."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("")
    async def server() -> dict[str, Any]:
        """What speaks here."""
        return {"name": "isobatch", "version": VERSION, "extensions": ["binary_tensor_data"]}

    @router.get("/health/live")
    async def live() -> Response:
        """Alive."""
        return Response()

    @router.get("/health/ready")
    async def ready() -> Response:
        """Every part of the network has a replica."""
        return Response(status_code=503 if service.missing() else 200)

    @router.get("/models/{name}")
    @router.get("/models/{name}/versions/{version}")
    async def metadata(name: str, version: str = VERSION) -> dict[str, Any]:
        """One tensor goes in, whose first dimension counts the inputs; what comes out has a row for each."""
        _check(service, name, version)
        outputs = [{"name": output, "datatype": kind, "shape": [-1]} for output, kind in _OUTPUTS.items()]
        kind, shape = (BYTES, [-1]) if service.reads_text else ("FP32", [-1, -1, -1])
        inputs = [{"name": "inputs", "datatype": kind, "shape": shape}]
        return {"name": name, "versions": [VERSION], "platform": "isobatch", "inputs": inputs, "outputs": outputs}

    @router.get("/models/{name}/ready")
    @router.get("/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str = VERSION) -> Response:
        """As above, for the one model there is."""
        _check(service, name, version)
        return await ready()

    @router.post("/models/{name}/infer")
    @router.post("/models/{name}/versions/{version}/infer")
    async def infer(request: Request, name: str, version: str = VERSION) -> Response:
        """Answer every row of the one tensor; JSON, or binary where the request says so."""
        _check(service, name, version)
        asked = read(await body_of(request), request.headers.get(HEADER))
        answers = await service.predict_each(asked.values, within_s(request))
        content, json_bytes = write(asked, name, _columns(answers, service.labels))
        if json_bytes is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={HEADER: str(json_bytes)}, media_type="application/octet-stream")

    return router


def _check(service: Service, name: str, version: str) -> None:
    if (name, version) != (service.name, VERSION):
        raise RefusedError(
            404, f"there is no model {name!r} in version {version!r}: this is {service.name!r}, {VERSION!r}"
        )


def _columns(answers: list[Answer], labels: tuple[str, ...]) -> dict[str, Any]:
    return {
        "label": np.array([answer.label for answer in answers], np.int64),
        "score": np.array([answer.score for answer in answers], np.float32),
        "exit_block": np.array([answer.exit_block for answer in answers], np.int64),
        "name": [labels[answer.label] for answer in answers],
    }
