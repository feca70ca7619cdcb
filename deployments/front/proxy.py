"""Tells HAProxy how many requests this front may have at once, so that what is beyond is refused before it gets here.

To refuse a request takes this process a good part of what it takes to answer one; HAProxy refuses at a fraction of
that. So while a front must refuse, it asks HAProxy over its own socket for fewer requests at once, until it refuses
next to none. What cannot be handed on within some milliseconds is told 503 there (cluster/serving/haproxy.py). What the
front may have then grows again for as long as it refuses nothing. A thread does all this: the event loop may be late.
"""

import csv
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)
EVERY_S = 0.02
TELL_AGAIN_S = 1.0  # HAProxy forgets the limit when Serve starts it anew
WITHIN_S = 1.0  # a HAProxy that says nothing for so long is asked again later
MANY_REFUSED = 0.05  # of those that came
LEAST, USUAL, MOST = 4, 256, 4096  # requests at once


class Burden(NamedTuple):
    """What a front has done until now."""

    inside: int  # requests that wait for their answers
    refused: int  # since the start, as there was too much to do
    answered: int


class Limit:
    """How many requests the front may have at once."""

    def __init__(self) -> None:
        self.value = USUAL
        self._last = Burden(0, 0, 0)

    def step(self, burden: Burden) -> None:
        """Some time has passed. As long as many are refused it may have fewer than are inside now, then a few more."""
        refused, answered = burden.refused - self._last.refused, burden.answered - self._last.answered
        self._last = burden
        if refused > 1 and refused > MANY_REFUSED * (refused + answered):
            self.value = max(LEAST, int(0.95 * min(self.value, burden.inside)))
        elif 2 * burden.inside > self.value:
            self.value = min(MOST, self.value + max(1, self.value // 40))
        else:
            self.value = min(max(USUAL, self.value // 2), 2 * self.value)


class ProxyLimit(threading.Thread):
    """Runs until its process ends. HAProxy takes orders at `path`; it reaches this front at `port`; None: not known."""

    def __init__(self, path: Path, burden: Callable[[], Burden], port: Callable[[], int | None]) -> None:
        super().__init__(name="proxy-limit", daemon=True)
        self._path, self._burden, self._port = path, burden, port
        self._limit, self._told, self._told_s = Limit(), 0, 0.0

    def run(self) -> None:
        while True:
            time.sleep(EVERY_S)
            self._limit.step(self._burden())
            again = time.monotonic() - self._told_s > TELL_AGAIN_S
            if (port := self._port()) and (again or self._limit.value != self._told):
                self._tell(port, self._limit.value)

    def _tell(self, port: int, limit: int) -> None:
        """Every server that is at this port: HAProxy may know one under several names."""
        try:
            servers = _servers_at(_said(self._path, "show servers state"), port)
            _said(self._path, ";".join(f"set maxconn server {server} {limit}" for server in servers))
            self._told = limit
        except OSError as error:
            log.warning("HAProxy was not told its limit: %s: %s", type(error).__name__, error)
        self._told_s = time.monotonic()


def _said(path: Path, command: str) -> str:
    with socket.socket(socket.AF_UNIX) as haproxy:
        haproxy.settimeout(WITHIN_S)
        haproxy.connect(str(path))
        haproxy.sendall(f"{command}\n".encode())
        with haproxy.makefile() as reply:
            return reply.read()


def _servers_at(told: str, port: int) -> list[str]:
    """
    >>> _servers_at("1\\n# be_name srv_name srv_port\\napp r1 4001\\napp r2 4002\\n", 4002)
    ['app/r2']
    """
    lines = [line.removeprefix("# ") for line in told.splitlines()[1:]]
    rows = csv.DictReader(lines, delimiter=" ")
    return [f"{row['be_name']}/{row['srv_name']}" for row in rows if row.get("srv_port") == str(port)]
