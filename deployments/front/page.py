"""The pages: `/` shows what runs, `/docs` explains the interface. They are files of `deployments/page/`."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI
from fastapi.responses import Response

from deployments.front.service import Service, directory_of
from deployments.named import DEMO, function_at

FILES = Path(__file__).parents[1] / "page"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".LICENSE": "text/plain"}
DOCS = "/docs"
EXPLAINING = frozenset({DOCS, "/page/docs.js", "/page/docs.css", "/page/page.css"})  # the files that `/docs` needs
DIGITS = 60  # of the demo, that the page may send
_HEADERS = {
    # Nothing from elsewhere, no script or style but the files, and no other page may frame this one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _File(NamedTuple):
    content: bytes
    media_type: str


@cache
def files() -> dict[str, _File]:
    """The files of the page by the paths at which they are asked for. They hold no secrets, so they need no key."""
    found = {
        f"/page/{path.name}": _File(path.read_bytes(), TYPES[path.suffix])
        for path in FILES.iterdir()
        if path.suffix in TYPES
    }
    return found | {"/": found.pop("/page/index.html"), DOCS: found.pop("/page/docs.html")}


def show(api: FastAPI, service: Service) -> None:
    """Add the page at `/` to an application."""
    router = APIRouter(include_in_schema=False)
    for path in files().keys() - EXPLAINING:
        router.add_api_route(path, _answering(files()[path]))

    @router.get("/page/about.json")
    def about() -> dict[str, object]:
        """What the page must know once. No coroutine: to read the demo's digits takes a while."""
        return _about(service)

    api.include_router(router)


def explain(api: FastAPI) -> None:
    """Add the page at `/docs`, which makes the OpenAPI document of any application readable, to that application."""
    for path in EXPLAINING:
        api.add_api_route(path, _answering(files()[path]), include_in_schema=False)


def _answering(file: _File) -> Any:
    async def answer() -> Response:
        return Response(file.content, media_type=file.media_type, headers=_HEADERS)

    return answer


def _about(service: Service) -> dict[str, object]:
    told: dict[str, object] = {
        "model": service.name,
        "blocks": service.num_blocks,
        "slo_ms": service.config.slo_ms,
        "takes": "texts" if service.reads_text else "other",
    }
    if directory_of(service.config) != str(function_at(DEMO)()):
        return told
    from deployments.demo.digits import demo_inputs

    return told | {"takes": "digits", "digits": demo_inputs(DIGITS, noise=0.0).round(1).tolist()}
