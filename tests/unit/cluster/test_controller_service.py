"""What stands around the controller's loop: its metrics, and the application that it finds."""

import asyncio

import pytest

from cluster.controller import application
from cluster.controller.application import RunningApplication
from deployments.config import AppConfig
from deployments.decoding.config import FRONT
from deployments.deployer.steps import DEPLOYER


class Deployed(RunningApplication):
    """Its deployer answers what a test says, or raises it."""

    def __init__(self, answer: AppConfig | Exception) -> None:
        self._name, self._leader, self._answer = "isobatch", DEPLOYER, answer

    async def config(self) -> AppConfig:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_an_application_that_another_deployment_leads_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A classifier that is deployed anew as a decoder: its deployer never answers again."""
    was = AppConfig(slo_ms=100.0)
    assert asyncio.run(Deployed(was).is_as(was))
    assert not asyncio.run(Deployed(AppConfig(slo_ms=200.0)).is_as(was))
    silent = Deployed(ConnectionError("the deployer is being restarted"))
    monkeypatch.setattr(application, "leader_of", lambda name: DEPLOYER)
    with pytest.raises(ConnectionError, match="restarted"):
        asyncio.run(silent.is_as(was))
    monkeypatch.setattr(application, "leader_of", lambda name: FRONT)
    assert not asyncio.run(silent.is_as(was))
