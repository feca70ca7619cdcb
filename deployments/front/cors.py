"""Pages of other servers that the configuration allows to ask: what browsers call CORS."""

from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.front.headers import DEADLINE_HEADER, FULL
from deployments.tracing import PARENT

METHODS = ("GET", "POST")
# The headers that they may set, and those of answers that they may read.
SENT = ("Authorization", "Content-Type", "X-API-Key", DEADLINE_HEADER, FULL.decode(), PARENT)
READ = ("Retry-After", PARENT)


class AllowedPages:
    """Answers the questions of browsers before requests of these pages, and marks what they may read.

    Requests of all others pass: whoever refuses them says so in a sentence.
    """

    def __init__(self, inside: ASGIApp, origins: Iterable[str]) -> None:
        self._inside, self._origins = inside, frozenset(origin.encode() for origin in origins)
        self._marked = CORSMiddleware(
            inside, allow_origins=list(origins), allow_methods=METHODS, allow_headers=SENT, expose_headers=READ
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = scope["type"] == "http" and any(
            name == b"origin" and value in self._origins for name, value in scope["headers"]
        )
        await (self._marked if allowed else self._inside)(scope, receive, send)
