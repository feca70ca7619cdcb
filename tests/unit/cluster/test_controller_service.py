"""The service of a controller, on an application that never gets an input."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import Event as Signal
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from experiments.serve.fleet import profile
from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.service import create_api
from isobatch.cluster.controller.status import status_of
from isobatch.deployments.config import AppConfig
from isobatch.deployments.deployer.steps import Moved
from isobatch.deployments.front.observed import Observed
from isobatch.deployments.graph import read_graph
from isobatch.optimizer.plan import Plan
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable
from tests.helpers.asking import until

PATIENCE_S = 10.0
Resources = dict[str, float]


class Handle:
    """As Serve's handle to a deployer."""

    def __init__(self, config: AppConfig) -> None:
        self.answers: dict[str, object] = {
            "config": config, "plan": read_graph(config).plan, "counted": {"front": Observed(0.0, 1.0, 0, 0, ())},
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        async def answer(plan: Plan | None = None) -> object:
            if plan:
                self.answers["plan"] = plan
                return Moved(0.0)
            return self.answers[name]

        return SimpleNamespace(remote=answer)


@pytest.fixture
def controller_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Handle, Callable[..., list[Resources]]], Any]:
    """Makes the controller of an application, beside which there are these resources."""
    from isobatch.cluster.controller import service

    def made(handle: Handle, beside_others: Callable[..., list[Resources]], **fields: Any) -> Any:
        monkeypatch.setattr("ray.serve.get_deployment_handle", lambda deployment, application: handle)
        monkeypatch.setattr("isobatch.deployments.ray_facts.recall", lambda key: None)
        monkeypatch.setattr("isobatch.deployments.ray_facts.remember", lambda key, text: None)
        monkeypatch.setattr(service, "leader_of", lambda application: "deployer")
        monkeypatch.setattr(service, "nodes_beside_others", beside_others)
        monkeypatch.setattr(service, "export", lambda loop: asyncio.sleep(0))
        times = {"react_every_s": 0.01, "look_every_s": 0.01, "replan_every_s": 600.0}
        return service.ControllerService(ControllerConfig(memory=str(tmp_path), **times, **fields))

    return made


async def test_it_answers_while_devices_are_counted_and_each_front_takes_a_processor(
    tmp_path: Path, controller_of: Callable[..., Any]
) -> None:
    table = LatencyTable("cpu", (1,), ((0.001,),), ((0.0,),), 0.0, (1,), (1,), "made up")
    save(Profile("toy", (table,), ExitProfile((1.0,))), tmp_path / "profile.json")
    three = AppConfig(profile=str(tmp_path / "profile.json"), devices={"cpu": 4}, front_replicas=3)
    waits, back, answered = Signal(), Signal(), list[bool]()
    back.set()

    def beside_others(*applications: str) -> list[Resources]:
        """Two nodes of four are left."""
        waits.set()
        answered.append(back.wait(PATIENCE_S))
        return [{"CPU": 3.0}, {"CPU": 2.0}]

    controller = controller_of(Handle(three), beside_others)
    running = asyncio.create_task(controller.run())
    await until(lambda: controller.loop and controller.loop.controller.present.counts == {"cpu": 2}, PATIENCE_S)
    back.clear()
    waits.clear()
    assert await asyncio.to_thread(waits.wait, PATIENCE_S)
    assert controller.loop
    assert status_of(controller.loop, 0.0)
    assert all(answered), "nobody waits for this count"
    back.set()
    running.cancel()


async def test_a_plan_leaves_the_kinds_that_its_controller_may_no_longer_use(
    tmp_path: Path, controller_of: Callable[..., Any]
) -> None:
    save(profile(), tmp_path / "profile.json")
    both = AppConfig(profile=str(tmp_path / "profile.json"), devices={"v100": 1, "k80": 1}, backend="virtual")
    handle = Handle(both)
    assert handle.answers["plan"].devices() == {"v100": 1, "k80": 1}  # type: ignore[attr-defined]
    controller = controller_of(handle, lambda *_: [{"CPU": 9.0}], devices={"v100": 1})
    running = asyncio.create_task(controller.run())
    await until(lambda: handle.answers["plan"].devices() == {"v100": 1}, PATIENCE_S)  # type: ignore[attr-defined]
    await until(lambda: controller.loop.controller.running.devices() == {"v100": 1}, PATIENCE_S)
    assert status_of(controller.loop, 0.0)["devices"]["v100"] == 1
    assert controller.loop.trouble is None
    running.cancel()


async def test_a_memory_that_cannot_be_written_is_in_the_log_once(
    tmp_path: Path, controller_of: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(profile(), tmp_path / "profile.json")
    handle = Handle(AppConfig(profile=str(tmp_path / "profile.json"), devices={"v100": 1}, backend="virtual"))
    (tmp_path / "isobatch").write_text("no folder")  # as on a volume that is read-only
    monkeypatch.setattr("isobatch.cluster.controller.service.RETRY_S", 0.001)
    controller = controller_of(handle, lambda *_: [{"CPU": 9.0}])
    with caplog.at_level("INFO", "ray.serve"):
        running = asyncio.create_task(controller.run())
        await until(lambda: "args: memory" in controller.waits_for, PATIENCE_S)
        await asyncio.sleep(0.1)  # for more tries
    assert [line for line in caplog.messages if "args: memory = " in line] == [
        f"the controller waits for the application to run (UserError: args: memory = {str(tmp_path)!r}: no file can be "
        "written and locked there (Not a directory); name another folder)"
    ]
    running.cancel()


@pytest.mark.parametrize("path", ["/would", "/status"])
def test_pages_of_other_servers_may_not_let_it_plan(controller_of: Callable[..., Any], path: str) -> None:
    controller = controller_of(None, lambda *_: [])
    client = TestClient(create_api(controller), base_url="http://localhost")  # whose loop does not begin
    statuses = [client.get(path, headers={"Sec-Fetch-Site": site}).status_code for site in ("cross-site", "none")]
    assert statuses == [403 if path == "/would" else 503, 503]
    assert client.head(path, headers={"Origin": "https://shop.example"}).status_code == statuses[0]
    assert client.get(path).status_code == 503
