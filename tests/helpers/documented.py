"""A client that holds every answer against the application's own OpenAPI document, and fronts to ask."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
from fastapi import FastAPI
from fastapi.testclient import TestClient

from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.http import create_api
from isobatch.deployments.front.service import Service

Operation = dict[str, Any]
DOCUMENTS: dict[str, dict[str, Any]] = {}  # of each kind of application: making one takes longer than an answer
TOY = {"model": "/models/toy", "loader": "tests.helpers.toy_model:load"}
TOY_OF_TEXTS = TOY | {"loader": "tests.helpers.toy_model:load_texts"}


class DocumentedClient(TestClient):
    """Fails where a path of the document answers with a status or a body that is not in it."""

    def request(self, method: str, url: Any, **options: Any) -> Any:
        reply = super().request(method, url, **options)
        document = self.app.openapi()
        if operation := operation_at(document, method, str(url).partition("?")[0]):
            check(document, operation, reply)
        return reply


def front(**fields: Any) -> FastAPI:
    """A front that computes by itself, and is never in a hurry: the toy, unless the fields name another model."""
    named = {"slo_ms": 60_000} | ({} if "model" in fields else TOY) | fields
    return create_api(Service(AppConfig.model_validate(named), time.perf_counter))


def with_document(api: FastAPI, kind: str) -> FastAPI:
    """The same application. Its document is made once for all applications of this kind, which must be alike."""
    if kind not in DOCUMENTS:
        DOCUMENTS[kind] = api.openapi()
    api.openapi_schema = DOCUMENTS[kind]
    return api


def served(**fields: Any) -> DocumentedClient:
    return DocumentedClient(front(**fields))


@contextmanager
def while_busy(folder: Path, places: int = 1) -> Iterator[tuple[TestClient, threading.Event, ThreadPoolExecutor]]:
    """A front of the network there. Long work is in so many of its places until the event is set."""
    service, end = Service(AppConfig(model=str(folder), slo_ms=60_000), time.perf_counter), threading.Event()
    with TestClient(create_api(service)) as client, ThreadPoolExecutor(2) as threads:
        assert client.portal
        for _ in range(places):
            client.portal.start_task_soon(service.long_work.run, end.wait)
        try:
            yield client, end, threads
        finally:
            end.set()


def operation_at(document: dict[str, Any], method: str, url: str) -> Operation | None:
    for path, methods in document["paths"].items():
        if method.lower() in methods and re.fullmatch(re.sub(r"{\w+}", "[^/]+", path), url):
            operation: Operation = methods[method.lower()]
            return operation
    return None


def check(document: dict[str, Any], operation: Operation, reply: Any) -> None:
    described = operation["responses"].get(str(reply.status_code))
    assert described, f"{operation['operationId']}: {reply.status_code} is not described: {reply.text[:200]}"
    content = described.get("content", {})
    kind = reply.headers.get("content-type", "").partition(";")[0]
    if not content:
        assert not reply.content, f"{operation['operationId']}: no body is described, got {reply.text[:200]}"
        return
    assert kind in content, f"{operation['operationId']}: {kind!r} is not described"
    if kind == "application/json":
        jsonschema.validate(reply.json(), content[kind]["schema"] | {"components": document["components"]})


def check_document(document: dict[str, Any]) -> None:
    """Every operation says what it does, every status what comes with it, and every name that is used is there. The
    examples of bodies are as their shape says."""
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    for operation in operations:
        name = operation["operationId"]
        assert operation.get("description"), f"{name} says nothing"
        assert "200" in operation["responses"], name
        if "requestBody" in operation:
            shape = operation["requestBody"]["content"]["application/json"]["schema"]
            for body in _examples(operation):
                jsonschema.validate(body, shape | {"components": document["components"]})
        for status, described in operation["responses"].items():
            for kind, content in described.get("content", {}).items():
                assert content.get("schema"), f"{name}: {status} has no shape for {kind}"
    assert len({each["operationId"] for each in operations}) == len(operations)
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    used = set(_references(document))
    assert used == known, used ^ known


def ask_examples(client: DocumentedClient, **parameters: str) -> int:
    """Send every example of the document, and whatever takes no body; all are answered. Returns how many."""
    requests = 0
    for path, methods in client.app.openapi()["paths"].items():
        for method, operation in methods.items():
            headers = {each["name"]: str(each["example"]) for each in _headers(operation) if "example" in each}
            for body in _examples(operation):
                reply = client.request(method, path.format(**parameters), json=body, headers=headers)
                assert reply.status_code == 200, f"{method} {path}: {reply.text[:300]}"
                requests += 1
    return requests


def check_interface(client: DocumentedClient, name: str, *schemas: str) -> None:
    """The document of a served network is complete, has these schemas, and its examples are answered."""
    document = client.app.openapi()
    check_document(document)
    assert set(schemas) <= set(document["components"]["schemas"])
    ask_examples(client, name=name, version="1")


def tensors(client: DocumentedClient, model: str, **request: Any) -> dict[str, Any]:
    """The output tensors of an inference, which are as the model's metadata says."""
    reply = client.post(f"/v2/models/{model}/infer", json=request)
    assert reply.status_code == 200, reply.text
    result = {each["name"]: each for each in reply.json()["outputs"]}
    about = {each["name"]: each for each in client.get(f"/v2/models/{model}").json()["outputs"]}
    for name, each in result.items():
        assert about[name]["datatype"] == each["datatype"]
        assert len(about[name]["shape"]) == len(each["shape"])
    return result


def _headers(operation: Operation) -> list[dict[str, Any]]:
    return [each for each in operation.get("parameters", []) if each["in"] == "header"]


def _examples(operation: Operation) -> list[Any]:
    if "requestBody" not in operation:
        return [None]
    body = operation["requestBody"]["content"]["application/json"]
    return [each["value"] for each in body.get("examples", {}).values()]


def _references(node: Any) -> Iterator[str]:
    """All names that the document refers to, wherever it does."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)
