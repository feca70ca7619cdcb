"""What may be asked of the controller over HTTP, below the route prefix of its application."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from cluster.controller.loop import Controller
from cluster.controller.status import brief, told
from deployments.front.keys import UNKNOWN, is_shown


class Leader(Protocol):
    """Whoever runs the loop. `controller` is None while the application has not begun."""

    name: str  # of the application
    key: bytes | None
    controller: Controller | None
    waits_for: str

    async def lead(self) -> None: ...


def create_api(leader: Leader) -> FastAPI:
    """Paths below the application's route prefix."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        leading = asyncio.create_task(leader.lead())
        yield
        leading.cancel()

    api = FastAPI(title="isobatch controller", lifespan=life)

    @api.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Any]) -> Response:
        if leader.key and not is_shown(leader.key, request.scope["headers"]):
            return JSONResponse({"error": UNKNOWN}, 401, {"WWW-Authenticate": "Bearer"})
        if leader.controller is None:
            return JSONResponse({"error": f"the controller waits for {leader.waits_for}"}, 503)
        response: Response = await answer(request)
        return response

    api.include_router(_routes(leader))
    return api


def _routes(leader: Leader) -> APIRouter:
    routes = APIRouter()

    def controller() -> Controller:
        assert leader.controller, "This is a bug: requests are refused before."
        return leader.controller

    @routes.get("/status")
    async def status() -> dict[str, Any]:
        """The running plan, what it does, the forecast, and the last decisions."""
        return {"application": leader.name, **told(controller(), time.time())}

    @routes.post("/pause")
    async def pause() -> dict[str, Any]:
        """Watch, and change nothing, until `resume`."""
        controller().pause(True)
        return {"paused": True}

    @routes.post("/resume")
    async def resume() -> dict[str, Any]:
        """Change again what is worth it."""
        controller().pause(False)
        return {"paused": False}

    @routes.post("/force")
    async def force() -> dict[str, Any]:
        """Plan again now, and take the best plan there is."""
        return brief(await controller().force())

    @routes.get("/would")
    async def would() -> dict[str, Any]:
        """What would be decided now."""
        return brief(await controller().would())

    return routes
