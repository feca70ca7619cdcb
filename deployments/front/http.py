"""The HTTP interface of a network that classifies: its paths, and its life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from deployments.front.api import Api, Dialect, api_of
from deployments.front.open_inference.rest import routes
from deployments.front.open_inference.rpc import serving
from deployments.front.openapi import READING, WITH_INPUTS, documented, predict_body
from deployments.front.page import show
from deployments.front.predict import Predict
from deployments.front.schemas import PREDICTIONS, StatsBody
from deployments.front.service import Service


def create_api(service: Service) -> Api:
    """The ASGI application of a service."""

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        await service.open()
        async with serving(service):
            yield
        await service.close()

    api = api_of(service, "Early-exit inference", Dialect(StatsBody, "POST /predict answers"), life, Api)
    api.direct = {"/predict": Predict(service)}
    request_format = WITH_INPUTS | predict_body(service.example.value)

    @api.post("/predict", **documented(PREDICTIONS[service.task.name], *READING), openapi_extra=request_format)
    async def predict() -> NoReturn:
        """Answer one input or a list of them, in order."""
        raise AssertionError("This is a bug: `Api` should have handed the request to `Predict`.")

    api.include_router(routes(service))
    show(api, service)
    return api
