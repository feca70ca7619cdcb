"""An optional API key: whoever asks must show it, except for whether the server lives."""

import hmac
import os
from collections.abc import Iterable

from profiles.errors import UserError

OPEN = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})  # for load balancers
UNKNOWN = "this server asks for a key: Authorization: Bearer KEY, or X-API-Key: KEY"
_BEARER = b"bearer "


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
