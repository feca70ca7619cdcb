"""A deployer ends the replicas that the one before it has left, and no others."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest


def test_the_replicas_of_the_next_deployer_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts while the fronts of this one drain: this one is still there when it tidies up."""
    from deployments.deployer import deployer, fleet  # they import Ray

    names, deleted, asleep = ["shop", "shop.000001.cpu", "shop.000002.cpu"], list[str](), asyncio.sleep

    async def another_is_deployed(_: float) -> None:
        names.append("shop.000003.cpu")
        await asleep(0)

    ours: Any = object.__new__(deployer.Deployer)
    ours.__dict__ |= {
        "_application": "shop",
        "_config": SimpleNamespace(drain_s=30.0),
        "_fleet": SimpleNamespace(prefix="shop.000002", standing=dict, want=lambda counts: None),
        "_graph": SimpleNamespace(plan=SimpleNamespace(devices=lambda: {"cpu": 1})),
    }
    monkeypatch.setattr(fleet.serve, "status", lambda: SimpleNamespace(applications=dict.fromkeys(names)))
    monkeypatch.setattr(fleet.ray_facts, "delete_soon", deleted.append)
    monkeypatch.setattr(deployer.asyncio, "sleep", another_is_deployed)

    async def tidied() -> None:
        ours._moving = asyncio.Lock()
        await ours._tidy_later(fleet.fleets_of("shop", but="shop.000002"))

    asyncio.run(tidied())
    assert deleted == ["shop.000001.cpu"]
