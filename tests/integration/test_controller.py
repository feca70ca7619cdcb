"""The controller beside a running application: it changes the plan while requests are answered, and survives a kill."""

import contextlib
import os
import signal
from http.client import HTTPException
from typing import Any

import pytest

from isobatch.cluster.controller.application import RunningApplication
from isobatch.deployments.metrics import CONTROLLER
from tests.helpers.asking import Load, ask, eventually, predict
from tests.helpers.scraping import check_family, scraped
from tests.helpers.toy_graph import cut_at
from tests.integration.conftest import Put, Run


@pytest.fixture(scope="module")
def steered(deployed: Put, toy: dict[str, Any], controller: dict[str, Any], run: Run) -> str:
    """A plan that is easy to beat, and a controller beside it."""
    deployed(toy)
    run(RunningApplication("toy").roll_out(cut_at(3)))
    return deployed(toy, controller)


def status(base: str) -> dict[str, Any]:
    """Empty while the controller is away."""
    with contextlib.suppress(OSError, HTTPException):
        code, reply = ask(base, "GET", "/controller/status")
        if code == 200:
            return dict(reply)
    return {"events": [], "paused": False}


def rolled_out(base: str) -> list[dict[str, Any]]:
    return [event for event in status(base)["events"] if event["what"] == "rolled out"]


def test_a_poor_plan_is_replaced_while_requests_are_answered(steered: str) -> None:
    with Load(steered) as load:
        (event, *_) = eventually(lambda: rolled_out(steered))
    assert not load.wrong
    assert load.answered
    assert "worth it" in event["why"] or "were refused" in event["why"]
    assert event["after"] == status(steered)["plan"]["summary"] != event["before"]
    assert predict(steered, [3, 5])[0]["label"] == 5


def test_what_is_decided_is_told_to_prometheus(steered: str) -> None:
    wanted = {family.name for family in CONTROLLER}
    with Load(steered):
        assert eventually(lambda: rolled_out(steered))
        result = eventually(lambda: names if (names := scraped()).keys() >= wanted else {})
    assert result, wanted - scraped().keys()
    for family in CONTROLLER:
        check_family(family, result[family.name])
    whats = {sample.labels["what"] for sample in result["isobatch_controller_decisions"].samples}
    assert "rolling out" in whats


def test_a_controller_that_is_killed_goes_on_where_it_was(steered: str) -> None:
    from ray.serve.context import _get_global_client

    with Load(steered):
        assert eventually(lambda: rolled_out(steered))
        assert ask(steered, "POST", "/controller/pause") == (200, {"paused": True})
        before = status(steered)
        applications = _get_global_client().get_serve_details()["applications"]
        (replica,) = applications["controller"]["deployments"]["controller"]["replicas"]
        os.kill(replica["pid"], signal.SIGKILL)
        after = eventually(lambda: now if (now := status(steered))["paused"] else None)
    numbers = [event["number"] for event in before["events"]]
    assert [event["number"] for event in after["events"]][: len(numbers)] == numbers
    assert after["plan"]["summary"] == before["plan"]["summary"]
