"""The service of a controller, on an application that never gets an input."""

import asyncio
from pathlib import Path
from threading import Event as Signal
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.status import status_of
from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.observed import Observed
from isobatch.deployments.graph import read_graph
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable
from tests.helpers.asking import until

PATIENCE_S = 10.0


async def test_it_answers_while_devices_are_counted_and_each_front_takes_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobatch.cluster.controller import service

    table = LatencyTable("cpu", (1,), ((0.001,),), ((0.0,),), 0.0, (1,), (1,), "made up")
    save(Profile("toy", (table,), ExitProfile((1.0,))), tmp_path / "profile.json")
    three = AppConfig(profile=str(tmp_path / "profile.json"), devices={"cpu": 4}, front_replicas=3)

    def answering(result: object) -> Any:
        async def answer() -> object:
            return result

        return SimpleNamespace(remote=answer)

    counted = {"front": Observed(0.0, 1.0, 0, 0, ())}
    application = {"config": three, "plan": read_graph(three).plan, "counted": counted}
    handle = SimpleNamespace(**{name: answering(each) for name, each in application.items()})
    waits, back, answered = Signal(), Signal(), list[bool]()
    back.set()

    def beside_others(*applications: str) -> list[dict[str, float]]:
        """Two nodes of four are left."""
        waits.set()
        answered.append(back.wait(PATIENCE_S))
        return [{"CPU": 3.0}, {"CPU": 2.0}]

    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda deployment, application: handle)
    monkeypatch.setattr("isobatch.deployments.ray_facts.recall", lambda key: None)
    monkeypatch.setattr("isobatch.deployments.ray_facts.remember", lambda key, text: None)
    monkeypatch.setattr(service, "leader_of", lambda application: "deployer")
    monkeypatch.setattr(service, "nodes_beside_others", beside_others)
    monkeypatch.setattr(service, "export", lambda loop: asyncio.sleep(0))
    config = ControllerConfig(memory=str(tmp_path), react_every_s=0.01, look_every_s=0.01, replan_every_s=600.0)
    controller = service.ControllerService(config)
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
