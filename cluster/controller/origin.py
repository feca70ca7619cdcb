"""Refuses requests that a foreign web page sends from a browser that can reach the controller."""

from collections.abc import Mapping
from ipaddress import ip_address

from deployments.front.answers import shown
from deployments.front.headers import page_refusal

_LOCAL_ENDINGS = (".localhost", ".local", ".internal")  # names that no public host can have


def foreign(headers: Mapping[str, str]) -> str | None:
    """Why a request is refused as foreign; None: it is not. Browsers let any page send requests, even to this machine.

    The `Origin` of a page must be this server. `Host` must be a name that no public page can have: otherwise a public
    name could be pointed at this machine.

    >>> foreign({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}) is None
    True
    >>> foreign({"host": "evil.example:8000"})
    "Host is 'evil.example': without a key only an address, localhost or a local name is taken"
    """
    host = headers.get("host", "").lower()
    if not _is_local(name := host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host):
        return f"Host is {shown(name)}: without a key only an address, localhost or a local name is taken"
    return page_refusal((name.lower().encode(), value.encode("latin-1")) for name, value in headers.items())


def _is_local(name: str) -> bool:
    """Whether this is an address or a name that no public host can have: one without a dot, or one that ends so."""
    try:
        return bool(ip_address(name.strip("[]")))
    except ValueError:
        return bool(name) and ("." not in name or name.endswith(_LOCAL_ENDINGS))
