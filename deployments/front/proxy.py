"""Limits the requests that HAProxy sends to this front at once, so that HAProxy refuses the others.

Refusing a request costs this process a large part of the cost of an answer; HAProxy refuses at a fraction of that. So
while the front has to refuse requests, it lowers its limit over HAProxy's socket, until it refuses almost none. HAProxy
then answers 503 to requests that find no place within some milliseconds (cluster/serving/haproxy.py). While the front
refuses nothing and many requests wait, each answer raises the limit a little. With few requests, the limit grows back
over a minute, so that it is still low at the next flood. A thread does this, since the event loop may be late.
"""

import csv
import ctypes
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

from isobatch.deployments.front.load import FadingPeak
from isobatch.profiles.errors import UserError

log = logging.getLogger(__name__)

# The limit

EVERY_S = 0.02  # the time between two steps of the limit while requests are refused
CALM_EVERY_S = 0.1  # the same while none are refused: each step takes processor time from answers
REPEAT_S = 1.0  # the time between two repetitions of the limit: HAProxy forgets it when Serve restarts it
COUNT_EVERY_S = 0.25  # the time between two readings of HAProxy's refusals, while it refuses
# The time that HAProxy has for a reply. Without one, the next attempt comes later.
REPLY_WITHIN_S = 1.0
SEEN_AFTER_S = 0.06  # a lower limit shows no effect before this time
SURELY_SEEN_AFTER_S = 0.2  # by this time it does, even if requests from before it are still inside
# The bounds of the factor that lowers the limit: the more requests were strained, the smaller it is.
LEAST_FACTOR = 0.7
MOST_FACTOR = 0.9
# Strained requests that are tolerated: this number, or this share of the requests that ended.
TOLERATED_STRAINED = 1.5
TOLERATED_STRAINED_SHARE = 0.05
STRAINED_HALF_LIFE_S = 0.1  # of the counts of strained and of ended requests
MOST_ADDED = 0.2  # the most places that each answer adds to the limit while many requests wait
ADDED_PER_S = 0.2  # how fast the added places grow with the time since the limit was lowered, per second
DOUBLES_S = 5.0  # the time in which a limit that is not reached doubles
MOST_DOUBLINGS = 10  # at once, after this process was stopped for a while: from `LEAST` to `MOST`
# While few requests come, the time between two returns of free memory to the system: after a flood glibc keeps it.
TRIM_EVERY_S = 30.0
LOOPBACK = ("127.0.0.1", "::1")  # the addresses by which Ray names HAProxy's own node
# HAProxy gets a higher limit only if it is higher by this factor, since each message takes processor time.
SENT_FROM_FACTOR = 1.05
# The bounds of the limit: requests at once.
LEAST, MOST = 4, 4096

# The configuration of a HAProxy before the front

# The time for a client to send its headers, and again to send its body, before the request takes a place.
REQUEST_S = 10
QUEUED_MS = 25  # the time that a request waits in HAProxy for a place in the front
# The requests that wait in HAProxy for each front. If more wait, clients that send as many per second are refused.
QUEUED = 64
# The backend of clients that send at most QUEUED requests per second: it has as many places as all others together.
FEW = "few"
# The backends of requests whose body has not arrived completely, and which would else take the places of others: of any
# client, and of clients that send at most QUEUED requests per second.
LONG = "long"
FEW_LONG = "few-long"
# The backend of requests about the server itself (health, metadata), which the front answers at once; its places, and
# the time that a request waits for one.
QUESTIONS = "questions"
QUESTIONS_AT_ONCE = 8
QUESTIONS_MS = 2000
CUT_MS = 100  # the time after a deadline in which the front itself may still refuse the request
HEALTH_MS = 1000  # health checks go before other requests that arrived up to this time before them
# The time for the front to answer a check, which begins every half second: else HAProxy takes it to hang.
HANGS_MS = 1500
RETRY_S = 4  # the longest time after which a refused client should retry; each gets a random whole number of seconds
FILES_OF_ONE = 2.5  # file handles of a connection in HAProxy: its two sides, and a pipe for one in four
FILES_BESIDE = 512  # file handles of everything else in HAProxy
LEAST_FILES = 2048  # the fewest file handles with which enough clients can connect
FREE_FOR_ONE = 4  # free connections that there must be for each connection of a client
# The requests of a client that may come too slowly within SLOW_WITHIN_S. With more, further long ones are refused.
SLOW = 16
SLOW_WITHIN_S = 10
# HAProxy's condition for a client of which too many requests came too slowly.
TOO_SLOW = f"{{ sc0_gpc0_rate gt {SLOW} }}"
# HAProxy's expression for the delay, in ms, of a client's request after those of others, by its rate of requests.
_DELAY_BY_RATE = "sc0_http_req_rate,mul(100)"
# The file from which HAProxy reads the SLO, in ms, of each backend when it starts. Fronts fill it, and tell the running
# HAProxy over its socket.
SLO_MAP = "slo.map"


def asks_little(per_s: int) -> str:
    """HAProxy's condition for a client that sends at most `per_s` requests per second."""
    return f"!{{ sc0_http_req_rate gt {per_s} }}"


def allowed_connections(most: int) -> int:
    """The connections, `most` at most, that a HAProxy can have with this process's limit of open files."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return most
    if files < LEAST_FILES:
        raise UserError(f"only {files} files may be open here, but serving needs {LEAST_FILES:,}: raise ulimit -n")
    return min(most, int((files - FILES_BESIDE) / FILES_OF_ONE))


def of_clients(connections: int, health: str, proxies: Collection[str]) -> list[str]:
    """HAProxy's rules for clients: a share of the connections for each, and the least frequent client goes first.

    The more connections all clients have, the fewer one client gets, so some remain for clients that come later. A
    client is an IPv4 address, or an IPv6 network of 64 bits, since one customer has all addresses of it. `health`:
    HAProxy's condition for a health check. `proxies`: networks without such a share, since their X-Forwarded-For names
    the client. `txn.client` becomes its address.
    """
    trusted = f"if {{ src {' '.join(proxies)} }}"
    exempt = [f"tcp-request connection accept {trusted}"]
    named = [f"http-request set-var(txn.client) req.hdr_ip(x-forwarded-for,-1) {trusted}"]
    named += [f"http-request track-sc0 var(txn.client),ipmask(32,64) {trusted}"]
    return [
        *(exempt if proxies else ()),
        f"stick-table type ipv6 size 100k expire 60s store conn_cur,http_req_rate(1s),gpc0_rate({SLOW_WITHIN_S}s)",
        "tcp-request connection track-sc0 src,ipmask(32,64)",
        "tcp-request connection set-var(sess.all) fe_conn",
        f"tcp-request connection reject if {{ sc0_conn_cur,mul({FREE_FOR_ONE}),add(sess.all) gt {connections} }}",
        "http-request set-var(txn.client) src",
        *(named if proxies else ()),
        "http-after-response sc-inc-gpc0(0) if { status 408 }",
        f"http-request set-priority-offset {_DELAY_BY_RATE}",
        f"http-request set-priority-offset {_DELAY_BY_RATE},sub({HEALTH_MS}) if {health}",
    ]


class Burden(NamedTuple):
    """The load of a front: requests inside now, and the numbers of others since the start."""

    inside: int
    strained: int  # refused, late, or answered after a long wait, because of overload
    answered: int

    @property
    def ended(self) -> int:
        """Requests that ended. One that was answered after a long wait counts twice."""
        return self.strained + self.answered


class Limit:
    """The number of requests that the front may have at once.

    It is compared with the recent peak of requests inside, since their number at one moment varies a lot.
    """

    def __init__(self) -> None:
        self.calm = True  # nothing has to be refused, and few requests wait
        self._value = float(MOST)
        self._inside = FadingPeak()
        self._last = Burden(0, 0, 0)
        self._strained = self._ended = 0.0  # recent requests
        self._stepped_s, self._lowered_s = inf, -inf
        self._shown_at = 0  # the number of ended requests at which the last lower limit has shown its effect

    @property
    def value(self) -> int:
        return int(self._value)

    def step(self, now_s: float, burden: Burden) -> None:
        """Adapt the limit: below the recent peak while many requests are strained, then slowly higher."""
        since_s, last = max(0.0, now_s - self._stepped_s), self._last
        self._stepped_s, self._last = now_s, burden
        self._inside.add(now_s, burden.inside)
        inside = self._inside.at(now_s)
        if not self._has_shown(now_s, burden):
            return
        answered, strained = burden.answered - last.answered, burden.strained - last.strained
        remembered = 0.5 ** (since_s / STRAINED_HALF_LIFE_S)
        self._strained = remembered * self._strained + strained
        self._ended = remembered * self._ended + strained + answered
        crowded = 2 * inside > self._value
        self.calm = not crowded and self._strained < TOLERATED_STRAINED
        if self._strained > max(TOLERATED_STRAINED, TOLERATED_STRAINED_SHARE * self._ended):
            self._lower(now_s, burden, inside)
        elif crowded:  # per answer, since a change of the limit shows later where requests take longer
            self._raise(self._value + answered * min(MOST_ADDED, ADDED_PER_S * (now_s - self._lowered_s)))
        else:
            self._raise(self._value * 2 ** min(since_s / DOUBLES_S, MOST_DOUBLINGS))

    def _lower(self, now_s: float, burden: Burden, inside: float) -> None:
        factor = min(MOST_FACTOR, max(LEAST_FACTOR, 1.0 - self._strained / self._ended))
        self._value = max(float(LEAST), factor * min(self._value, inside))
        self._lowered_s, self._shown_at = now_s, burden.ended + burden.inside
        self._strained = self._ended = 0.0

    def _raise(self, value: float) -> None:
        self._value = min(float(MOST), value)

    def _has_shown(self, now_s: float, burden: Burden) -> bool:
        """Whether the last lower limit shows its effect: the requests that were inside have ended, or time is up."""
        since_s = now_s - self._lowered_s
        return since_s >= (SEEN_AFTER_S if burden.ended >= self._shown_at else SURELY_SEEN_AFTER_S)


class Refusals:
    """Counts the requests for a front that HAProxy itself has refused, from the first reading on.

    Each front counts its share of a backend that several fronts of this node use: fronts of other nodes ask their own
    HAProxy. A restarted HAProxy counts from 0.

    >>> head, refusals = "# pxname,svname,hrsp_5xx,eresp,bck,addr", Refusals()
    >>> for errors in (100, 120, 8):
    ...     rows = [f"app,BACKEND,{10 + errors},0,0,", "other,BACKEND,7,0,0,", "app,spare,0,0,1,127.0.0.1:5"]
    ...     rows += ["app,r1,5,0,0,127.0.0.1:3", "app,r2,5,0,0,127.0.0.1:4", "app,far,0,0,0,10.0.0.7:4"]
    ...     refusals.read("\\n".join((head, *rows)), ["app/r2"])
    >>> refusals.total
    14
    """

    command = "show stat -1 6 -1"  # to HAProxy

    def __init__(self) -> None:
        self._errors: dict[str, int] = {}  # by backend, at the last reading
        self._share = 0.0

    @property
    def total(self) -> int:
        return int(self._share)

    def read(self, stats: str, servers: Sequence[str]) -> None:
        """Read HAProxy's reply to `command`; `servers` are its names for the front, and then for others."""
        own = dict(server.split("/") for server in reversed(servers))
        rows: dict[str, list[dict[str, str]]] = {name: [] for name in own if not name.endswith(f":{QUESTIONS}")}
        for row in csv.DictReader(stats.removeprefix("# ").splitlines()):
            rows.get(row["pxname"], []).append(row)
        for backend, backend_rows in rows.items():
            # The errors that come from HAProxy itself, and not from a server of the backend.
            signed = (int(row["hrsp_5xx"] or 0) * (1 if row["svname"] == "BACKEND" else -1) for row in backend_rows)
            # Of these, the requests that it ended inside a front, as at their deadline: the front counts them itself.
            ended = (int(row["eresp"] or 0) for row in backend_rows if row["svname"] == "BACKEND")
            hosts = {row["svname"]: (row["addr"] or "").rpartition(":")[0] for row in backend_rows if row["bck"] != "1"}
            fronts = list(hosts.values()).count(hosts.get(own[backend], ""))  # of this node, without backups
            self.add(backend, sum(signed), 1 / max(1, fronts))
            self.add(f"{backend}, ended", sum(ended), -1 / max(1, fronts))

    def add(self, backend: str, errors: int, share: float = 1.0) -> None:
        """Add this front's share of the errors that are new since the last reading."""
        before = self._errors.get(backend, errors)
        self._errors[backend] = errors
        self._share += share * (errors - before if errors >= before else errors)


class ProxyLimit(threading.Thread):
    """A thread that adapts the limit in a HAProxy until `end`. `path` is HAProxy's socket for commands.

    `servers` returns HAProxy's names for the front. A front may have two HAProxies, for HTTP and for gRPC. Each has its
    own limit, which depends on the whole load of the front: a flood through one leaves the places of the other free.
    `slo_ms`: HAProxy ends requests without a deadline of their own soon after this time; None: it does not.
    """

    def __init__(
        self,
        path: Path,
        burden: Callable[[], Burden],
        servers: Callable[[], list[str]],
        slo_ms: float | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        super().__init__(name="proxy-limit", daemon=True)
        self._path, self._burden, self._find_servers, self._slo_ms = path, burden, servers, slo_ms
        self._limit, self._sent_limit = Limit(), 0
        self._servers: list[str] = []  # HAProxy's names for the front, at the last repetition
        self._repeated_s = self._counted_s = self._trimmed_s = 0.0
        self.refusals = refusals or Refusals()  # the requests to this front that HAProxy has refused
        self._ended = threading.Event()

    @property
    def value(self) -> int:
        """The number of requests that the front may have at once now."""
        return self._limit.value

    def end(self) -> None:
        self._ended.set()

    def run(self) -> None:
        while not self._ended.wait(CALM_EVERY_S if self._limit.calm else EVERY_S):
            self._limit.step(time.monotonic(), self._burden())
            repeat = time.monotonic() - self._repeated_s > REPEAT_S
            if repeat or not self._sent_limit <= self._limit.value < SENT_FROM_FACTOR * self._sent_limit:
                self._send(self._limit.value, repeat)
            if repeat or (not self._limit.calm and time.monotonic() - self._counted_s > COUNT_EVERY_S):
                self._count()
            if self._limit.calm and time.monotonic() - self._trimmed_s > TRIM_EVERY_S:
                self._trimmed_s = time.monotonic()
                with suppress(AttributeError):  # another C library
                    ctypes.CDLL(None).malloc_trim(0)

    def _count(self) -> None:
        self._counted_s = time.monotonic()
        with suppress(OSError):
            self.refusals.read(haproxy_reply(self._path, self.refusals.command), self._servers)

    def _send(self, limit: int, find_servers: bool = True) -> None:
        try:
            if find_servers:
                self._repeated_s = time.monotonic()
                self._servers = self._find_servers()
                self._tell_slo()
            if self._servers:
                places = [QUESTIONS_AT_ONCE if f":{QUESTIONS}/" in server else limit for server in self._servers]
                commands = map("set maxconn server {} {}".format, self._servers, places)
                haproxy_reply(self._path, ";".join(commands))
            self._sent_limit = limit
        except OSError as error:
            log.warning("HAProxy did not take the limit of this front: %s: %s", type(error).__name__, error)

    def _tell_slo(self) -> None:
        if self._slo_ms is None:
            return
        # Ray's socket is in a folder of this node, the map in the folder above.
        file, slo = self._path.parent.with_name(SLO_MAP), str(ceil(self._slo_ms))
        backends = {server.partition("/")[0] for server in self._servers}
        for backend in backends:
            if "not found" in haproxy_reply(self._path, f"set map {file} {backend} {slo}"):
                haproxy_reply(self._path, f"add map {file} {backend} {slo}")
        with suppress(OSError):  # such as a full disk, on which the limit must still be sent
            _keep(file, dict.fromkeys(backends, slo))


def _keep(slo_map: Path, entries: Mapping[str, str]) -> None:
    """Write entries to the map, for a HAProxy that starts while no front can reach it.

    If two fronts write at once, the entries of one get lost, and come back when it repeats its limit.
    """
    before = slo_map.read_text().splitlines()
    others = [line for line in before if line.partition(" ")[0] not in entries]
    after = others + [f"{backend} {slo}" for backend, slo in entries.items()]
    if sorted(after) != sorted(before):
        draft = slo_map.with_name(f"{SLO_MAP}.{os.getpid()}")
        draft.write_text("".join(f"{line}\n" for line in after))
        draft.replace(slo_map)


class WatchedProxies:
    """The proxies before a front: the requests that they refuse count as the front's."""

    def __init__(self) -> None:
        self._counted = dict[ProxyLimit, int]()  # each proxy's refused requests that are counted

    def watch(self, limit: ProxyLimit) -> None:
        """Count the requests that a proxy with this limit refuses from now on."""
        self._counted[limit] = limit.refusals.total

    def new_refusals(self) -> int:
        """The requests that were refused since the last call."""
        before = sum(self._counted.values())
        self._counted = {limit: max(counted, limit.refusals.total) for limit, counted in self._counted.items()}
        return sum(self._counted.values()) - before


def haproxy_reply(path: Path, command: str) -> str:
    """Send a command to HAProxy's socket, and return its reply."""
    with socket.socket(socket.AF_UNIX) as haproxy:
        haproxy.settimeout(REPLY_WITHIN_S)
        haproxy.connect(str(path))
        haproxy.sendall(f"{command}\n".encode())
        with haproxy.makefile() as reply:
            return reply.read()


def servers_at(path: Path, port: int | None, node: str) -> list[str]:
    """HAProxy's names for the servers at this port of its own node, at address `node`; none before the port is known.

    Fronts of other nodes have the same ports. Ray writes the loopback address for a front of HAProxy's own node. The
    first front of a node also names those of other nodes that get what exceeds its limit: they cannot reach HAProxy's
    socket, and without any limit a flood through one node would reach their processes.
    """
    if not port:
        return []
    state = haproxy_reply(path, "show servers state")
    lines = [line.removeprefix("# ") for line in state.splitlines()[1:]]
    rows = list(csv.DictReader(lines, delimiter=" "))
    here = {*LOOPBACK, node}
    near = [row for row in rows if row["srv_addr"] in here]
    first = {row["be_name"]: row["srv_port"] for row in reversed(near)}
    own = [row for row in near if row["srv_port"] == str(port)]
    far = [row for row in rows if row["srv_addr"] not in here and first.get(row["be_name"]) == str(port)]
    return [f"{row['be_name']}/{row['srv_name']}" for row in own + far]
