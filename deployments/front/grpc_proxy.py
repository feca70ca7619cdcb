"""The front's own HAProxy before its gRPC server: Serve's carries no gRPC, and refusing is too slow in Python.

It listens for clients, and passes their calls on over a Unix socket, as HTTP/1.1 (`calls`). Inferences have as many
places in the front as `ProxyLimit` allows; HAProxy refuses the others. Requests about the server have a few places of
their own. Streams have others, since they stay open; the requests in them take places in the front (`Places`). While
the front hangs, HAProxy refuses calls, and after some seconds it ends those inside. The front restarts it if it ends
early, and the kernel kills it when the front's process ends.
"""

import contextlib
import csv
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path

from isobatch.deployments.front.headers import (
    CLIENT,
    DEADLINE_HEADER,
    KERNEL,
    LONGEST_MS,
    SENT,
    STARTED,
    trusted_proxies,
)
from isobatch.deployments.front.open_inference.messages import SERVICE
from isobatch.deployments.front.proxy import (
    CUT_MS,
    FEW,
    HANGS_MS,
    LONG,
    MOST,
    QUESTIONS,
    QUESTIONS_AT_ONCE,
    QUESTIONS_MS,
    QUEUED,
    QUEUED_MS,
    REQUEST_S,
    RETRY_S,
    TOO_SLOW,
    Burden,
    ProxyLimit,
    Refusals,
    allowed_connections,
    asks_little,
    haproxy_reply,
    of_clients,
)
from isobatch.deployments.ray_settings import haproxy_folder
from isobatch.profiles.errors import UserError

log = logging.getLogger(__name__)

CONNECTIONS = 2048  # connections of all clients
# Calls of one connection at once. Further calls wait at the client.
CALLS = 128
# Calls of one client at once, each of which may take a buffer of HAProxy while its message arrives.
CALLS_OF_ONE_ADDRESS = 4096
STREAMS = 1024  # streams of all clients that are open at once: more would keep calls out of the front
STREAMS_OF_ONE_ADDRESS = STREAMS // 2  # streams from one address
# Bytes of a call that has arrived completely before it takes a place. Longer ones have places of their own.
WHOLE_BYTES = 61_440
ANSWERED_S = 10  # the time for the front to answer a call about the server
QUESTION_BYTES = 16_384  # bytes of a call about the server, which always arrives completely before it takes a place
PARAMETERS_BYTES = 4096  # of an inference, which begins with names and parameters
# The time after which a connection without a call is closed. Clients connect again by themselves.
KEEP_ALIVE_S = 30
IDLE_S = 300  # the time for which a client may be silent in a call
# The checks, a second apart, that a front leaves unanswered before the calls inside it end.
GIVEN_UP_CHECKS = 3
LONGEST_FOLDER = 72  # characters of the folder's path: a socket's path has at most 97, and we need 25 below the folder
# HAProxy's names for the front in the backends with a limit.
_SERVERS = [f"{FEW}/front", f"{LONG}/front", "inferences/front"]
REFUSED = "refused"  # the table in which HAProxy counts the inferences and streams that it refused
_STARTS_WITHIN_S = 30.0  # the time for HAProxy to start, for instance on a busy machine
_ENDS_WITHIN_S = 0.3  # the time for HAProxy to end after a signal
_RESTART_AFTER_S = 0.5  # the wait before HAProxy is started again
_HEALTH = f"{{ path /{SERVICE}/ServerLive /{SERVICE}/ServerReady }}"
# A refusal by the front of a call that has not come completely: as HAProxy's own, since that ends the call.
_UNFINISHED = 'content-type application/grpc hdr grpc-status %[var(txn.status)] hdr grpc-message "%[var(txn.message)]"'
_CROWDED = "there are too many calls now: try again later"
_GONE = "this front stops, or does not answer: connect again"
_ENDED = "the front ended before it answered"
# HAProxy's own errors: the gRPC code and a sentence for each HTTP status.
_ERRORS = {
    400: (3, f"this is no call over HTTP/2, its metadata are too long, or nothing was sent for {IDLE_S} seconds"),
    403: (7, "this is not allowed"),
    405: (12, "a call of gRPC is a POST"),
    408: (4, f"the call did not arrive within {REQUEST_S} seconds"),
    413: (8, "the call is too long"),
    500: (13, "the proxy before the front failed"),
    501: (12, "the proxy before the front does not support this call"),
    502: (14, _ENDED),
    503: (14, _CROWDED),
    504: (14, "the front did not answer in time: try again later"),
}
# Runs a program that the kernel kills when the thread that started it ends.
_RUN_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class RefusedCalls(Refusals):
    """Counts the inferences and streams that HAProxy itself refused: in its statistics they are successes."""

    command = f"show table {REFUSED}"

    def __init__(self) -> None:
        super().__init__()
        self.add(REFUSED, 0)  # this HAProxy starts with the front

    def read(self, table: str, servers: Sequence[str]) -> None:
        count = re.search(r"gpc0=(\d+)", table)
        self.add(REFUSED, int(count[1]) if count else 0)


class GrpcProxy(threading.Thread):
    """A thread that runs HAProxy. The front must listen on `socket` before `open`.

    `limit`: of the calls that the front runs at once, and likewise of the requests of streams. `slo_ms`: HAProxy ends
    inferences soon after their `x-deadline-ms`, or soon after this time; None: it ends none.
    """

    def __init__(
        self,
        program: str,
        host: str,
        port: int,
        drain_s: float,
        burden: Callable[[], Burden],
        slo_ms: float | None = None,
    ) -> None:
        super().__init__(name="grpc-proxy", daemon=True)
        self._folder = Path(tempfile.mkdtemp(prefix="grpc-", dir=_parent_folder()))
        self.socket, self._admin = self._folder / "front.sock", self._folder / "admin.sock"
        configuration, self._output = self._folder / "haproxy.cfg", self._folder / "output"
        configuration.write_text(_configuration(self._folder, host, port, slo_ms))
        self._command = [sys.executable, "-I", "-S", "-c", _RUN_TIED, str(os.getpid())]
        self._command += [program, "-db", "-f", str(configuration)]
        self._drain_s = drain_s
        self.limit = ProxyLimit(self._admin, burden, lambda: _SERVERS, refusals=RefusedCalls())
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Start HAProxy; returns when it listens."""
        self.start()
        until_s = time.monotonic() + _STARTS_WITHIN_S
        while not self._listens():
            if time.monotonic() > until_s or self._ending.wait(0.02):
                raise UserError(f"gRPC: HAProxy did not start: {self._error_text()}")
        self.limit.start()

    def run(self) -> None:
        """Run HAProxy until the end. It runs in this thread, since it ends with the thread that started it."""
        while not self._ending.is_set():
            reason = self._run_once()
            if not self._ending.is_set():
                log.warning("the HAProxy of gRPC ended and is started again: %s", reason)
                self._ending.wait(_RESTART_AFTER_S)

    def _run_once(self) -> str:
        """Returns why it ended, or why it could not start: for a moment the machine may lack memory or file handles."""
        try:
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
            return f"exit code {self._process.wait()}, {self._error_text()}"
        except OSError as error:
            return str(error)

    def drain(self) -> None:
        """Stop listening; returns when all calls are answered.

        The front must run until then: if it closed a connection, HAProxy might not read the last answers.
        """
        self._ending.set()
        self.limit.end()
        until_s = time.monotonic() + self._drain_s
        with contextlib.suppress(OSError):
            haproxy_reply(self._admin, "shutdown frontend calls")
            while time.monotonic() < until_s:
                rows = csv.DictReader(haproxy_reply(self._admin, "show stat -1 2 -1").splitlines())
                if not sum(int(row["scur"]) for row in rows):  # calls in HAProxy or in the front
                    break
                time.sleep(0.01)

    def close(self) -> None:
        """End HAProxy. Idle clients may still be connected; it does not wait for them."""
        self._ending.set()
        self._signal(signal.SIGUSR1)
        self.join(_ENDS_WITHIN_S)
        self._signal(signal.SIGKILL)
        self.join(_ENDS_WITHIN_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(haproxy_reply(self._admin, "show version"))
        return False

    def _signal(self, number: int) -> None:
        if self._process:
            self._process.send_signal(number)

    def _error_text(self) -> str:
        with contextlib.suppress(OSError):
            return self._output.read_text(errors="replace")[:1000] or "without any output"
        return "and its output cannot be read"


def _configuration(folder: Path, host: str, port: int, slo_ms: float | None) -> str:
    connections, started, retry_ms = allowed_connections(CONNECTIONS), STARTED.decode(), 1000 * (RETRY_S - 1)
    address = f"[{host}]:{port} v4v6" if ":" in host else f"{host}:{port}"
    http_error = '    http-error status {} hdr grpc-status {} hdr grpc-message "{}"'
    errors = "\n".join(http_error.format(status, *error) for status, error in _ERRORS.items())
    clients = "\n".join(f"    {line}" for line in of_clients(connections, _HEALTH, trusted_proxies()))
    deadlines = "" if slo_ms is None else "\n".join(f"    {line}" for line in _deadlines(slo_ms))
    ends = f"http-request set-timeout server var(txn.within_ms),add({CUT_MS}) if {{ var(txn.within_ms) -m found }}"
    return f"""# isobatch: complete, where the program is a script that edits what Serve writes
global
    nbthread 1
    maxconn {allowed_connections(CONNECTIONS + MOST)}
    stats socket {folder}/admin.sock mode 600 level admin
    # Large windows, for large requests. Every answer fits, so no client blocks the answers of another.
    tune.h2.fe.initial-window-size 1048576
    tune.bufsize 73728
    tune.h2.fe.max-concurrent-streams {CALLS}
defaults
    mode http
    timeout connect 100
    timeout check {HANGS_MS}
    timeout http-request {REQUEST_S}s
    timeout http-keep-alive {KEEP_ALIVE_S}s
    timeout client {IDLE_S}s
    timeout server 24d
    timeout queue {QUEUED_MS}
    option abortonclose
    option clitcpka
    option httpchk GET /  # which the front answers as any path
    default-server on-marked-down shutdown-sessions
    http-reuse always
{errors}
frontend calls
    bind {address} proto h2
    maxconn {connections}
{clients}
    http-request deny deny_status 405 if !METH_POST
    acl infers path /{SERVICE}/ModelInfer
    acl streams path /{SERVICE}/ModelStreamInfer
    acl refused status ge 400
    acl unavailable status 503
    acl turned_to_front srv_id -m found
    acl hangs nbsrv({QUESTIONS}) eq 0
    acl hangs nbsrv(streams) eq 0
    http-request del-header {started}
    http-request set-var(txn.began) date(0,us) if infers
    http-request set-header {started} t=%[var(txn.began)];{KERNEL} if infers
    http-request set-header {CLIENT.decode()} %[var(txn.client)] if streams
    http-request track-sc2 int(0) table {REFUSED} if infers || streams
    http-request track-sc1 var(txn.client),ipmask(32,64) table streams if streams
    http-request return status 503 if streams {{ sc1_conn_cur gt {STREAMS_OF_ONE_ADDRESS} }}
    http-request track-sc1 var(txn.client),ipmask(32,64) table inferences if infers
    http-request return status 503 if infers {{ sc1_conn_cur gt {CALLS_OF_ONE_ADDRESS} }}
    http-request return status 503 if infers {{ avg_queue(inferences) gt {QUEUED} }} {{ sc0_http_req_rate gt {QUEUED} }}
    http-request wait-for-body time {REQUEST_S}s if !streams  # before it takes a place
    http-request set-header {SENT.decode()} %[date(0,us),sub(txn.began)] if infers
    http-request return status 503 if hangs
    http-request return status 503 if infers {{ req.body_len gt {WHOLE_BYTES} }} {TOO_SLOW}
    http-request deny deny_status 413 if !infers !streams {{ req.body_len gt {QUESTION_BYTES} }}
{deadlines}
    http-response set-var(txn.status) res.fhdr(grpc-status)
    http-response set-var(txn.message) res.fhdr(grpc-message)
    http-response set-var(txn.retry_ms) res.fhdr(grpc-retry-pushback-ms) if {{ status 408 }}
    http-response return status 200 {_UNFINISHED} if {{ status 408 }}
    http-after-response set-header content-type application/grpc if refused
    http-after-response set-header grpc-status 14 if unavailable
    http-after-response set-header grpc-message "{_CROWDED}" if unavailable
    http-after-response set-header grpc-message "{_GONE}" if unavailable turned_to_front || unavailable hangs
    http-after-response set-header grpc-retry-pushback-ms %[rand({retry_ms}),add(1000)] if {{ status 502:504 }}
    http-after-response set-header grpc-retry-pushback-ms %[var(txn.retry_ms)] if {{ var(txn.retry_ms) -m found }}
    http-after-response sc-inc-gpc0(2) if unavailable !turned_to_front
    http-after-response set-status 200 if refused
    use_backend {LONG} if infers {{ req.body_len gt {WHOLE_BYTES} }}
    use_backend {FEW} if infers {asks_little(QUEUED)}
    use_backend inferences if infers
    use_backend streams if streams
    default_backend {QUESTIONS}
backend {FEW}
    {ends}
    server front unix@{folder}/front.sock maxconn {MOST} track streams/front
backend {LONG}
    {ends}
    server front unix@{folder}/front.sock maxconn {MOST} track streams/front
backend inferences
    {ends}
    stick-table type ipv6 size 100k expire 60s store conn_cur
    server front unix@{folder}/front.sock maxconn {MOST} track streams/front
backend streams
    stick-table type ipv6 size 100k expire 60s store conn_cur
    server front unix@{folder}/front.sock maxconn {STREAMS} check inter 1s fall {GIVEN_UP_CHECKS} rise 1
backend {REFUSED}
    stick-table type integer size 1 store gpc0
backend {QUESTIONS}
    timeout queue {QUESTIONS_MS}
    timeout server {ANSWERED_S}s
    server front unix@{folder}/front.sock maxconn {QUESTIONS_AT_ONCE} check inter 500ms fall 1 rise 1
"""


def _deadlines(slo_ms: float) -> list[str]:
    """Rules that find the deadline of an inference, soon after which HAProxy ends it: the front may hang.

    A client with a grpc-timeout ends its call itself. A message may bring its own `timeout`, whose value HAProxy cannot
    read: it ends no call with that word among its parameters, nor one that may be compressed.
    """
    deadline_ms, longest_ms = f"req.hdr_val({DEADLINE_HEADER})", int(LONGEST_MS)
    return [
        f"acl own_deadline req.hdr({DEADLINE_HEADER}) -m found",
        "acl own_deadline req.hdr(grpc-timeout) -m found",
        "acl own_deadline req.hdr(grpc-encoding) -m found",
        f"acl own_deadline req.body,bytes(0,{PARAMETERS_BYTES}),hex -m sub {b'timeout'.hex().upper()}",
        f"http-request set-var(txn.within_ms) {deadline_ms} if infers {{ {deadline_ms} 1:{longest_ms} }}",
        f"http-request set-var(txn.within_ms) int({ceil(slo_ms)}) if infers !own_deadline",
    ]


def _parent_folder() -> str:
    """A folder with a short path: that of `isobatch serve`, which deletes it, or the system's temporary folder."""
    if folder := haproxy_folder():
        return str(folder)
    default = tempfile.gettempdir()
    return default if len(default) <= LONGEST_FOLDER else "/tmp"
