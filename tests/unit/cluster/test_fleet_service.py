"""The service of a fleet asks controllers for their standing, and sends them grants."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch.cluster.controller.arbiter import Arbiter, Grant
from isobatch.cluster.controller.fleet_division import Standing
from tests.helpers.asking import until
from tests.helpers.two_applications import OWN, arbiter, by_ids, standing


def looking(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[str], Awaitable[Standing]],
    take: Callable[[str, Grant], Awaitable[None]] | None = None,
    beside_others: Callable[..., list[dict[str, float]]] = lambda *applications: [],
) -> asyncio.Task[None]:
    """The service at work, with controllers that answer and take grants so, by the names of their applications."""
    from isobatch.cluster.controller.fleet_service import FleetService

    def handle(deployment: str, controller: str) -> Any:
        calls = {"standing": answer, "grant": take}
        name = controller.removesuffix("-controller")
        return SimpleNamespace(
            **{call: SimpleNamespace(remote=partial(does, name)) for call, does in calls.items() if does}
        )

    monkeypatch.setattr("ray.serve.get_deployment_handle", handle)
    monkeypatch.setattr("isobatch.deployments.ray_facts.nodes_beside_others", beside_others)
    return asyncio.create_task(FleetService(arbiter().config.model_copy(update={"look_every_s": 0.1})).run())


async def test_a_grant_that_does_not_arrive_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, grants = frozenset(("v100-0", "k80-0")), list[tuple[str, Any]]()

    async def answer(name: str) -> Standing:
        return by_ids(standing(0.5, OWN[name]), first, first)

    async def take(name: str, grant: Grant) -> None:
        grants.append((name, grant.device_ids))
        if len(grants) <= 2:
            raise ConnectionError

    running = looking(monkeypatch, answer, take)
    await until(lambda: len(grants) >= 3)
    await asyncio.sleep(0.5)  # some more looks
    running.cancel()
    assert grants == [("a", first)] * 3


async def test_devices_that_others_hold_are_not_the_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[Mapping[str, int]]()

    def look(self: Arbiter, standings: object, present: Mapping[str, int], now_s: float) -> dict[str, Grant]:
        counts.append(present)
        return {}

    def beside_others(*applications: str) -> list[dict[str, float]]:
        return [{"CPU": 4.0, "v100": 1.0, "k80": 2.0}] if sorted(applications) == [*OWN] else []

    async def answer(name: str) -> Standing:
        return standing(0.5, OWN[name])

    monkeypatch.setattr(Arbiter, "look", look)
    running = looking(monkeypatch, answer, beside_others=beside_others)
    await until(lambda: counts, 5.0)
    running.cancel()
    assert counts[0] == {"v100": 1, "k80": 2}


async def test_a_silent_controller_holds_up_the_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = dict.fromkeys(OWN, 0)

    async def answer(name: str) -> Standing:
        looks[name] += 1
        if name == "a" and looks[name] == 2:
            raise TimeoutError  # as after the full time
        if name == "a" and looks[name] > 2:
            await asyncio.sleep(60)
        return standing(0.5, OWN[name])

    running = looking(monkeypatch, answer)
    await until(lambda: looks["b"] >= 4, 9.0)
    running.cancel()
