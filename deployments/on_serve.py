"""A plan's graph: replicas of splits in applications of their own, found by name."""

from collections.abc import Callable, Collection

from deployments.config import AppConfig
from deployments.dispatcher import Dispatcher
from deployments.driver import Driver
from deployments.graph import Graph
from deployments.serve_workers import ServeWorkers


async def on_serve(config: AppConfig, graph: Graph, clock: Callable[[], float]) -> Driver:
    """Returns when every placement has replicas; from then on the dispatcher knows of each that comes or goes."""
    route = graph.route
    members: dict[str, Collection[str]] = dict.fromkeys(graph.placements, ())
    dispatcher = Dispatcher(route, members, config.limits)

    def changed(group: str, replicas: Collection[str]) -> None:
        members[group] = replicas
        dispatcher.reroute(route, members)
        driver.pump()

    workers = ServeWorkers(changed, config.by_value_bytes)
    await workers.open()
    driver = Driver(dispatcher, workers, clock)
    for group in members:
        await workers.join(group)
    return driver
