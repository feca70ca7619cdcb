"""Unit tests run without Ray: whoever tries to start it fails here."""

import sys

import pytest


@pytest.fixture(autouse=True)
def forbid_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = sys.modules.get("ray")
    if ray is None:
        return

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a unit test tried to start Ray: move it to tests/integration")

    monkeypatch.setattr(ray, "init", refuse)
