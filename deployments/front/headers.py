"""What the headers of a request say (over gRPC: its metadata): how long the client waits, and which key it shows."""

import hmac
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from deployments.front.answers import RefusedError, shown
from profiles.errors import UserError

DEADLINE_HEADER = "x-deadline-ms"
STARTED = b"x-request-start"  # when a proxy of ours saw the request: t=MICROSECONDS since 1970
FULL = b"x-full"
TIMEOUT = "x-grpc-timeout"  # how long the client of a call waits since then, as gRPC writes it and keeps it to itself
CLIENT = "x-client-address"  # whose stream it is, as our HAProxy saw it
_MOST_WAITED_S = 60.0  # whoever says more has another clock
LONGEST_MS = 86_400_000.0  # a day: no client waits longer, and clocks and timers have their limits
# Load balancers ask these paths, so they need no key even where one is set.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
NO_KEY = "this server asks for a key: Authorization: Bearer KEY, or X-API-Key: KEY"
_BEARER = b"bearer "
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def path_below(scope: Mapping[str, Any]) -> str:
    """The path below the route prefix of the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def key_in(variable: str | None) -> bytes | None:
    """The key that the environment holds, or None where none is asked for."""
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key:
        raise UserError(f"api_key_variable = {variable!r}: that environment variable is not set where the front runs")
    return key.encode()


def is_shown(key: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """In `Authorization: Bearer KEY` or `X-API-Key: KEY`; compared in a time that tells nothing of the key.

    >>> is_shown(b"k", [(b"authorization", b"Bearer k")]), is_shown(b"k", [(b"x-api-key", b"no")])
    (True, False)
    """
    return any(
        hmac.compare_digest(key, value)
        if name == b"x-api-key"
        else name == b"authorization"
        and value[: len(_BEARER)].lower() == _BEARER
        and hmac.compare_digest(key, value[len(_BEARER) :])
        for name, value in headers
    )


def elsewhere(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The page from which a browser sends this request, if it is none of this server's: any page may try.

    >>> elsewhere([(b"host", b"localhost:8000"), (b"origin", b"http://evil.example")])
    'http://evil.example'
    >>> elsewhere([(b"host", b"localhost:8000"), (b"origin", b"http://localhost:8000")]) is None
    True
    """
    origin, host, site = b"", b"", b""
    for name, value in headers:
        if name == b"origin":
            origin = value
        elif name == b"sec-fetch-site":
            site = value
        elif name == b"host":
            host = value
    if site in (b"same-origin", b"none") or not (origin or site):
        return None
    if not site and origin.lower().rpartition(b"//")[2] == host.lower():
        return None
    return (origin or b"another site").decode("latin-1")


def page_refusal(headers: Iterable[tuple[bytes, bytes]], allowed: Collection[str] = ()) -> str | None:
    """Why a request is refused that such a page sends; None: no such page does, or only one that is allowed to.

    >>> from_shop = [(b"host", b"localhost:8000"), (b"origin", b"https://shop.example")]
    >>> page_refusal(from_shop), page_refusal(from_shop, ("https://shop.example",))
    ("a page from 'https://shop.example' asked for this: only pages of this server may", None)
    """
    page = elsewhere(headers)
    if not page or page in allowed:
        return None
    return f"a page from {shown(page)} asked for this: only pages of this server may"


def waited_s_by(told: bytes | None, clock: Callable[[], float] = time.time) -> float:
    """How long ago a proxy on this machine saw the request; 0 where none did, or its clock is not ours.

    >>> waited_s_by(b"t=1500000", lambda: 2.0), waited_s_by(None), waited_s_by(b"t=1e99", lambda: 2.0)
    (0.5, 0.0, 0.0)
    """
    if told is None or not told.startswith(b"t=") or not told[2:18].isdigit() or len(told) > 18:
        return 0.0
    waited_s = clock() - int(told[2:]) / 1e6
    return waited_s if 0.0 < waited_s < _MOST_WAITED_S else 0.0


def wants_full(told: bytes | None) -> bool:
    """Whether the client wants the full network's answer.

    >>> wants_full(b"1"), wants_full(b"0"), wants_full(None)
    (True, False, False)
    """
    if told not in (None, b"0", b"1"):
        raise RefusedError(400, f"X-Full is {shown(told.decode('latin-1'))}: it must be 1 (or 0, as without it)")
    return told == b"1"


def timeout_s_by(told: str | None) -> float | None:
    """How long the client of a gRPC call waits, as the call itself says it.

    >>> timeout_s_by("250m"), timeout_s_by("forever"), timeout_s_by(None)
    (0.25, None, None)
    """
    found = _TIMEOUT.fullmatch(told or "")
    return int(found[1]) * _UNITS_S[found[2]] if found else None


def deadline_s(told: str | None) -> float | None:
    """How long the client waits for the answer, if it says so.

    >>> deadline_s("250")
    0.25
    """
    if told is None:
        return None
    try:
        deadline_ms = float(told)
    except ValueError:
        deadline_ms = 0.0
    if not 0 < deadline_ms <= LONGEST_MS:
        raise RefusedError(
            400, f"X-Deadline-Ms is {shown(told)}: it must be a number of milliseconds, more than 0, of a day at most"
        )
    return deadline_ms / 1e3
