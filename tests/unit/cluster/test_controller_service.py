"""What stands around the controller's loop: its metrics, and the application that it finds."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.controller import application
from cluster.controller.application import RunningApplication
from cluster.controller.status import keep_exporting
from deployments.config import AppConfig
from deployments.decoding.config import FRONT
from deployments.deployer.steps import DEPLOYER
from deployments.metrics import CONTROLLER, MetricSeries
from tests.helpers.fluid_application import Fluid, control_loop, first_plan, question, run
from tests.helpers.noted_metrics import NotedMetrics


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


def test_what_cannot_be_told_to_prometheus_once_is_told_the_next_time(caplog: pytest.LogCaptureFixture) -> None:
    asked = question()
    app = Fluid(asked, first_plan(asked))
    loop = control_loop(app)
    run(app, loop, 300)
    noted, tries = NotedMetrics(), list[str]()

    def running() -> Any:
        tries.append("")
        return SimpleNamespace() if len(tries) < 4 else loop

    async def story() -> None:
        telling = asyncio.create_task(keep_exporting(MetricSeries(CONTROLLER, noted), running, 0.0))
        async with asyncio.timeout(10):
            while not noted.told["isobatch_forecast_survival"]:
                assert not telling.done()
                await asyncio.sleep(0.001)
        telling.cancel()

    asyncio.run(story())
    assert noted.told["isobatch_controller_looks"][()] == 10
    assert len(caplog.records) == 1, "one line, however often it fails"
