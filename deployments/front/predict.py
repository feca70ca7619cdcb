"""Answers POST requests for predictions in plain ASGI, without FastAPI: this path determines the cost of most requests.

A path takes requests in one or more forms: /predict in our own, and others in those of other servers (`protocols/`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from isobatch.deployments.class_maps import FORMS, MOST_COLOURS, MOST_COMPARED, MOST_PIXELS, MOST_TOGETHER, MapStyle
from isobatch.deployments.front.answers import Answer, RefusedError, shown
from isobatch.deployments.front.bodies import FIELDS, content_of, sent_body, size_of, unpacked
from isobatch.deployments.front.canary import PARKED, TIME_SHARE, Canary, Headers, NamedReply
from isobatch.deployments.front.headers import headers_in
from isobatch.deployments.front.incoming import Content, IncomingRequest
from isobatch.deployments.front.service import Service
from isobatch.deployments.map_tasks import PixelClassification
from isobatch.deployments.tasks import SCORES, Task, are_scores, is_count, top_of

_JSON = b"application/json"

encode = msgspec.json.Encoder().encode


class Form:
    """One form of requests and their answers."""

    def marked(self, content: object) -> bool:
        """Whether a body, read as JSON, has a field that only this form of its path has."""
        return False

    def read(self, content: object) -> Content[bytes]:
        """The inputs of a body, and how their answers are written. Raises `RefusedError` for a wrong body."""
        raise NotImplementedError

    def restyle(self, refused: RefusedError) -> None:
        """Give a refusal the status and the JSON that clients of this form expect: by default, our own."""


@dataclass
class _OpenRequest:
    """One request on its way to its reply."""

    headers: Headers
    form: Form  # of its body; until the body is read, the first one of the path
    names: list[object] | None = None  # of the labels in its reply, by input, for comparisons


class Predict:
    """The ASGI application of a path; it raises `RefusedError` for a request that gets no answer.

    A body without the mark of any form is read as the first one. `kind`: the name of the path in costs and traces.
    `canary`: the application that computes a share of the requests too.
    """

    def __init__(self, service: Service, *forms: Form, kind: str = "predict", canary: Canary | None = None) -> None:
        self._service, self._forms, self._kind, self._canary = service, forms, kind, canary

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _OpenRequest(headers_in(scope), self._forms[0])
        try:
            with self._service.counted(self._kind, request.headers) as span:
                reply = await self._reply(request, receive)
        except RefusedError as refused:
            request.form.restyle(refused)
            raise
        headers = [(b"content-type", _JSON), (b"content-length", b"%d" % len(reply))]
        if span:
            headers.append((b"traceparent", span.traceparent.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    async def computed(self, headers: Headers, body: bytes) -> NamedReply:
        """The reply to a request that another front sends, because this network is its canary."""
        if self._service.wake_if_parked():
            return PARKED
        with self._service.counted(self._kind, headers):
            incoming = self._service.register(self._kind, len(body), headers, part=TIME_SHARE)
            return await self._named_reply(incoming, _OpenRequest(headers, self._forms[0]), body)

    async def _reply(self, request: _OpenRequest, receive: Receive) -> bytes:
        headers = request.headers
        incoming = self._service.register(self._kind, size_of(headers), headers)
        body = await sent_body(headers, receive, self._service.config.max_body_bytes)
        if not (self._canary and self._canary.takes(incoming)):
            return await self._answer(incoming, request, body)
        own = self._named_reply(incoming, request, body)
        return await self._canary.reply(own, body, headers, self._service.left_s(incoming))

    async def _named_reply(self, incoming: IncomingRequest, request: _OpenRequest, body: bytes) -> NamedReply:
        request.names = []
        return NamedReply(await self._answer(incoming, request, body), tuple(request.names))

    async def _answer(self, incoming: IncomingRequest, request: _OpenRequest, body: bytes) -> bytes:
        def read() -> Content[bytes]:
            whole = unpacked(request.headers, body, self._service.config.max_body_bytes)
            content = content_of(request.headers, whole, self._service.sizes)
            request.form = next((each for each in self._forms if each.marked(content)), self._forms[0])
            checked = request.form.read(content)
            if request.names is None:
                return checked
            return replace(checked, write=partial(self._write_named, request.names, checked.write))

        return await self._service.answer(incoming, read, len(body))

    def _write_named(self, names: list[object], write: Callable[[list[Answer]], bytes], answers: list[Answer]) -> bytes:
        """Write a reply, and add the names of its labels to `names`."""
        name, labels = self._service.task.named, self._service.labels
        names.extend(name(answer.label, labels) for answer in answers)
        return write(answers)


class OwnForm(Form):
    """Our own form of POST /predict: any network, any number of inputs, and all facts about each answer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._top = top_of(service.config.scores, len(service.labels))

    def read(self, content: object) -> Content[bytes]:
        request, task = request_in(content), self._service.task
        top = self._top if request.scores is None else top_of(request.scores, len(self._service.labels))
        if request.style:
            task = _styled(task, request.style, len(self._service.labels))
        inputs = self._service.encoded(request.inputs)
        if request.style and request.style.size:
            _check_maps(len(inputs) * prod(request.style.size), len(self._service.labels))
        return Content(inputs, lambda answers: self._written(answers, task, top))

    def _written(self, answers: Sequence[Answer], task: Task, top: int) -> bytes:
        labels = self._service.labels
        outputs = [output_of(answer, task, labels, top) for answer in answers]
        return encode(self._service.heading | {"outputs": outputs})


def _check_maps(pixels: int, labels: int) -> None:
    """Raise `RefusedError` for maps that would take too much memory or time, however small their pictures are."""
    if pixels > MOST_TOGETHER:
        raise RefusedError(422, f"the maps have {pixels} pixels together: {MOST_TOGETHER} are allowed")
    if (values := pixels * labels) > MOST_COMPARED:
        sentence = f"the maps have {pixels} pixels together, of {labels} labels: {values} values"
        raise RefusedError(422, f"{sentence}, and {MOST_COMPARED} are allowed")


def _styled(task: Task, style: MapStyle, labels: int) -> Task:
    """The task with maps in the style that a request asks for."""
    if not isinstance(task, PixelClassification):
        raise RefusedError(400, f"'map' and 'size' are for networks that label pixels: this one labels {task.answered}")
    if style.form == "png" and labels > MOST_COLOURS:
        raise RefusedError(400, f"'map' is 'png', which holds {MOST_COLOURS} labels; this network has {labels}")
    return task.styled(style)


class OwnRequest(NamedTuple):
    """A request in our own form. `scores`: how many labels each answer lists; None: as the server is configured.

    `style`: how maps are written where pixels are labelled; None: the request says nothing of it.
    """

    inputs: object
    scores: str | int | None = None
    style: MapStyle | None = None


def request_in(content: object) -> OwnRequest:
    """
    >>> request_in({"inputs": "a text", "top_k": 2})
    OwnRequest(inputs='a text', scores=2, style=None)
    """
    if not isinstance(content, dict) or "inputs" not in content:
        raise RefusedError(400, 'the body must be {"inputs": ...}: one input or a list of them')
    if len(content) == 1:
        return OwnRequest(content["inputs"])
    for name in content:
        if name not in ("inputs", *FIELDS):
            named = "'inputs', and may have 'scores' or 'top_k', and for maps 'map' and 'size'"
            raise RefusedError(400, f"{shown(name)} is not known: the body has {named}")
    if {"scores", "top_k"} <= content.keys():
        raise RefusedError(400, "'scores' and 'top_k' both say how many labels to list: give one of them")
    scores, top = content.get("scores"), content.get("top_k")
    if "top_k" in content and not is_count(top):
        raise RefusedError(400, f"'top_k' is {shown(top)}: it must be a whole number of at least 1")
    if "scores" in content and not are_scores(scores):
        raise RefusedError(400, f"'scores' is {shown(scores)}: {SCORES}")
    return OwnRequest(content["inputs"], top if "top_k" in content else scores, _style_in(content))


def _style_in(content: Mapping[str, Any]) -> MapStyle | None:
    if not {"map", "size"} & content.keys():
        return None
    form, size = content.get("map", FORMS[0]), content.get("size")
    if form not in FORMS:
        raise RefusedError(400, f"'map' is {shown(form)}: it must be one of {', '.join(FORMS)}")
    if size is None:
        return MapStyle(form)
    if not (
        isinstance(size, list) and len(size) == 2 and all(map(is_count, size)) and size[0] * size[1] <= MOST_PIXELS
    ):
        raise RefusedError(400, f"'size' is {shown(size)}: it must be [height, width], {MOST_PIXELS} pixels at most")
    return MapStyle(form, (size[0], size[1]))


def output_of(answer: Answer, task: Task, labels: Sequence[str], top: int) -> dict[str, Any]:
    """The answer's JSON, as `schemas.py` describes it; times are rounded to microseconds."""
    output = task.output(answer, labels, top) | {
        "exit_block": answer.exit_block,
        "queued_ms": round(answer.queued_ms, 3),
        "computed_ms": round(answer.computed_ms, 3),
        "splits": answer.steps,
    }
    if answer.level is not None:
        output["level"] = answer.level
    return output | {"truncated": True} if answer.truncated else output
