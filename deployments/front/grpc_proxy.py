"""A HAProxy of the front's own, before its gRPC server: Serve's carries no gRPC, and refusing costs Python too much.

It listens where clients ask, and hands their calls on over a socket in the file system. Inferences have as many places
in the front as `ProxyLimit` says; who finds none is refused here. Questions about the server have a few of their own.
Streams, which stay, have others, and what is asked in them takes places in the front (`places`). HAProxy lives exactly
as long as the front: it is started again if it ends before, and the kernel kills it when the front is no more, whatever
ended that.
"""

import contextlib
import csv
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deployments.front.headers import CLIENT, STARTED, TIMEOUT
from deployments.front.open_inference.messages import SERVICE
from deployments.front.proxy import (
    FEW,
    MOST,
    QUESTIONS,
    QUESTIONS_AT_ONCE,
    QUESTIONS_MS,
    QUEUED,
    QUEUED_MS,
    REQUEST_S,
    RETRY_S,
    Burden,
    ProxyLimit,
    asks_little,
    of_clients,
    said,
)
from deployments.ray_settings import haproxy_folder
from profiles.errors import UserError

log = logging.getLogger(__name__)

CONNECTIONS = 1024  # of all clients
OF_ONE_ADDRESS = CONNECTIONS // 2
CALLS = 128  # of one connection at once: what is beyond waits at the client, which knows how long
STREAMS = 1024  # open at once, of all clients: more would keep calls out of the front
STREAMS_OF_ONE_ADDRESS = STREAMS // 2
CALLS_TO_FRONT = 1024  # of one connection to the front: there need not be many
QUESTION = 16_384  # bytes of a call that only asks about the server: all of it is here before it takes a place
IDLE_S = 300  # a client that says nothing for so long is hung up on; it connects again by itself
LONGEST_FOLDER = 72  # characters: sockets have 97, of which we need 25 below it
_SERVERS = [f"{FEW}/front", "inferences/front"]  # what HAProxy calls the front, where its places are limited
_STARTS_WITHIN_S, _ENDS_WITHIN_S, _AGAIN_AFTER_S = 30.0, 0.3, 0.5
_HEALTH = f"{{ path /{SERVICE}/ServerLive /{SERVICE}/ServerReady }}"
_CROWDED = "there are too many calls now: try again later"
_GONE = "this front stops: connect again"
_ENDED = "the front ended before it had answered"
# By HTTP's status, what HAProxy says by itself: gRPC's code and a sentence.
_SAYS = {
    400: (3, "this is no call over HTTP/2, or its metadata are longer than is allowed"),
    403: (7, "this is not allowed"),
    408: (4, f"the call was not here after {REQUEST_S} seconds"),
    413: (8, "the call is longer than is allowed"),
    500: (13, "the proxy before the front failed"),
    501: (12, "the call asks for what is not known here"),
    502: (14, _ENDED),
    503: (14, _CROWDED),
    504: (14, _ENDED),
}
_CONFIGURATION = """# isobatch: complete, where the program is a script that edits what Serve writes
global
    nbthread 1
    maxconn {connections}
    stats socket {folder}/admin.sock mode 600 level admin
    # Large requests come fast; no client's answers wait until another takes its own, as a whole window has room.
    tune.h2.fe.initial-window-size 1048576
    tune.h2.be.initial-window-size 65535
    tune.bufsize 73728
    tune.h2.fe.max-concurrent-streams {calls}
    tune.h2.be.max-concurrent-streams {calls_to_front}
defaults
    mode http
    timeout connect 100
    timeout http-request {request_s}s
    timeout http-keep-alive {idle_s}s
    timeout client {idle_s}s
    timeout server 24d
    timeout queue {queued_ms}
    option abortonclose
    option clitcpka
    http-reuse always
{errors}
frontend calls
    bind {address} proto h2
{clients}
    acl infers path /{service}/ModelInfer
    acl streams path /{service}/ModelStreamInfer
    acl refused status ge 400
    acl unavailable status 503
    acl turned_to_front srv_id -m found
    http-request del-header {started}
    http-request del-header {timeout}
    http-request set-header {started} t=%[date(0,us)] if infers
    http-request set-header {timeout} %[req.hdr(grpc-timeout)] if infers {{ req.hdr(grpc-timeout) -m found }}
    http-request set-header {client} %[src] if streams
    http-request track-sc1 src table streams if streams
    http-request return status 503 if streams {{ sc1_conn_cur gt {streams_of_one} }}
    http-request return status 503 if infers {{ avg_queue(inferences) gt {queued} }} {{ sc0_http_req_rate gt {queued} }}
    http-request wait-for-body time {request_s}s if !streams  # before it takes a place
    http-request deny deny_status 413 if !infers !streams {{ req.body_len gt {question} }}
    http-after-response set-header content-type application/grpc if refused
    http-after-response set-header grpc-status 14 if unavailable
    http-after-response set-header grpc-message "{crowded}" if unavailable
    http-after-response set-header grpc-message "{gone}" if unavailable turned_to_front
    http-after-response set-header grpc-retry-pushback-ms %[rand({retry_ms}),add(1000)] if {{ status 502:504 }}
    http-after-response set-status 200 if refused
    use_backend {few} if infers {asks_little}
    use_backend inferences if infers
    use_backend streams if streams
    default_backend {questions}
backend {few}
    server front unix@{folder}/front.sock proto h2 maxconn {places}
backend inferences
    server front unix@{folder}/front.sock proto h2 maxconn {places}
backend streams
    stick-table type ipv6 size 100k expire 60s store conn_cur
    server front unix@{folder}/front.sock proto h2 maxconn {streams}
backend {questions}
    timeout queue {questions_ms}
    server front unix@{folder}/front.sock proto h2 maxconn {questions_at_once}
"""
# Runs a program that the kernel kills when the thread that started it is no more.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class GrpcProxy(threading.Thread):
    """It hands calls on to `socket`, where the front must listen before this is opened."""

    def __init__(self, program: str, host: str, port: int, drain_s: float, burden: Callable[[], Burden]) -> None:
        super().__init__(name="grpc-proxy", daemon=True)
        self._folder = Path(tempfile.mkdtemp(prefix="grpc-", dir=_place()))
        self.socket, self._orders = self._folder / "front.sock", self._folder / "admin.sock"
        configuration, self._words = self._folder / "haproxy.cfg", self._folder / "words"
        configuration.write_text(_configuration(self._folder, host, port))
        self._command = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid())]
        self._command += [program, "-db", "-f", str(configuration)]
        self._drain_s = drain_s
        self._limit = ProxyLimit(self._orders, burden, lambda: _SERVERS)
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def places(self) -> int:
        """How many requests of streams the front works on at once: as many as it may have of those that take a call."""
        return self._limit.value

    @property
    def refused(self) -> int:
        """Calls that found no place here."""
        return self._limit.refused

    def open(self) -> None:
        """Returns when it listens."""
        self.start()
        until_s = time.monotonic() + _STARTS_WITHIN_S
        while not self._listens():
            if time.monotonic() > until_s or self._ending.wait(0.02):
                raise UserError(f"gRPC: HAProxy did not start: {self._said()}")
        self._limit.start()

    def run(self) -> None:
        """A thread of its own starts it, since it would end with whichever thread did."""
        while not self._ending.is_set():
            reason = self._ran()
            if not self._ending.is_set():
                log.warning("the HAProxy of gRPC ended and is started again: %s", reason)
                self._ending.wait(_AGAIN_AFTER_S)

    def _ran(self) -> str:
        """Why it ended, or could not start: a machine may have no memory or file handles left for a moment."""
        try:
            with self._words.open("wb") as words:
                self._process = subprocess.Popen(self._command, stdout=words, stderr=words)
            return f"exit code {self._process.wait()}, {self._said()}"
        except OSError as error:
            return str(error)

    def drain(self) -> None:
        """Listen no more; returns when what was admitted is answered.

        The front must stay until then: of a connection that it closes HAProxy may not read the last answers.
        """
        self._ending.set()
        self._limit.end()
        until_s = time.monotonic() + self._drain_s
        with contextlib.suppress(OSError):
            said(self._orders, "shutdown frontend calls")
            while self._inside() and time.monotonic() < until_s:
                time.sleep(0.01)

    def close(self) -> None:
        """Clients that have nothing to ask may stay connected, and are not waited for."""
        self._ending.set()
        self._signal(signal.SIGUSR1)
        self.join(_ENDS_WITHIN_S)
        self._signal(signal.SIGKILL)
        self.join(_ENDS_WITHIN_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _inside(self) -> int:
        """Calls that are here or in the front."""
        rows = csv.DictReader(said(self._orders, "show stat -1 2 -1").splitlines())
        return sum(int(row["scur"]) for row in rows)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(said(self._orders, "show version"))
        return False

    def _signal(self, number: int) -> None:
        if self._process:
            self._process.send_signal(number)

    def _said(self) -> str:
        with contextlib.suppress(OSError):
            return self._words.read_text(errors="replace")[:1000] or "it said nothing"
        return "what it said cannot be read"


def _configuration(folder: Path, host: str, port: int) -> str:
    says = '    http-error status {} hdr grpc-status {} hdr grpc-message "{}"'
    return _CONFIGURATION.format(
        folder=folder,
        address=f"[{host}]:{port} v4v6" if ":" in host else f"{host}:{port}",
        errors="\n".join(says.format(status, *told) for status, told in _SAYS.items()),
        connections=CONNECTIONS,
        clients="\n".join(f"    {line}" for line in of_clients(OF_ONE_ADDRESS, _HEALTH)),
        calls=CALLS,
        calls_to_front=CALLS_TO_FRONT,
        streams=STREAMS,
        streams_of_one=STREAMS_OF_ONE_ADDRESS,
        request_s=REQUEST_S,
        idle_s=IDLE_S,
        queued_ms=QUEUED_MS,
        queued=QUEUED,
        places=MOST,
        asks_little=asks_little(QUEUED),
        few=FEW,
        questions=QUESTIONS,
        questions_ms=QUESTIONS_MS,
        questions_at_once=QUESTIONS_AT_ONCE,
        question=QUESTION,
        retry_ms=1000 * (RETRY_S - 1),
        service=SERVICE,
        started=STARTED.decode(),
        timeout=TIMEOUT,
        client=CLIENT,
        crowded=_CROWDED,
        gone=_GONE,
    )


def _place() -> str:
    """A folder for small files whose path is short enough; that of the command if it serves, which deletes it."""
    if ours := haproxy_folder():
        return str(ours)
    usual = tempfile.gettempdir()
    return usual if len(usual) <= LONGEST_FOLDER else "/tmp"
