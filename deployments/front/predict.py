"""Answers POST /predict in plain ASGI, without FastAPI, since this path determines the cost of most requests."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from deployments.front.answers import Answer, RefusedError, shown
from deployments.front.bodies import body_of, json_in, size_of
from deployments.front.headers import DEADLINE_HEADER, deadline_s
from deployments.front.service import Content, Service
from deployments.tasks import Task

_JSON = b"application/json"
_DEADLINE = DEADLINE_HEADER.encode()

_encode = msgspec.json.Encoder().encode


class Predict:
    """The ASGI application; it raises `RefusedError` for a request that gets no answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_headers = dict(scope["headers"])
        with self._service.counted("predict", request_headers) as span:
            reply = await self._reply(request_headers, receive)
        headers = [(b"content-type", _JSON), (b"content-length", b"%d" % len(reply))]
        if span:
            headers.append((b"traceparent", span.traceparent.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    async def _reply(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        service, deadline = self._service, headers.get(_DEADLINE)
        within_s = service.config.slo_ms / 1e3 if deadline is None else deadline_s(deadline.decode("latin-1"))
        incoming = service.register("predict", size_of(headers), headers, within_s)
        body = await body_of(headers, receive, service.config.max_body_bytes)
        return await service.answer(
            incoming, lambda: Content(service.encoded(inputs_in(body)), self._written), len(body)
        )

    def _written(self, answers: Sequence[Answer]) -> bytes:
        task, labels = self._service.task, self._service.labels
        outputs = [output_of(answer, task, labels) for answer in answers]
        return _encode(self._service.heading | {"outputs": outputs})


def inputs_in(body: bytes) -> object:
    """
    >>> inputs_in(b'{"inputs": "a text"}')
    'a text'
    """
    content = json_in(body)
    if not isinstance(content, dict) or "inputs" not in content:
        raise RefusedError(400, 'the body must be {"inputs": ...}: one input or a list of them')
    unknown = next((name for name in content if name != "inputs"), None)
    if unknown is not None:
        raise RefusedError(400, f"{shown(unknown)} is not known: the body has one field, 'inputs'")
    return content["inputs"]


def output_of(answer: Answer, task: Task, labels: Sequence[str]) -> dict[str, Any]:
    """The answer's JSON, as `schemas.py` describes it; times are rounded to microseconds."""
    steps = [
        {
            "block": step.block,
            "queued_ms": round(step.queued_ms, 3),
            "computed_ms": round(step.computed_ms, 3),
            "inputs": step.inputs,
        }
        for step in answer.steps
    ]
    output = task.output(answer, labels) | {
        "exit_block": answer.exit_block,
        "queued_ms": round(answer.queued_ms, 3),
        "computed_ms": round(answer.computed_ms, 3),
        "splits": steps,
    }
    if answer.level is not None:
        output["level"] = answer.level
    return output | {name: True for name in ("truncated", "degraded") if getattr(answer, name)}
