"""The headers of a request, or its gRPC metadata: how long the client waits, and which API key it sends."""

import hmac
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NamedTuple

from isobatch.deployments.front.answers import RefusedError, shown
from isobatch.profiles.errors import UserError

DEADLINE_HEADER = "x-deadline-ms"
DEADLINE = DEADLINE_HEADER.encode()
STARTED = b"x-request-start"  # when our proxy received the request: t=MICROSECONDS since 1970;KERNEL of its clock
SENT = b"x-request-sent"  # the microseconds in which it then got the body, or the first part of a long one
FULL = b"x-full"
PRIORITY = b"x-priority"
CLIENT = b"x-client-address"  # the address of a stream's client, as our HAProxy saw it
TRUSTED_PROXIES = "ISOBATCH_TRUSTED_PROXIES"  # the variable with the networks of proxies before HAProxy
KERNEL_FILE = Path("/proc/sys/kernel/random/boot_id")  # names the kernel, and so the clock, of a machine
KERNEL = KERNEL_FILE.read_text().strip() if KERNEL_FILE.exists() else ""
_OWN_CLOCK = f";{KERNEL}".encode()
_MOST_WAITED_S = 60.0  # a request that seems to have waited longer comes from a clock that was set meanwhile
LONGEST_MS = 86_400_000.0  # the longest deadline, a day: timers have limits, and no client waits longer
# Paths for load balancers, which need no key even where one is set.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"})
NO_KEY = "this server asks for a key: Authorization: Bearer KEY, or X-API-Key: KEY"
_BEARER = b"bearer "
# Digits, as HAProxy reads them too: it knows neither exponents nor Python's underscores.
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
_PRIORITY = re.compile(rb"-?\d{1,2}")
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


def path_below(scope: Mapping[str, Any]) -> str:
    """The path below the route prefix of the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def headers_in(scope: Mapping[str, Any]) -> dict[bytes, bytes]:
    """The headers of a request by name. Of several values the first counts: uvicorn adds the trailers after them, where
    a client could repeat what HAProxy has set.

    >>> headers_in({"headers": [(b"x-request-start", b"t=1"), (b"x-request-start", b"t=2")]})
    {b'x-request-start': b't=1'}
    """
    return dict(reversed(scope["headers"]))


def key_in(variable: str | None) -> bytes | None:
    """The key in this environment variable; None if the configuration names none."""
    if variable is None:
        return None
    # os.environ.get fails on a name that is no text, such as "\ud800". No header keeps a line break at a key's end.
    key = dict(os.environ).get(variable, "").strip()
    if not key:
        raise UserError(
            f"api_key_variable = {variable!r}: that environment variable is not set (or empty) for the front"
        )
    return key.encode()


def has_key(key: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether `Authorization: Bearer KEY` or `X-API-Key: KEY` holds the key; compared in constant time.

    >>> has_key(b"k", [(b"authorization", b"Bearer k")]), has_key(b"k", [(b"x-api-key", b"no")])
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


def trusted_proxies(variables: Mapping[str, str] = os.environ) -> list[str]:
    """The networks of proxies whose X-Forwarded-For names the client.

    >>> trusted_proxies({"ISOBATCH_TRUSTED_PROXIES": "10.0.0.0/8, fd00::/8"}), trusted_proxies({})
    (['10.0.0.0/8', 'fd00::/8'], [])
    """
    networks = variables.get(TRUSTED_PROXIES, "")
    try:
        return [str(ip_network(each.strip())) for each in networks.split(",") if networks]
    except ValueError as error:
        form = "must be networks separated by commas, such as 10.0.0.0/8,fd00::/8"
        raise UserError(f"{TRUSTED_PROXIES} is {networks!r}: it {form} ({error})") from None


_LOCAL_ENDINGS = (".localhost", ".local", ".internal")  # of names that no public page can have


def host_refusal(headers: Iterable[tuple[bytes, bytes]], allowed: Collection[str] = ()) -> str | None:
    """Why a request is refused because of its `Host`; None: it names this server, or a name that is allowed.

    A public page could let its name point to this machine (DNS rebinding), and would then be a page of this server.

    >>> host_refusal([(b"host", b"127.0.0.1:8000")]) is None, host_refusal([(b"host", b"front.local")]) is None
    (True, True)
    >>> host_refusal([(b"host", b"evil.example:8000")])
    "Host is 'evil.example': without a key, only addresses, local names and allowed_hosts are answered"
    """
    name = _public_name(next((value for name, value in headers if name == b"host"), b""))
    if not name or name in allowed:
        return None
    return f"Host is {shown(name)}: without a key, only addresses, local names and allowed_hosts are answered"


@lru_cache(maxsize=64)
def _public_name(host: bytes) -> str:
    """The name in a `Host` header; empty for an address, or a name that no public page can have."""
    name = host.decode("latin-1").lower()
    if (parts := name.rpartition(":"))[2].isdigit():
        name = parts[0]
    try:
        ip_address(name.strip("[]"))
        return ""
    except ValueError:
        return name if "." in name and not name.endswith(_LOCAL_ENDINGS) else ""


def page_refusal(headers: Iterable[tuple[bytes, bytes]], allowed: Collection[str] = ()) -> str | None:
    """Why a request is refused because another server's page sent it; None: none did, or that page is allowed.

    >>> from_shop = [(b"host", b"localhost:8000"), (b"origin", b"https://shop.example")]
    >>> page_refusal(from_shop), page_refusal(from_shop, ("https://shop.example",))
    ("a page from 'https://shop.example' sent this request: only pages of this server may", None)
    """
    values = {name: value for name, value in headers if name in (b"origin", b"host", b"sec-fetch-site")}
    origin, site = values.get(b"origin", b""), values.get(b"sec-fetch-site", b"")
    if site in (b"same-origin", b"none") or not (origin or site):
        return None
    if not site and origin.lower().rpartition(b"//")[2] == values.get(b"host", b"").lower():
        return None
    page = (origin or b"another site").decode("latin-1")
    if page in allowed:
        return None
    return f"a page from {shown(page)} sent this request: only pages of this server may"


def waited_s_by(started: bytes | None, clock: Callable[[], float] = time.time) -> float:
    """The time since a proxy on this machine received the request; 0 without a proxy, or with another machine's clock.

    >>> own, other = f"t=1500000;{KERNEL}".encode(), b"t=1500000;another"
    >>> waited_s_by(own, lambda: 2.0), waited_s_by(other, lambda: 2.0), waited_s_by(None), waited_s_by(b"t=1e99")
    (0.5, 0.0, 0.0, 0.0)
    """
    if started is None or not KERNEL or not started.startswith(b"t=") or not started.endswith(_OWN_CLOCK):
        return 0.0
    at_us = started[2 : -len(_OWN_CLOCK)]
    if not at_us.isdigit() or len(at_us) > 16:
        return 0.0
    waited_s = clock() - int(at_us) / 1e6
    return waited_s if 0.0 < waited_s < _MOST_WAITED_S else 0.0


def sent_s_by(sent: bytes | None) -> float:
    """
    >>> sent_s_by(b"250000"), sent_s_by(b"-3"), sent_s_by(None)
    (0.25, 0.0, 0.0)
    """
    return int(sent) / 1e6 if sent and sent.isdigit() and len(sent) <= 16 else 0.0


def wants_full(value: bytes | None) -> bool:
    """Whether the client wants the full network's answer.

    >>> wants_full(b"1"), wants_full(b"0"), wants_full(None)
    (True, False, False)
    """
    if value not in (None, b"0", b"1"):
        raise RefusedError(400, f"X-Full is {shown(value.decode('latin-1'))}: it must be 1 (or 0, as without it)")
    return value == b"1"


def priority_by(value: bytes | None) -> int:
    """The priority of a request's inputs, where queues go by priority (deployments/dispatch/queue_orders.py).

    >>> priority_by(b"7"), priority_by(b"-2"), priority_by(None)
    (7, -2, 0)
    """
    if value is None:
        return 0
    if not _PRIORITY.fullmatch(value):
        raise RefusedError(400, f"X-Priority is {shown(value.decode('latin-1'))}: it must be a whole number, -99 to 99")
    return int(value)


def timeout_s_by(timeout: bytes | None) -> float | None:
    """The seconds of a grpc-timeout header: how long the client of a call waits.

    >>> timeout_s_by(b"250m"), timeout_s_by(b"forever"), timeout_s_by(None)
    (0.25, None, None)
    """
    match = _TIMEOUT.fullmatch(timeout or b"")
    return int(match[1]) * _UNITS_S[match[2]] if match else None


def deadline_s_by(value: bytes | None) -> float | None:
    """The seconds of an X-Deadline-Ms header: how long the client waits for the answer.

    >>> deadline_s_by(b"250")
    0.25
    """
    if value is None:
        return None
    milliseconds = value.decode("latin-1")
    deadline_ms = float(milliseconds) if _NUMBER.fullmatch(milliseconds) else 0.0
    if not 0 < deadline_ms <= LONGEST_MS:
        rule = "it must be a number of milliseconds, more than 0 and at most a day"
        raise RefusedError(400, f"X-Deadline-Ms is {shown(milliseconds)}: {rule}")
    return deadline_ms / 1e3


class RequestHeaders(NamedTuple):
    """What the headers of a request say, or the metadata of a call."""

    within_s: float | None  # the client's deadline after the arrival
    waited_s: float  # since a proxy received the request
    sent_s: float  # the part of this time in which the body came
    full: bool  # the client wants the full network's answer
    priority: int

    @classmethod
    def of(cls, headers: Mapping[bytes, bytes]) -> "RequestHeaders":
        within_s, waited_s = deadline_s_by(headers.get(DEADLINE)), waited_s_by(headers.get(STARTED))
        sent_s = min(waited_s, sent_s_by(headers.get(SENT)))
        return cls(within_s, waited_s, sent_s, wants_full(headers.get(FULL)), priority_by(headers.get(PRIORITY)))
