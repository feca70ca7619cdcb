"""The web pages, from `deployments/page/`: `/` shows the application or the fleet, `/docs` explains its interface."""

from functools import cache
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

from isobatch.deployments.front.service import Service
from isobatch.deployments.map_tasks import PIXELS
from isobatch.deployments.named import LOADER, demo_folder

FILES = Path(__file__).parents[1] / "page"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".LICENSE": "text/plain"}
DOCS = "/docs"
EXPLAINING = frozenset({DOCS, "/page/docs.js", "/page/docs.css", "/page/page.css"})  # the files that `/docs` needs
# The files of the page of a fleet, by their URL paths.
FLEET = {"/": FILES / "fleet.html", "/page/fleet.js": FILES / "fleet.js"}
DIGITS = 60  # the demo's digits that the page can send
_HEADERS = {
    # Load nothing from other servers, no scripts or styles except the files, and forbid frames.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def files() -> dict[str, Path]:
    """The files by their URL paths. They hold no secrets, so they need no key."""
    of_others = FLEET.values()
    by_path = {f"/page/{path.name}": path for path in FILES.iterdir() if path.suffix in TYPES and path not in of_others}
    return by_path | {"/": by_path.pop("/page/index.html"), DOCS: by_path.pop("/page/docs.html")}


def show(api: FastAPI, service: Service) -> None:
    """Add the page at `/` to an application."""
    for path in files().keys() - EXPLAINING:
        _add(api, path, files()[path])

    @api.get("/page/about.json", include_in_schema=False)
    def about() -> dict[str, object]:
        """The facts that the page loads once. No coroutine, since reading the demo's digits blocks."""
        return _about(service)


def explain(api: FastAPI) -> None:
    """Add the page at `/docs` to an application. It displays the application's OpenAPI document."""
    for path in EXPLAINING:
        _add(api, path, files()[path])


def show_fleet(api: FastAPI) -> frozenset[str]:
    """Add the page of a fleet at `/`; its paths, which need no key."""
    for path, file in FLEET.items():
        _add(api, path, file)
    return frozenset(FLEET)


def _add(api: FastAPI, path: str, file: Path) -> None:
    content = file.read_bytes()

    async def answer() -> Response:
        return Response(content, media_type=TYPES[file.suffix], headers=_HEADERS)

    api.add_api_route(path, answer, include_in_schema=False)


def _about(service: Service) -> dict[str, object]:
    facts: dict[str, object] = {
        "model": service.name,
        "blocks": service.num_blocks,
        "slo_ms": service.config.slo_ms,
        "takes": _inputs_of(service),
        "maps": service.task.name == PIXELS.name,
        "scores": service.task.by_score,
    }
    config = service.config
    if config.loader != LOADER or config.prepared_folder != demo_folder():
        return facts
    from isobatch.deployments.demo.digits import demo_inputs

    return facts | {"takes": "digits", "digits": demo_inputs(DIGITS, noise=0.0).round(1).tolist()}


def _inputs_of(service: Service) -> str:
    """The kind of inputs that the page can send."""
    if service.predicts_as_tei:  # the page knows only our own answers
        return "other"
    return "texts" if service.reads_text else "pictures" if service.reads_pictures else "other"
