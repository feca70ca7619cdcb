"""A server's answers over HTTP: JSON, and the answers to many inputs, with several requests under way at once."""

import json
import time
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from http.client import HTTPException, IncompleteRead, InvalidURL
from io import BytesIO
from ipaddress import ip_address
from itertools import islice
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

import numpy as np

from isobatch.deployments.tasks import Outputs
from isobatch.profiles.errors import UserError, WrongInputError

AT_ONCE = 32  # inputs per request
UNDER_WAY = 8  # requests
PATIENCE_S = 60.0
_LATER = (503, 504)  # statuses after which a request is sent again
_REFUSED = (413, 422)  # statuses if the server cannot read an input: the body is too large, or an input is wrong
_QUICK = 1  # PNG's level of compression
Item = TypeVar("Item")


class _RefusedError(UserError):
    """The server cannot read an input of a request."""


def as_json(value: Any) -> Any:
    """An input as requests hold it: a picture as a PNG in base64, which takes a fraction of the bytes of its numbers in
    JSON, another array as nested lists."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim > 1 and value.shape[2:] in ((), (3,)):
        from PIL import Image

        picture = BytesIO()
        Image.fromarray(value).save(picture, "PNG", compress_level=_QUICK)
        return b64encode(picture.getvalue()).decode()
    return value.tolist() if hasattr(value, "tolist") else value


@cache
def _opener(here: bool) -> OpenerDirector:
    """Takes the environment's proxies (`http_proxy`), but none on the way to a server on this machine: no proxy
    elsewhere reaches it."""
    return build_opener(ProxyHandler({})) if here else build_opener()


def _is_here(url: str) -> bool:
    """
    >>> [_is_here(f"http://{host}:8000/stats") for host in ("127.0.0.1", "[::1]", "localhost", "10.0.0.7", "a.example")]
    [True, True, True, False, False]
    """
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def json_at(
    url: str, headers: Mapping[str, str], body: bytes | None = None, method: str | None = None, patience_s: float = 10.0
) -> Any:
    """The server's JSON. Raise HTTPError for another status than success, UserError if there is no HTTP server."""
    try:
        as_sent = {name: value.encode().decode("latin-1") for name, value in headers.items()}  # in UTF-8
        request = Request(url, body, as_sent, method=method)
        with _opener(_is_here(url)).open(request, timeout=patience_s) as reply:
            return json.load(reply)
    except HTTPError:
        raise
    except (OSError, IncompleteRead) as error:
        cause = getattr(error, "reason", error)
        reason = getattr(cause, "strerror", None) or cause
        raise UserError(f"nobody answers at {url} ({reason}): does 'isobatch serve' run there?") from None
    except (InvalidURL, UnicodeEncodeError):
        raise UserError(f"{url!r} has a blank or a letter that addresses do not have: write %20 for a blank") from None
    except HTTPException:
        raise UserError(f"the server at {url} does not speak HTTP/1.1: is that the port of gRPC?") from None
    except ValueError as error:
        raise UserError(f"{url} does not answer in JSON: {error}") from None


def stats_at(base: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """The statistics of the application at this address; empty if there is none."""
    try:
        stats = json_at(f"{base}/stats", headers)
    except (HTTPError, UserError):
        return {}
    return stats if isinstance(stats, dict) else {}


def outputs_from(url: str, values: Iterable[Any], headers: Mapping[str, str], **fields: Any) -> Iterator[Outputs]:
    """The server's output for each input, in order. `fields` are beside `inputs` in each body."""
    pool, pending = ThreadPoolExecutor(UNDER_WAY), deque[Future[list[Outputs]]]()
    try:
        for chunk in chunks(values, AT_ONCE):
            pending.append(pool.submit(_outputs, url, chunk, headers, fields))
            if len(pending) == UNDER_WAY:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _outputs(url: str, values: Sequence[Any], headers: Mapping[str, str], fields: Mapping[str, Any]) -> list[Outputs]:
    """The outputs of one request. If it is refused, its halves are sent, so that an error is of one input at last."""
    try:
        return post(url, {"inputs": [as_json(value) for value in values], **fields}, headers)
    except _RefusedError as error:
        if len(values) == 1:
            raise WrongInputError(str(error), values[0], f"is refused: {error}") from error
        half = len(values) // 2
        return [output for some in (values[:half], values[half:]) for output in _outputs(url, some, headers, fields)]


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
    content, until_s = json.dumps(body).encode(), time.monotonic() + PATIENCE_S
    while True:
        try:
            outputs: list[Outputs] = json_at(url, headers, content, patience_s=2 * PATIENCE_S)["outputs"]
            if len(outputs) == len(body["inputs"]):
                return outputs
            raise UserError(f"{url} answers {len(body['inputs'])} inputs with {len(outputs)} outputs")
        except HTTPError as error:
            if error.code not in _LATER or time.monotonic() > until_s:
                reply = error.read(300).decode(errors="replace")
                kind = _RefusedError if error.code in _REFUSED else UserError
                raise kind(f"{url} answers with status {error.code}: {reply}") from error
            time.sleep(_retry_after_s(error.headers.get("Retry-After")))
        except (LookupError, TypeError) as error:
            raise UserError(f"{url} does not answer as isobatch does: {error!r}") from error


def _retry_after_s(header: str | None) -> float:
    """The pause before a request is sent again: a second, unless the server names a number of seconds (proxies may send
    a date).

    >>> _retry_after_s("3"), _retry_after_s("Sat, 28 Nov 2026 14:00:00 GMT")
    (3.0, 1.0)
    """
    return min(float(header), PATIENCE_S) if header and header.isdecimal() else 1.0
