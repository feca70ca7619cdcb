"""One local Ray for each process that tests, started and stopped as `isobatch serve` does it.

To start an application takes seconds, so tests share what they can, and those that share run one after the other:
deployed again, the same file changes nothing and takes no time. Whoever leaves an application broken comes last in its
file.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from experiments.shared.machine import free_port
from isobatch.cluster.controller.application import RunningApplication
from isobatch.cluster.serving.applications import deploy
from isobatch.cluster.serving.local import LocalRay, local_ray
from isobatch.cluster.serving.ports import held_ports
from isobatch.deployments.replica.virtual import FAULTS
from isobatch.optimizer.plan import Plan
from tests.helpers.toy_graph import application, cut_at

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Put = Callable[..., str]
SHARED = ("graph", "steered", "leisurely", "real", "shown")  # applications
FIRST = ("test_fleet", "graph", "shown", "test_replanning", "leisurely", "real")  # groups of tests that take longest
SETTINGS = {
    "RAY_metrics_report_interval_ms": "3000",  # not ten seconds: tests wait for them
    "REPORTER_UPDATE_INTERVAL_MS": "600000",  # nobody looks at what each process of Ray takes
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",  # what does not start in tests is not meant to
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.2",  # not 0.1: the loops of several Serves take much processor time
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Those that share an application, or else a file, stay together in one process (--dist loadgroup)."""
    item.add_marker(pytest.mark.xdist_group(_group(item)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By their group; those that leave its application otherwise, or replace it, come last in it, in their order."""
    groups = list(dict.fromkeys([*FIRST, *SHARED, *map(_group, items)]))

    def place(item: pytest.Item) -> tuple[int, int]:
        marker = item.get_closest_marker("beside")
        return groups.index(_group(item)), marker.kwargs.get("last", 0) if marker else 0

    items.sort(key=place)


def _group(item: pytest.Item) -> str:
    return item.name if "test_serve_command" in item.nodeid else _shared(item) or item.path.stem


def _shared(item: pytest.Item) -> str | None:
    """The application that a test shares: the fixture that it asks for, or what it is marked with."""
    if marker := item.get_closest_marker("beside"):
        return str(marker.args[0])
    fixtures = item.fixturenames if isinstance(item, pytest.Function) else []
    return next((name for name in SHARED if name in fixtures), None)


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalRay, str]]:
    """The Ray and the address of its HTTP front; nothing is deployed yet."""
    before = dict(os.environ)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ[FAULTS] = str(tmp_path_factory.mktemp("faults"))  # read by virtual devices that play broken ones
    os.environ |= SETTINGS
    with (
        held_ports(1) as (port,),  # the other process that tests starts a Ray, too
        local_ray({"host": "127.0.0.1", "port": port, "location": "HeadOnly"}) as ray,
    ):
        yield ray, f"http://127.0.0.1:{port}"
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def deployed(local: tuple[LocalRay, str]) -> Put:
    """Deploy what a Serve file with these `applications:` says, in place of what was there; returns the address."""

    ray, address = local

    def put(*applications: dict[str, object]) -> str:
        deploy(ray, {"applications": list(applications)}, patience_s=300)
        return address

    return put


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Runs on one event loop: Serve's handles stay with the one that they were first used on."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(240)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small graph of two splits, as a Serve file declares it; `graph` is where it runs."""
    folder = tmp_path_factory.mktemp("graph") / "toy"
    folder.mkdir()
    declared = application(folder, cut_at(2), model=str(folder), grpc_port=free_port())
    return declared | {"deployments": [{"name": "front", "ray_actor_options": {"num_cpus": 0.5}}]}  # room for two


@pytest.fixture(scope="session")
def canary_toy(toy: dict[str, Any]) -> dict[str, Any]:
    """The same with half of its requests for a canary, as long as there is one."""
    return toy | {"args": toy["args"] | {"canary": {"application": "toy.b", "share": 0.5}}}


@pytest.fixture
def lead(run: Run) -> Callable[[Plan], None]:
    """Leads the application that runs to another plan; it takes no time while as many devices are used."""

    def to(plan: Plan) -> None:
        running = RunningApplication("toy")
        if run(running.plan()) != plan:
            run(running.roll_out(plan))

    return to


@pytest.fixture
def graph(deployed: Put, toy: dict[str, Any], lead: Callable[[Plan], None]) -> str:
    """The small graph, on the plan that it was declared with."""
    base = deployed(toy)
    lead(cut_at(2))
    return base


@pytest.fixture(scope="session")
def leisurely_toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same network, slowly, on three devices behind two fronts; survivors are kept at their replicas."""
    folder, fields = (
        tmp_path_factory.mktemp("leisurely"),
        {"by_value_bytes": 0, "audit_share": 0.0, "front_replicas": 2},
    )
    declared = application(folder, cut_at(1, 2), "load_leisurely", **fields)
    declared["deployments"] = [{"name": "front", "ray_actor_options": {"num_cpus": 0.1}}]  # however few cores there are
    return declared


@pytest.fixture
def leisurely(deployed: Put, leisurely_toy: dict[str, Any]) -> str:
    return deployed(leisurely_toy)


@pytest.fixture(scope="session")
def controller(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The controller of the small graph, as a Serve file declares it beside that."""
    arguments = {
        "application": "toy",
        "memory": str(tmp_path_factory.mktemp("controller")),
        "replan_every_s": 3.0,
        "look_every_s": 0.5,
        "react_every_s": 0.5,
        "enough_inputs": 20,
    }
    path = "isobatch.cluster.controller.app:build"
    return {"name": "controller", "import_path": path, "route_prefix": "/controller", "args": arguments}
