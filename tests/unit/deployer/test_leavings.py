"""A deployer ends the replicas that its predecessor has left, and none that another deployer leads."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from optimizer.plan import Placement, Plan, Split


class Shop:
    """An application with simulated fleets. `wanted` and `deleted` record the actions of its deployers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *fleets: str) -> None:
        from deployments import ray_facts
        from deployments.deployer import deployer, fleet  # they import Ray

        self.applications = dict.fromkeys(["shop", *(f"shop.{mark}.cpu" for mark in fleets)])
        self.wanted, self.deleted, self.texts = list[Mapping[str, int]](), list[str](), dict[str, str]()
        self._module, self._deployers = deployer, list[Any]()
        monkeypatch.setattr(fleet.serve, "status", lambda: SimpleNamespace(applications=self.applications))
        monkeypatch.setattr(fleet.ray_facts, "delete_soon", self.deleted.append)
        monkeypatch.setattr(ray_facts, "is_gone", lambda application, deployment: False)
        monkeypatch.setattr(ray_facts, "remember", self.texts.__setitem__)
        monkeypatch.setattr(ray_facts, "recall", self.texts.get)
        self._asleep, self._monkeypatch = asyncio.sleep, monkeypatch

    def deployer(self, mark: str, devices: int = 1) -> Any:
        """One that has begun to lead replicas of this mark."""
        from deployments.deployer.leadership import Leadership

        made = object.__new__(self._module.Deployer)
        fleet = SimpleNamespace(prefix=f"shop.{mark}", states=lambda: {"cpu": None}, scale_to=self.wanted.append)
        fleet.delete = lambda: self.deleted.append(f"shop.{mark}.cpu")
        plan = Plan((Placement("cpu", devices, (Split(0, 1, 1),)),))
        made.__dict__ |= {
            "_application": "shop",
            "_config": SimpleNamespace(drain_s=30.0),
            "_fleet": fleet,
            "_graph": SimpleNamespace(plan=plan, version=0),
            "_leadership": Leadership("shop", f"shop.{mark}"),
            "_origin": "file",
        }
        made._take_over()
        self._deployers.append(made)  # it would end with the last that knows it
        return made

    def tidied(self, ours: Any, meanwhile: Any = lambda: None) -> None:
        """This deployer tidies up what was there when it began; something else happens before."""
        from deployments.deployer import fleet

        async def wait(_: float) -> None:
            meanwhile()
            await self._asleep(0)

        async def tidied() -> None:
            ours._moving = asyncio.Lock()
            await ours._tidy_later(fleet.fleets_of("shop", but=ours._fleet.prefix))

        self._monkeypatch.setattr(self._module.asyncio, "sleep", wait)
        asyncio.run(tidied())

    @property
    def ended(self) -> bool:
        memory = self._module.stored_plan("shop")
        assert memory
        return memory.ended


def remember(deployer: Any) -> None:
    """Let a deployer start its replicas and store its plan."""
    deployer._remember(deployer._graph.plan, deployer._graph.version)


def test_the_replicas_of_the_next_deployer_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its application may exist before the deployer has taken the lead."""
    shop = Shop(monkeypatch, "000001", "000002")
    shop.tidied(shop.deployer("000002"), lambda: shop.applications.update({"shop.000003.cpu": None}))
    assert shop.deleted == ["shop.000001.cpu"]
    assert shop.wanted == [{"cpu": 1}]


@pytest.mark.parametrize("mark", ["000001", "000002"], ids=["the replicas from before", "the same replicas"])
def test_a_deployer_that_was_replaced_does_not_clean_up(monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    """The first file, or another plan, is deployed while the fronts of this deployer drain."""
    shop = Shop(monkeypatch, "000001", "000002")
    shop.tidied(shop.deployer("000002"), lambda: shop.deployer(mark, devices=3))
    assert (shop.deleted, shop.wanted) == ([], [])


def test_a_deployer_that_was_replaced_ends_its_replicas_with_its_last_front(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(monkeypatch, "000001", "000002")
    first, second = shop.deployer("000001"), shop.deployer("000002")
    remember(second)
    first.__del__()
    assert shop.deleted == ["shop.000001.cpu"]


def test_replicas_that_another_deployer_begins_to_use_again_outlive_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third deployer has not started all replicas yet, so the stored plan is still the second's."""
    shop = Shop(monkeypatch, "000001", "000002")
    first, second = shop.deployer("000001"), shop.deployer("000002")
    remember(second)
    third = shop.deployer("000001")
    first.__del__()
    assert shop.deleted == []
    assert not shop.ended
    remember(third)
    second.__del__()
    assert shop.deleted == ["shop.000002.cpu"]


def test_a_deleted_application_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments import ray_facts

    shop = Shop(monkeypatch, "000001", "000002")
    first = shop.deployer("000001")
    remember(first)
    monkeypatch.setattr(ray_facts, "is_gone", lambda application, deployment: True)
    monkeypatch.setattr(ray_facts, "forget", shop.texts.pop)
    first.__del__()
    assert shop.deleted == ["shop.000001.cpu", "shop.000002.cpu"]
    assert shop.texts == {}


@pytest.mark.parametrize(("mark", "deleted"), [("000001", []), ("000002", ["shop.000001.cpu"])])
def test_a_deployer_that_begins_while_the_last_one_ends_finds_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, mark: str, deleted: list[str]
) -> None:
    """The next deployer starts just before the last one stores that all fronts have ended."""
    from deployments import ray_facts

    shop = Shop(monkeypatch, "000001", "000002")
    first = shop.deployer("000001")
    remember(first)

    def remembered_late(key: str, text: str) -> None:
        if '"ended": true' in text and len(shop._deployers) == 1:
            shop.deployer(mark)
        shop.texts[key] = text

    monkeypatch.setattr(ray_facts, "remember", remembered_late)
    first.__del__()
    assert shop.deleted == deleted
