"""The service of a fleet asks controllers for their standing, and sends them grants."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch.cluster.controller.arbiter import Arbiter, Grant
from isobatch.cluster.controller.fleet_division import Standing
from tests.helpers.asking import until
from tests.helpers.two_applications import OWN, arbiter, by_ids, standing


def looking() -> asyncio.Task[None]:
    from isobatch.cluster.controller.fleet_service import FleetService

    return asyncio.create_task(FleetService(arbiter().config.model_copy(update={"look_every_s": 0.1})).run())


class Controllers:
    """The handles of two controllers: the first grants to `a` do not arrive."""

    def __init__(self, standings: Mapping[str, Standing], fail: int) -> None:
        self.standings, self.fail, self.grants = standings, fail, list[tuple[str, Grant]]()

    def handle(self, deployment: str, controller: str) -> Any:
        name = controller.removesuffix("-controller")

        async def answer() -> Standing:
            return self.standings[name]

        async def take(grant: Grant) -> None:
            self.grants.append((name, grant))
            if name == "a" and len(self.grants) <= self.fail:
                raise ConnectionError

        return SimpleNamespace(standing=SimpleNamespace(remote=answer), grant=SimpleNamespace(remote=take))


async def test_a_grant_that_does_not_arrive_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = frozenset(("v100-0", "k80-0"))
    controllers = Controllers({name: by_ids(standing(0.5, OWN[name]), first, first) for name in OWN}, fail=2)
    monkeypatch.setattr("ray.serve.get_deployment_handle", controllers.handle)
    monkeypatch.setattr("isobatch.deployments.ray_facts.nodes_beside_others", lambda *names: [])
    running = looking()
    await until(lambda: len(controllers.grants) >= 3)
    await asyncio.sleep(0.5)  # some more looks
    running.cancel()
    assert [(name, grant.device_ids) for name, grant in controllers.grants] == [("a", first)] * 3


async def test_devices_that_others_hold_are_not_the_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[Mapping[str, int]]()

    def look(self: Arbiter, standings: object, present: Mapping[str, int], now_s: float) -> dict[str, Grant]:
        counts.append(present)
        return {}

    def beside_others(*applications: str) -> list[dict[str, float]]:
        return [{"CPU": 4.0, "v100": 1.0, "k80": 2.0}] if sorted(applications) == [*OWN] else []

    monkeypatch.setattr("ray.serve.get_deployment_handle", Controllers({}, fail=0).handle)
    monkeypatch.setattr("isobatch.deployments.ray_facts.nodes_beside_others", beside_others)
    monkeypatch.setattr(Arbiter, "look", look)
    running = looking()
    await until(lambda: counts, 5.0)
    running.cancel()
    assert counts[0] == {"v100": 1, "k80": 2}


async def test_a_silent_controller_holds_up_the_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = dict.fromkeys(OWN, 0)

    def handle(deployment: str, controller: str) -> Any:
        name = controller.removesuffix("-controller")

        async def answer() -> Standing:
            looks[name] += 1
            if name == "a" and looks[name] == 2:
                raise TimeoutError  # as after the full time
            if name == "a" and looks[name] > 2:
                await asyncio.sleep(60)
            return standing(0.5, OWN[name])

        return SimpleNamespace(standing=SimpleNamespace(remote=answer))

    monkeypatch.setattr("ray.serve.get_deployment_handle", handle)
    monkeypatch.setattr("isobatch.deployments.ray_facts.nodes_beside_others", lambda *names: [])
    running = looking()
    await until(lambda: looks["b"] >= 4, 9.0)
    running.cancel()
