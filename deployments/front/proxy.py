"""Tells HAProxy how many requests this front may have at once, so that what is beyond is refused before it gets here.

To refuse a request takes this process a good part of what it takes to answer one; HAProxy refuses at a fraction of
that. So while a front must refuse, it asks HAProxy over its own socket for fewer requests at once, until it refuses
next to none. What cannot be handed on within some milliseconds is told 503 there (cluster/serving/haproxy.py). While
nothing is refused and many want in, each answer lets a little more in; where few want in, what was found is forgotten
over a minute, so that the next flood meets a front that knows its limit. A thread does all this: the event loop may be
late.
"""

import csv
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

from deployments.front.load import FadingPeak

log = logging.getLogger(__name__)
EVERY_S, CALM_EVERY_S = 0.02, 0.1  # while requests are refused; while none are: this takes time from those who answer
TELL_AGAIN_S = 1.0  # HAProxy forgets the limit when Serve starts it anew
COUNT_AGAIN_S = 0.25  # what HAProxy has refused, while it refuses
WITHIN_S = 1.0  # a HAProxy that says nothing for so long is asked again later
SEEN_AFTER_S, SURELY_SEEN_AFTER_S = 0.06, 0.2  # a lower limit shows its effect
LEAST_KEPT, MOST_KEPT = 0.7, 0.9  # of the limit when it is lowered: the less, the more of those that came are strained
FEW_STRAINED, MANY_STRAINED = 1.5, 0.05  # requests: one may have bad luck; of those that ended
COUNTED_S = 0.1  # in so long half of both is forgotten
MOST_MORE, MORE_PER_S = 0.2, 0.2  # places for each answer, while many want in: at most; by how long ago it was lowered
FORGOTTEN_S = 5.0  # in so long a limit that few want to reach becomes twice as high
TOLD_FROM = 1.05  # of what HAProxy knows: to tell it of less that is more would take time from those who answer
LEAST, MOST = 4, 4096  # requests at once
# What a HAProxy before the front is told when it starts, by whoever starts it:
REQUEST_S = 10  # the time that a client has to send its headers, and as much to begin its body, before it has a place
QUEUED_MS = 25  # how long a request waits there for a front that has as many as it wants at once
QUEUED = 64  # requests wait there for each front; then clients who ask for as many in a second are refused at once
# Two kinds of requests have places of their own, in backends of the same servers that are called so:
FEW = "few"  # of clients who ask for no more than QUEUED in a second: as many places as all others have
QUESTIONS = "questions"  # of who only asks about the server: a turn of the event loop answers all of these
QUESTIONS_AT_ONCE, QUESTIONS_MS = 8, 2000
HEALTH_MS = 1000  # health checks come before what was asked so long before them
RETRY_S = 4  # who is refused there is told to come back after a number of seconds up to this, drawn for each
_ASKED = "sc0_http_req_rate,mul(100)"  # in milliseconds by which a request comes later than it did


def asks_little(in_a_second: int) -> str:
    """HAProxy's condition for a client that has not asked more often."""
    return f"!{{ sc0_http_req_rate gt {in_a_second} }}"


def of_clients(most_connections: int, health: str) -> list[str]:
    """What HAProxy does with clients before any front: none has too many connections; who asks least is next.

    `health`: HAProxy's condition for a health check.
    """
    return [
        "stick-table type ipv6 size 100k expire 60s store conn_cur,http_req_rate(1s)",
        "tcp-request connection track-sc0 src",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {most_connections} }}",
        f"http-request set-priority-offset {_ASKED}",
        f"http-request set-priority-offset {_ASKED},sub({HEALTH_MS}) if {health}",
    ]


class Burden(NamedTuple):
    """What a front has done until now."""

    inside: int  # requests that wait for their answers
    strained: int  # requests since the start that were refused, late, or waited long, as there was too much to do
    answered: int

    @property
    def ended(self) -> int:
        """Who was answered after a long wait counts twice."""
        return self.strained + self.answered


class Limit:
    """How many requests the front may have at once.

    It is compared with the most that were inside of late: how many are inside in one moment says little.
    """

    def __init__(self) -> None:
        self.calm = True  # nothing has to be refused, and few want in
        self._value = float(MOST)
        self._inside = FadingPeak()
        self._last = Burden(0, 0, 0)
        self._strained = self._ended = 0.0  # of late
        self._stepped_s, self._lowered_s = inf, -inf
        self._shown_at = 0  # requests that will have ended then

    @property
    def value(self) -> int:
        return int(self._value)

    def step(self, now_s: float, burden: Burden) -> None:
        """Some time has passed. As long as many are strained it may have fewer than were inside, then a few more."""
        since_s, last = max(0.0, now_s - self._stepped_s), self._last
        self._stepped_s, self._last = now_s, burden
        self._inside.saw(now_s, burden.inside)
        inside = self._inside.at(now_s)
        if not self._has_shown(now_s, burden):
            return
        answered, strained = burden.answered - last.answered, burden.strained - last.strained
        kept = 0.5 ** (since_s / COUNTED_S)
        self._strained = kept * self._strained + strained
        self._ended = kept * self._ended + strained + answered
        crowded = 2 * inside > self._value
        self.calm = not crowded and self._strained < FEW_STRAINED
        if self._strained > max(FEW_STRAINED, MANY_STRAINED * self._ended):
            self._lower(now_s, burden, inside)
        elif crowded:  # by answers: a lower limit of long requests shows its effect later than one of short ones
            self._raise(self._value + answered * min(MOST_MORE, MORE_PER_S * (now_s - self._lowered_s)))
        else:
            self._raise(self._value * 2 ** (since_s / FORGOTTEN_S))

    def _lower(self, now_s: float, burden: Burden, inside: float) -> None:
        kept = min(MOST_KEPT, max(LEAST_KEPT, 1.0 - self._strained / self._ended))
        self._value = max(float(LEAST), kept * min(self._value, inside))
        self._lowered_s, self._shown_at = now_s, burden.ended + burden.inside
        self._strained = self._ended = 0.0

    def _raise(self, value: float) -> None:
        self._value = min(float(MOST), value)

    def _has_shown(self, now_s: float, burden: Burden) -> bool:
        """A lower limit shows its effect once those who were inside before have ended, or some time later at most."""
        since_s = now_s - self._lowered_s
        return since_s >= (SEEN_AFTER_S if burden.ended >= self._shown_at else SURELY_SEEN_AFTER_S)


class Refusals:
    """Counts the requests for a front that HAProxy has answered with an error itself, from the first look on.

    Where several fronts have a backend in common, each counts its share. A HAProxy that was started anew counts from 0.

    >>> head, refusals = "# pxname,svname,hrsp_5xx,bck", Refusals()
    >>> for made in (100, 120, 8):
    ...     rows = "app,r1,5,0", "app,r2,5,0", "app,spare,0,1", f"app,BACKEND,{10 + made},1", "other,BACKEND,7,0"
    ...     refusals.look("\\n".join((head, *rows)), ["app/r2"])
    >>> refusals.total
    14
    """

    def __init__(self) -> None:
        self._made: dict[str, int] = {}  # by backend, at the last look
        self._share = 0.0

    @property
    def total(self) -> int:
        return int(self._share)

    def look(self, stats: str, servers: Collection[str]) -> None:
        """What HAProxy says of its backends and servers, and the names by which it knows the front."""
        mine = Counter(server.partition("/")[0] for server in servers)
        rows: dict[str, list[dict[str, str]]] = {each: [] for each in mine if not each.endswith(f":{QUESTIONS}")}
        for row in csv.DictReader(stats.removeprefix("# ").splitlines()):
            rows.get(row["pxname"], []).append(row)
        for backend, of_backend in rows.items():
            made = _made_here(of_backend)
            before = self._made.get(backend, made)
            self._made[backend] = made
            self._share += (made - before if made >= before else made) * mine[backend] / _fronts(of_backend)


def _made_here(rows: Sequence[dict[str, str]]) -> int:
    """The errors of a backend that none of its servers has said."""
    return sum(int(row["hrsp_5xx"] or 0) * (1 if row["svname"] == "BACKEND" else -1) for row in rows)


def _fronts(rows: Sequence[dict[str, str]]) -> int:
    """The servers of a backend that do not only stand in for others."""
    return max(1, sum(row["svname"] != "BACKEND" and row["bck"] != "1" for row in rows))


class ProxyLimit(threading.Thread):
    """Runs until its end or that of its process. HAProxy takes orders at `path`, and calls the front by these names.

    Before a front may stand two of them, for HTTP and for gRPC, each with a limit of its own that depends on all that
    the front does: a flood through one is held back there, and leaves those who come through the other their places.
    """

    def __init__(self, path: Path, burden: Callable[[], Burden], servers: Callable[[], list[str]]) -> None:
        super().__init__(name="proxy-limit", daemon=True)
        self._path, self._burden, self._servers_now = path, burden, servers
        self._limit, self._told = Limit(), 0
        self._servers: list[str] = []  # by which HAProxy knew the front when it was last looked
        self._looked_s = self._counted_s = 0.0
        self._refusals = Refusals()
        self._ended = threading.Event()

    @property
    def refused(self) -> int:
        """Requests to this front that HAProxy has refused itself, since this began."""
        return self._refusals.total

    @property
    def value(self) -> int:
        """Requests that the front may have at once now."""
        return self._limit.value

    def end(self) -> None:
        self._ended.set()

    def run(self) -> None:
        while not self._ended.wait(CALM_EVERY_S if self._limit.calm else EVERY_S):
            self._limit.step(time.monotonic(), self._burden())
            again = time.monotonic() - self._looked_s > TELL_AGAIN_S
            if again or not self._told <= self._limit.value < TOLD_FROM * self._told:
                self._tell(self._limit.value, again)
            if again or (not self._limit.calm and time.monotonic() - self._counted_s > COUNT_AGAIN_S):
                self._count()

    def _count(self) -> None:
        self._counted_s = time.monotonic()
        with suppress(OSError):
            self._refusals.look(said(self._path, "show stat -1 6 -1"), self._servers)

    def _tell(self, limit: int, again: bool = True) -> None:
        try:
            if again:
                self._looked_s = time.monotonic()
                self._servers = self._servers_now()
            if self._servers:
                said(
                    self._path, ";".join(f"set maxconn server {each} {_places(each, limit)}" for each in self._servers)
                )
            self._told = limit
        except OSError as error:
            log.warning("HAProxy was not told its limit: %s: %s", type(error).__name__, error)


def _places(server: str, limit: int) -> int:
    return QUESTIONS_AT_ONCE if f":{QUESTIONS}/" in server else limit


def said(path: Path, command: str) -> str:
    """What HAProxy says to an order."""
    with socket.socket(socket.AF_UNIX) as haproxy:
        haproxy.settimeout(WITHIN_S)
        haproxy.connect(str(path))
        haproxy.sendall(f"{command}\n".encode())
        with haproxy.makefile() as reply:
            return reply.read()


def servers_at(path: Path, port: int | None) -> list[str]:
    """The names by which HAProxy knows what it reaches at this port; there may be several. None: not known yet."""
    return _named(said(path, "show servers state"), port) if port else []


def _named(told: str, port: int) -> list[str]:
    """
    >>> _named("1\\n# be_name srv_name srv_port\\napp r1 4001\\napp r2 4002\\n", 4002)
    ['app/r2']
    """
    lines = [line.removeprefix("# ") for line in told.splitlines()[1:]]
    rows = csv.DictReader(lines, delimiter=" ")
    return [f"{row['be_name']}/{row['srv_name']}" for row in rows if row.get("srv_port") == str(port)]
