"""Ask over HTTP as any client does."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit


def ask(base: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Status and JSON of one request; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=30)
    try:
        connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def predict(base: str, inputs: object) -> list[dict[str, Any]]:
    """The outputs of a request that must be answered."""
    status, reply = ask(base, "POST", "/predict", {"inputs": inputs})
    assert status == 200, reply
    outputs: list[dict[str, Any]] = reply["outputs"]
    return outputs
