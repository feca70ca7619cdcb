"""The HTTP interface of a network that classifies: its paths, and its life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from isobatch.deployments.front.api import Api, Dialect, api_of
from isobatch.deployments.front.open_inference.rest import routes
from isobatch.deployments.front.open_inference.rpc import serving
from isobatch.deployments.front.page import show
from isobatch.deployments.front.protocols.paths import add_paths
from isobatch.deployments.front.schemas import StatsBody
from isobatch.deployments.front.service import Service


def create_api(service: Service) -> Api:
    """The ASGI application of a service."""

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        await service.open()
        async with serving(service):
            yield
        await service.close()

    api = api_of(service, "Early-exit inference", Dialect(StatsBody, "POST /predict answers"), life, Api)
    api.direct = add_paths(api, service)
    api.include_router(routes(service))
    show(api, service)
    return api
