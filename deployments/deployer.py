"""Brings a plan's placements to life as Serve applications, and takes them away when the front application goes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from ray import serve
from ray.serve import Application

from deployments.config import AppConfig
from deployments.graph import Graph, read_graph
from optimizer.plan import Placement

ALIVE = ("RUNNING", "DEPLOYING")


class Deployer:
    """Lives in the front application. `bind` makes one placement's application."""

    def __init__(self, config: AppConfig, bind: Callable[[Placement], Application]) -> None:
        self._graph = read_graph(config, serve.get_replica_context().app_name)
        self._bind = bind
        self._starting = asyncio.Lock()

    async def lease(self) -> AsyncIterator[Graph]:
        """The graph, once all its applications run. They stay for as long as anybody goes on listening.

        Serve lets a replica finish its calls before it takes it down: while a front still drains, this one is kept.
        """
        async with self._starting:
            await asyncio.to_thread(self._start)
        yield self._graph
        await asyncio.Event().wait()

    def _start(self) -> None:
        running = {name for name, found in serve.status().applications.items() if found.status in ALIVE}
        # Made by run_many they are not in the user's file, and stay when it is applied again. An external scaler may
        # change how many replicas they have.
        targets = [
            serve.RunTarget(self._bind(placement), name, route_prefix=None, external_scaler_enabled=True)
            for name, placement in self._graph.placements.items()
            if name not in running
        ]
        if targets:
            serve.run_many(targets)

    def __del__(self) -> None:
        if graph := getattr(self, "_graph", None):
            for name in graph.placements:
                with contextlib.suppress(Exception):
                    serve.delete(name, _blocking=False)
