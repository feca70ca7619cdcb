"""Ask over HTTP as any client does, and wait for what comes later."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")


def eventually(condition: Callable[[], T], within_s: float = 90.0) -> T:
    """Return the condition's value as soon as it is true; fail when it is still false after `within_s`.

    The time is generous because a slow machine may need all of it.
    """
    until_s = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > until_s:
            raise AssertionError(f"still {value!r} after {within_s:g} s")
        time.sleep(0.05)
    return value


def becomes(now: Callable[[], T], expected: T, within_s: float = 90.0) -> None:
    """Wait until a value is the expected one; fail with the last value when it is another one after `within_s`."""
    until_s = time.monotonic() + within_s
    while (value := now()) != expected:
        assert time.monotonic() < until_s, f"{value!r} instead of {expected!r} after {within_s:g} s"
        time.sleep(0.05)


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """The same inside an event loop."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


def ask(base: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Status and JSON of one request; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=120)
    try:
        connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def predict(base: str, inputs: object) -> list[dict[str, Any]]:
    """The outputs of a request that must be answered."""
    status, reply = ask(base, "POST", "/predict", {"inputs": inputs})
    assert status == 200, reply
    outputs: list[dict[str, Any]] = reply["outputs"]
    return outputs


class Load:
    """Clients of the toy network, each with one request after the other until the block ends; all must be answered
    right.

    `longest_s`: of a request. `stalled_s`: the longest time in which this process got no processor, as no server did.
    """

    def __init__(self, base: str, clients: int = 1) -> None:
        self.base, self.answered, self.longest_s, self.stalled_s = base, 0, 0.0, 0.0
        self.wrong: list[object] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._watch_stalls, *[self._ask] * clients)]

    def _watch_stalls(self) -> None:
        before_s = time.monotonic()
        while not self._stop.wait(0.01):
            before_s, last_s = time.monotonic(), before_s
            self.stalled_s = max(self.stalled_s, before_s - last_s)

    def _ask(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                code, reply = ask(self.base, "POST", "/predict", {"inputs": [[3, 7], [0, 3], [2, 5]]})
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(error)
                continue
            if code != 200 or [output["label"] for output in reply["outputs"]] != [7, 3, 5]:
                self.wrong.append(reply)
            self.answered += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
