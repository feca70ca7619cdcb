"""Unit tests run without Ray: whoever tries to start it fails here. Tests that are coroutines are run."""

import asyncio
import inspect
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

MOST_S = 300.0  # what any test waits for comes sooner, on a slow machine too


@pytest.fixture(autouse=True)
def forbid_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = sys.modules.get("ray")
    if ray is None:
        return

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a unit test tried to start Ray: move it to tests/integration")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A coroutine runs on an event loop of its own, made as the fixture `loop` says where there is one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    with asyncio.Runner(loop_factory=pyfuncitem.funcargs.get("loop")) as runner:
        runner.run(in_time(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})))
    return True


async def in_time(test: Coroutine[Any, Any, None]) -> None:
    """A test that would wait for ever fails. It stays in its task, since tests count tasks."""
    async with asyncio.timeout(MOST_S):
        await test
