"""The OpenAPI document of an interface: its paths, their statuses, and bodies to try."""

from collections.abc import Mapping
from math import ceil
from typing import Any

import msgspec
from fastapi.responses import Response
from pydantic import BaseModel

from isobatch.deployments.class_maps import FORMS
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.headers import DEADLINE_HEADER, LONGEST_MS
from isobatch.deployments.front.schemas import ErrorBody

PROBLEMS = {
    400: "The body has the wrong form.",
    401: "The key is missing or wrong.",
    403: "A web page of another server sent this request, or it is for a host that is not this server.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large, compressed or decompressed.",
    415: "The compression of the body is not supported.",
    422: "The inputs do not fit the network.",
    500: "The network, or this server, failed.",
    503: "The deadline cannot be met with the waiting requests, a part of the network has no replica, or the server "
    "stops; try again later.",
    504: "The deadline passed before the answer was known.",
}
BY_GUARD = (401, 403)  # refused before any path is reached, in our own style
# The possible statuses of a request with inputs.
READING: tuple[int, ...] = (400, *BY_GUARD, 408, 413, 415, 422, 500, 503, 504)
_AN_INPUT = (
    "One input (a text, or an image as nested lists), or a list of inputs. "
    "If the network labels words, a text may be a list of its words."
)
_LONGEST_EXAMPLE = 2000  # characters of an example that people can read
_RETRY_AFTER = {"Retry-After": {"description": "Seconds until a retry is useful.", "schema": {"type": "integer"}}}


def problems(
    *statuses: int, error: Any = ErrorBody, about: Mapping[int, str] = PROBLEMS
) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` for these statuses; each body is an `error` in JSON."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        responses[status] = {"model": error, "description": about[status]}
        if status == 503:
            responses[status]["headers"] = _RETRY_AFTER
    return responses


def documented(model: Any, *statuses: int, **problem: Any) -> dict[str, Any]:
    """The arguments of a route's decorator for this response and these errors (see `problems`)."""
    responses: dict[int | str, dict[str, Any]] = {200: {"model": model, "description": "OK"}}
    return {"response_model": None, "responses": responses | problems(*statuses, **problem)}


def refusal_headers(refused: RefusedError) -> dict[str, str]:
    """The headers of a refusal: when to try again, and how to send the key."""
    headers = {"Retry-After": str(ceil(refused.retry_after_s))} if refused.retry_after_s else {}
    return headers | ({"WWW-Authenticate": "Bearer"} if refused.status == 401 else {})


def in_json(body: Any) -> Response:
    """A JSON response. FastAPI would copy the body value by value, which is slow for paths that are polled.

    >>> in_json({"exits": {0: 3}, "p99": float("nan")}).body
    b'{"exits":{"0":3},"p99":null}'
    """
    return Response(msgspec.json.encode(body, enc_hook=float), media_type="application/json")  # float: numpy's


def examples(**by_name: Any) -> dict[str, Any]:
    """OpenAPI examples of request bodies, by their titles."""
    return {name.replace("_", " "): {"value": body} for name, body in by_name.items()}


def schema_of(part: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema with each `$ref` replaced by its definition, since OpenAPI resolves them differently."""
    schema = part.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inlined(definitions[node["$ref"].rpartition("/")[2]])
            return {name: inlined(value) for name, value in node.items()}
        return [inlined(item) for item in node] if isinstance(node, list) else node

    inlined_schema: dict[str, Any] = inlined(schema)
    return inlined_schema


def json_body(schema: Mapping[str, Any], shown: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """OpenAPI's description of a body: its schema, the `examples` that are shown, and `others` by their media type."""
    content = {"schema": schema} | ({"examples": shown} if shown else {})
    return {"requestBody": {"required": True, "content": {"application/json": content, **others}}}


def either(first: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a body in one of several forms. A field that several of them have is as in the first.

    >>> either({"properties": {"a": 1, "b": 1}, "required": ["a", "b"]}, {"properties": {"a": 2}, "required": ["a"]})
    {'properties': {'a': 1, 'b': 1}, 'required': ['a']}
    """
    further = {name: field for each in others for name, field in each["properties"].items()}
    required = [name for name in first["required"] if all(name in each["required"] for each in others)]
    return {**first, "properties": first["properties"] | further | first["properties"], "required": required}


def fits(example: Any | None) -> bool:
    """Whether people can read an example: a photograph is too long."""
    return example is not None and len(str(example)) <= _LONGEST_EXAMPLE


def predict_body(example: Any | None, *others: Mapping[str, Any]) -> dict[str, Any]:
    """The body of POST /predict, whose form may also be one of `others`; `example`: an input for the served network, if
    one is known."""
    schema = {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "inputs": {"description": _AN_INPUT},
            "scores": {"description": "The labels to list with their probabilities: all, winner, or a number of them."},
            "top_k": {"type": "integer", "minimum": 1, "description": "The same as a number in `scores`."},
            "map": {"enum": list(FORMS), "description": "If the network labels pixels: the form of each map."},
            "size": {
                "type": "array",
                "items": {"type": "integer", "minimum": 1},
                "minItems": 2,
                "maxItems": 2,
                "description": "Height and width of each map; if not given, those of the network.",
            },
        },
    }
    both = examples(one_input={"inputs": example}, several={"inputs": [example, example]})
    return json_body(either(schema, *others), both if fits(example) else {})


def _header(name: str, about: str, schema: Mapping[str, Any], example: Any) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": about, "schema": schema, "example": example}


WITH_INPUTS: dict[str, Any] = {
    "parameters": [
        _header(
            DEADLINE_HEADER.title(),
            "Milliseconds until the answer is useless to the client; default: the server's SLO.",
            {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_MS},
            60_000,
        ),
        _header("X-Full", "1: no input may leave at a ramp.", {"type": "string", "enum": ["0", "1"]}, "1"),
        _header(
            "X-Priority",
            "Where the server's queues go by priority: inputs with a higher one are computed first.",
            {"type": "integer", "minimum": -99, "maximum": 99},
            1,
        ),
    ]
}


def corrected(document: dict[str, Any], needs_key: bool) -> dict[str, Any]:
    """Without the 422 that FastAPI adds to every path with parameters, and with the key where it is needed."""
    for operation in (operation for path in document["paths"].values() for operation in path.values()):
        schema = operation["responses"].get("422", {}).get("content", {}).get("application/json", {}).get("schema", {})
        if schema.get("$ref", "").endswith("HTTPValidationError"):
            del operation["responses"]["422"]
    components = document.setdefault("components", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(unused, None)
    if needs_key:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
    return document
