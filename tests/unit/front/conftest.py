"""A front behind its HAProxy, with little room and a network that takes its time."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from experiments.shared import machine
from isobatch.deployments.front import grpc_proxy
from isobatch.deployments.front.proxy import ProxyLimit
from tests.helpers.toy_model import Toy


@pytest.fixture
def free_port() -> int:
    return machine.free_port()


@pytest.fixture
def one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front has room for one inference at once, whatever it learns."""
    monkeypatch.setattr(grpc_proxy, "MOST", 1)
    monkeypatch.setattr(grpc_proxy, "QUEUED", 10_000)
    monkeypatch.setattr(ProxyLimit, "_send", lambda *_: None)


class Held(threading.Event):
    """The network answers nothing until it is set."""

    launches = 0  # that have begun


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    end, run = Held(), Toy.run

    def waits(*args: Any) -> Any:
        end.launches += 1
        assert end.wait(60)
        return run(*args)

    monkeypatch.setattr(Toy, "run", waits)
    yield end
    end.set()
