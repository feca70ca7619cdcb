"""The controller beside a running application: it changes the plan while requests are answered, and survives a kill."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.asking import ask, eventually, predict
from tests.helpers.toy_graph import application, cut_at

Put = Callable[..., str]


@pytest.fixture(scope="module")
def base(deployed: Put, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan that is easy to beat, and a controller beside it."""
    folder = tmp_path_factory.mktemp("controller")
    return deployed(application(folder, cut_at(1, 2, 3)), controller(folder))


def controller(folder: Path, **told: object) -> dict[str, Any]:
    arguments = {
        "application": "toy",
        "memory": str(folder / "memory"),
        "replan_every_s": 3.0,
        "look_every_s": 0.5,
        "enough_inputs": 20,
        **told,
    }
    return {
        "name": "controller",
        "import_path": "cluster.controller.app:build",
        "route_prefix": "/controller",
        "args": arguments,
    }


def status(base: str) -> dict[str, Any]:
    """Empty while the controller is away."""
    with contextlib.suppress(OSError, HTTPException):
        code, reply = ask(base, "GET", "/controller/status")
        if code == 200:
            return dict(reply)
    return {"events": [], "paused": False}


def rolled_out(base: str) -> list[dict[str, Any]]:
    return [event for event in status(base)["events"] if event["what"] == "rolled out"]


class Load:
    """One request after the other, until the block ends; all must be answered right."""

    def __init__(self, base: str) -> None:
        self.base, self.answered = base, 0
        self.wrong: list[object] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._stop.is_set():
            code, reply = ask(self.base, "POST", "/predict", {"inputs": [[3, 7], [0, 3], [2, 5]]})
            if code != 200 or [output["label"] for output in reply["outputs"]] != [7, 3, 5]:
                self.wrong.append(reply)
            self.answered += 1

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def test_a_poor_plan_is_replaced_while_requests_are_answered(base: str) -> None:
    with Load(base) as load:
        (event, *_) = eventually(lambda: rolled_out(base))
    assert not load.wrong
    assert load.answered
    assert "more goodput is worth it" in event["why"]
    assert event["after"] == status(base)["plan"]["summary"] != event["before"]
    assert predict(base, [3, 5])[0]["label"] == 5


def test_a_controller_that_is_killed_goes_on_where_it_was(base: str) -> None:
    from ray.serve.context import _get_global_client

    with Load(base):
        assert eventually(lambda: rolled_out(base))
        assert ask(base, "POST", "/controller/pause") == (200, {"paused": True})
        before = status(base)
        applications = _get_global_client().get_serve_details()["applications"]
        (replica,) = applications["controller"]["deployments"]["controller"]["replicas"]
        os.kill(replica["pid"], signal.SIGKILL)
        after = eventually(lambda: now if (now := status(base))["paused"] else None)
    numbers = [event["number"] for event in before["events"]]
    assert [event["number"] for event in after["events"]][: len(numbers)] == numbers
    assert after["plan"]["summary"] == before["plan"]["summary"]
