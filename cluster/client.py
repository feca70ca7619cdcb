"""A server's answers to many inputs, over HTTP: several requests are under way at once, so that its batches fill."""

import json
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from itertools import islice
from typing import Any, TypeVar

from isobatch.deployments.tasks import Outputs
from isobatch.profiles.errors import UserError

AT_ONCE = 32  # inputs per request
UNDER_WAY = 8  # requests
PATIENCE_S = 60.0
_LATER = (503, 504)  # statuses after which a request is sent again
Item = TypeVar("Item")


def outputs_from(url: str, values: Iterable[Any], headers: Mapping[str, str], **fields: Any) -> Iterator[Outputs]:
    """The server's output for each input, in order. `fields` stand beside `inputs` in each body."""
    pool, pending = ThreadPoolExecutor(UNDER_WAY), deque[Future[list[Outputs]]]()
    try:
        for chunk in chunks(values, AT_ONCE):
            inputs = [value.tolist() if hasattr(value, "tolist") else value for value in chunk]
            pending.append(pool.submit(post, url, {"inputs": inputs} | fields, headers))
            if len(pending) == UNDER_WAY:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """
    >>> list(chunks("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def post(url: str, body: Mapping[str, Any], extra_headers: Mapping[str, str]) -> list[Outputs]:
    """The outputs of one request. While the server has no room, the request is sent again."""
    headers = {"Content-Type": "application/json", "X-Deadline-Ms": str(1e3 * PATIENCE_S), **extra_headers}
    request, until_s = urllib.request.Request(url, json.dumps(body).encode(), headers), time.monotonic() + PATIENCE_S
    while True:
        try:
            return _outputs(url, request, body["inputs"])
        except urllib.error.HTTPError as error:
            if error.code not in _LATER or time.monotonic() > until_s:
                reply = error.read(300).decode(errors="replace")
                raise UserError(f"{url} answers with status {error.code}: {reply}") from error
            time.sleep(min(float(error.headers.get("Retry-After", 1)), PATIENCE_S))


def _outputs(url: str, request: urllib.request.Request, inputs: Sequence[Any]) -> list[Outputs]:
    try:
        with urllib.request.urlopen(request, timeout=2 * PATIENCE_S) as response:
            outputs = json.load(response)["outputs"]
        if len(outputs) != len(inputs):
            raise ValueError(f"{len(outputs)} outputs for {len(inputs)} inputs")
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        raise UserError(f"nobody answers at {url} ({error.reason}): does 'isobatch serve' run there?") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{url} does not answer as isobatch does: {error}") from error
    except HTTPException as error:
        raise UserError(f"what answers at {url} does not speak HTTP/1.1: is that the port of gRPC?") from error
    return outputs  # type: ignore[no-any-return]
