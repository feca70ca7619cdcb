"""What is checked before a Ray is started, and what is left after: nothing."""

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.serving import local
from cluster.serving.deploy import _wait_until_reachable
from cluster.serving.haproxy import MAX_OF_ONE_ADDRESS, QUEUED, QUEUED_MS, REQUEST_S, RETRY_S, guarded, ready, stopping
from cluster.serving.local import SHORT, LocalRay, check_place, free_port, is_free, running_cluster, short_temporary
from cluster.serving.processes import descendants
from deployments.front.headers import waited_s_by
from deployments.front.proxy import Burden, ProxyLimit, said, servers_at
from deployments.ray_facts import patient_start
from deployments.ray_settings import haproxy_settings
from profiles.errors import UserError


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No note of a Ray that others run on this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def test_a_taken_port_is_named_and_another_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of 127\.0\.0\.1 cannot be used.*--port"):
            check_place("127.0.0.1", port)
        assert free_port(port) != port
    check_place("127.0.0.1", port)
    assert free_port(port) == port


def test_sockets_get_a_folder_that_is_short_enough_or_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert short_temporary() == "/tmp"
    assert "RAY_TMPDIR" not in os.environ
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/of/me/alone")
    assert short_temporary() == "/tmp"
    assert "RAY_TMPDIR" not in os.environ
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert short_temporary() == "/tmp"
    assert os.environ["RAY_TMPDIR"] == "/tmp"
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(UserError, match=r"RAY_TMPDIR is '.*x'.*at most 35"):
        short_temporary()


def test_with_the_longest_folder_the_paths_of_haproxys_sockets_are_short_enough() -> None:
    folder = "x" * SHORT + "/isobatch-12345678"
    paths = {name: path for name, path in haproxy_settings(folder, "", 1, "", "", "").items() if "SOCKET_PATH" in name}
    node = "0" * 56  # Ray puts them into a folder of this name
    assert len(paths) == 2
    assert max(len(path.replace(folder, f"{folder}/{node}")) for path in paths.values()) <= 97


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(UserError, match=r"port 8000 of 192\.0\.2\.77 cannot be used"):
        check_place("192.0.2.77", 8000)


def test_a_note_of_a_cluster_counts_only_while_somebody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert running_cluster() is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert running_cluster() == address
    assert running_cluster() is None
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(UserError, match=r"already running at head:6379.*'ray stop'"):
        check_place("127.0.0.1", 8000)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_orphan_is_adopted_and_ended(tmp_path: Path) -> None:
    script = f"""
import os, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from cluster.serving.processes import adopt_orphans, descendants, end_descendants
adopt_orphans()
# A shell that starts a sleeper which ignores SIGTERM, tells its number, and goes away.
told = subprocess.check_output(["sh", "-c", "trap '' TERM; sleep 60 >/dev/null & echo $!"], text=True)
assert descendants(os.getpid()) == [int(told)], descendants(os.getpid())
end_descendants(patience_s=0.1)
assert descendants(os.getpid()) == []
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=20)


def test_a_ray_that_dies_while_it_is_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls to it return after a minute or never; and this process must not wait for Ray when it ends."""
    gcs, registered = socket.create_server(("127.0.0.1", 0)), list[Callable[..., object]]()
    context = SimpleNamespace(gcs_address=f"127.0.0.1:{gcs.getsockname()[1]}")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    returns = threading.Event()

    def call() -> None:
        gcs.close()
        returns.wait()

    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(local, "RAY_ENDS_S", 0.1)
    monkeypatch.setattr(local, "_stop_serve_and_ray", call)
    monkeypatch.setattr(local.atexit, "register", registered.append)
    local._stop()
    assert registered == [local._leave]
    returns.set()
    local._stop()  # it had died before
    assert registered == [local._leave, local._leave]


def test_descendants_do_not_count_the_process_itself() -> None:
    assert os.getpid() not in descendants(os.getpid())


def test_statistics_of_haproxy_are_for_this_machine_whatever_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "real").chmod(0o700)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "real"))
    config = tmp_path / "of a node.cfg"
    config.write_text("    bind :9101\n    bind *:8000\n    bind 10.0.0.1:8000\n  bind *:8404\n  bind *:84041\n")
    script = guarded(tmp_path, ("8404", "9101"))
    assert subprocess.check_output([script, "-db", "-f", config], text=True) == f"-db -f {config}\n"
    assert [line.split()[1] for line in config.read_text().splitlines()] == [
        "127.0.0.1:9101",
        "*:8000",
        "10.0.0.1:8000",
        "127.0.0.1:8404",
        "*:84041",
    ]


CONFIGURATION = """global
    stats socket {folder}/node/admin.sock level admin
defaults
    mode http
    timeout connect 5s
    timeout client 3600s
    timeout server 3600s
    errorfile 503 /nowhere/500.http
frontend http_frontend
    bind 127.0.0.1:{port}
    http-request return status 503 content-type text/plain string "Service Unavailable" if {{ path /-/healthz }}
    # for static use_backend selection below
    acl is_app path_beg /app/
{uses}
    default_backend default_backend
backend app
    http-reuse always
    server front 127.0.0.1:{front}
    server fallback 127.0.0.1:{front} check backup
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \'%[path]\' not found."
"""


@contextmanager
def haproxy(
    folder: Path,
    uses: str = "    use_backend app if is_app",
    within_s: float | None = None,
    front: int | None = None,
    queued_ms: int = QUEUED_MS,
    queued: int = QUEUED,
    starts: bool = False,
) -> Iterator[int]:
    """HAProxy itself, with a configuration like Ray's; how long it waits, and where many wait, can be told."""
    port = free_port(0)
    script = guarded(folder, ())
    if not starts:
        ready(folder)
    edits = folder / "haproxy.sed"
    edits.write_text(edits.read_text().replace(f"timeout queue {QUEUED_MS}", f"timeout queue {queued_ms}"))
    edits.write_text(edits.read_text().replace(f" gt {QUEUED} }}", f" gt {queued} }}"))
    if within_s:
        edits.write_text(edits.read_text().replace(f"http-request {REQUEST_S}s", f"http-request {within_s}s"))
    config = folder / "node" / "haproxy.cfg"  # as Ray has it: a folder for each node
    config.parent.mkdir(exist_ok=True)
    config.write_text(CONFIGURATION.format(port=port, front=front or free_port(0), uses=uses, folder=folder))
    subprocess.run([script, "-c", "-f", config], check=True, capture_output=True)  # as Ray does, before it starts it
    with subprocess.Popen([script, "-db", "-f", config], stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + 10
            while is_free("127.0.0.1", port) or not (folder / "node" / "admin.sock").exists():
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            yield port
        finally:
            process.kill()


def allow(orders: Path, front: int, requests: int) -> None:
    """As a front that HAProxy reaches at this port tells it."""
    assert servers_at(orders, None) == []
    ProxyLimit(orders, lambda: Burden(0, 0, 0), lambda: servers_at(orders, front))._tell(requests)


def asked(port: int, path: str = "/", source: str = "127.0.0.1", said: bytes | None = None) -> tuple[int, bytes, bytes]:
    """Status, headers and body."""
    with socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source, 0)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() if said is None else said)
        reply = b""
        while b"}" not in reply and (came := connection.recv(4096)):
            reply += came
    headers, _, body = reply.partition(b"\r\n\r\n")
    return int(headers.split()[1]), headers.lower(), body


@pytest.mark.skipif(sys.platform != "linux", reason="HAProxy comes for Linux")
def test_what_haproxy_itself_says_is_json_and_no_500(tmp_path: Path) -> None:
    with haproxy(tmp_path, within_s=1) as port:
        for status, said in (
            (503, b"GET /app/predict HTTP/1.1\r\nHost: x\r\n\r\n"),
            (503, b"GET /-/healthz HTTP/1.1\r\nHost: x\r\n\r\n"),
            (404, b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n"),
            (400, b"nonsense\r\n\r\n"),
            (400, b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n"),
            (408, b"GET / HTTP/1.1\r\nX-Slow: "),
        ):
            began_s = time.monotonic()
            found, headers, body = asked(port, said=said)
            assert found == status
            assert b"application/json" in headers
            assert list(json.loads(body)) == ["error"]
            assert (b"retry-after" in headers) == (status == 503)
            assert status != 408 or time.monotonic() - began_s < 3


@pytest.mark.skipif(sys.platform != "linux", reason="HAProxy comes for Linux")
def test_what_a_front_has_no_room_for_is_refused_here_and_connections_stay(tmp_path: Path) -> None:
    """The front takes requests and answers none of them; what it is told is when HAProxy saw them."""
    with socket.create_server(("127.0.0.1", 0)) as front, ExitStack() as stack:
        place = front.getsockname()[1]
        port = stack.enter_context(haproxy(tmp_path, front=place))
        allow(tmp_path / "node" / "admin.sock", place, 2)

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))

        request = b"GET /app/predict HTTP/1.1\r\nHost: x\r\nX-Request-Start: t=1\r\n\r\n"
        for _ in range(2):
            connected().sendall(request)
            came = stack.enter_context(front.accept()[0]).recv(4096).lower().split()
            assert came.count(b"x-request-start:") == 1
            waited_s = waited_s_by(came[came.index(b"x-request-start:") + 1])
            assert 0 < waited_s < 5, "whatever the client says, it came just now"
        beyond, told = connected(), set[bytes]()
        for _ in range(20):
            began_s = time.monotonic()
            beyond.sendall(request)
            reply = beyond.recv(4096).lower()
            assert time.monotonic() - began_s < 2
            assert reply.startswith(b"http/1.1 503")
            told.add(reply.partition(b"retry-after: ")[2].split()[0])
        assert told <= {b"%d" % second for second in range(1, RETRY_S + 1)}
        assert len(told) > 1, "not all come back at once"


@pytest.mark.skipif(sys.platform != "linux", reason="HAProxy comes for Linux")
def test_a_flood_from_one_address_leaves_the_others_their_share(tmp_path: Path) -> None:
    """The front has room for one at a time; whoever asks least is next, however many others came before."""
    with socket.create_server(("127.0.0.1", 0)) as front, ExitStack() as stack:
        place = front.getsockname()[1]
        port = stack.enter_context(haproxy(tmp_path, front=place, queued_ms=5000))
        allow(tmp_path / "node" / "admin.sock", place, 1)

        def ask(source: str) -> None:
            asking = socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source, 0))
            stack.enter_context(asking).sendall(f"POST /app/{source} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            time.sleep(0.01)

        for _ in range(30):
            ask("127.0.0.2")
        ask("127.0.0.3")
        served = []
        for _ in range(20):  # of 31; the first of the flood came when it was none yet
            connection = stack.enter_context(front.accept()[0])
            connection.settimeout(5)
            served.append(connection.recv(4096).split()[1])
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        assert b"/app/127.0.0.3" in served


@pytest.mark.skipif(sys.platform != "linux", reason="HAProxy comes for Linux")
def test_where_many_wait_who_asks_much_is_refused_at_once_and_who_asks_little_waits_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as front, ExitStack() as stack:
        place = front.getsockname()[1]
        port = stack.enter_context(haproxy(tmp_path, front=place, queued_ms=5000, queued=5))
        allow(tmp_path / "node" / "admin.sock", place, 1)

        def ask(source: str) -> socket.socket:
            asking = socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source, 0))
            stack.enter_context(asking).sendall(b"POST /app/predict HTTP/1.1\r\nHost: x\r\n\r\n")
            asking.settimeout(0.3)
            return asking

        def refusal(asking: socket.socket) -> bytes:
            try:
                return asking.recv(4096)
            except TimeoutError:
                return b""

        flood = [ask("127.0.0.2") for _ in range(20)]
        refused = [told for each in flood if (told := refusal(each))]
        assert 5 <= len(refused) < 20
        assert not refusal(ask("127.0.0.3"))
        for told in refused:
            assert told.startswith(b"HTTP/1.1 503")
            assert b"retry-after: " in told.lower()
            assert b"there are too many requests now: try again later" in told


@pytest.mark.skipif(sys.platform != "linux", reason="HAProxy comes for Linux")
@pytest.mark.parametrize("uses", ["", "    use_backend app if is_app"])
def test_while_it_stops_nobody_is_told_404(tmp_path: Path, uses: str) -> None:
    if uses:
        stopping(tmp_path)
    with haproxy(tmp_path, uses) as port:
        status, headers, body = asked(port, "/predict")
    assert ("backup" in (tmp_path / "node" / "haproxy.cfg").read_text()) == (not uses)
    assert (status, b"retry-after: " in headers) == (503, True)
    assert json.loads(body)["error"].startswith("this server stops" if uses else "no front is running")


class NotFound(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.skipif(sys.platform != "linux", reason="HAProxy comes for Linux")
def test_until_it_is_ready_nobody_waits_in_serves_own_proxy(tmp_path: Path) -> None:
    """That one keeps requests until there is a replica; who is told 503 at once can come again."""
    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as serve:
        threading.Thread(target=serve.serve_forever, daemon=True).start()
        with haproxy(tmp_path, front=serve.server_port, starts=True) as port:
            said(tmp_path / "node" / "admin.sock", "disable server app/front")
            status, headers, body = asked(port, "/app/predict")
            assert (status, b"retry-after: " in headers) == (503, True)
            assert b"this server starts" in body
            ready(tmp_path)
            assert asked(port, "/app/predict")[0] == 404, "Serve's proxy has answered"


@pytest.mark.skipif(sys.platform != "linux", reason="HAProxy comes for Linux")
def test_when_it_stops_serves_own_proxy_is_asked_no_more(tmp_path: Path) -> None:
    """Not even by the HAProxy that runs, which gets its next configuration some time after the fronts have gone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as serve:
        threading.Thread(target=serve.serve_forever, daemon=True).start()
        with haproxy(tmp_path, front=serve.server_port) as port:
            said(tmp_path / "node" / "admin.sock", "disable server app/front")
            assert asked(port, "/app/predict")[0] == 404
            stopping(tmp_path)
            assert asked(port, "/app/predict")[0] == 503


@pytest.mark.skipif(sys.platform != "linux", reason="HAProxy comes for Linux")
def test_connections_that_say_nothing_lock_nobody_out(tmp_path: Path) -> None:
    with haproxy(tmp_path, within_s=2) as port, ExitStack() as silent:
        for _ in range(MAX_OF_ONE_ADDRESS + 50):  # from one address; those beyond its share are ended at once
            connection = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
            silent.enter_context(connection)
        assert asked(port, "/other")[0] == 404
        connection.settimeout(5)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        time.sleep(3)
        assert asked(port, "/other", source="127.0.0.2")[0] == 404


def test_what_is_left_behind_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "isobatch-of-ours"
    folder.mkdir()
    monkeypatch.setattr(local, "_folders", {folder})
    local.leave_nothing(0.1)
    assert not folder.exists()
    assert not local._folders


def test_a_ray_that_does_not_start_is_tried_again_and_then_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    tried = []

    def slow(**_: object) -> None:
        tried.append(True)
        if len(tried) != 3:
            raise Exception("The current node timed out during startup.\nMore of it.")

    monkeypatch.setattr(ray, "init", slow)
    monkeypatch.setattr(local, "end_descendants", lambda: None)
    local._start_ray(dashboard=False)
    assert len(tried) == 3
    with pytest.raises(UserError) as error:
        local._start_ray(dashboard=False)
    assert len(tried) == 3 + local.RAY_ATTEMPTS
    logs = tmp_path / "ray" / "session_latest" / "logs"
    reason = "Exception: The current node timed out during startup."
    assert str(error.value) == f"Ray did not start on this machine ({reason}); its logs are in {logs}"


def test_a_node_that_is_slow_to_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    asked = []

    def get_node(address: str, node: str) -> dict[str, str]:
        asked.append(node)
        if len(asked) < 4:
            raise RuntimeError("no such node")
        return {"node": node}

    monkeypatch.setattr(services, "get_node", get_node)
    with patient_start(20.0, starts=lambda: True):
        assert services.get_node("head:1", "ours") == {"node": "ours"}
    assert services.get_node is get_node
    asked.clear()
    with patient_start(0.0, starts=lambda: True), pytest.raises(RuntimeError, match="no such node"):
        services.get_node("head:1", "ours")
    with patient_start(20.0, starts=lambda: False), pytest.raises(ConnectionError, match="ended while it started"):
        services.get_node("head:1", "ours")


class SlowProxies:
    """HTTP that is there at the third time of asking, each of which takes as long as Serve waits."""

    def __init__(self) -> None:
        self.asked = 0

    def wait_for_proxies_serving(self, wait_for_applications_running: bool) -> None:
        self.asked += 1
        if self.asked < 3:
            raise TimeoutError("Proxies not available after 60s.")


def test_http_is_waited_for_as_long_as_the_user_says_not_as_serve_does(tmp_path: Path) -> None:
    late: Future[None] = Future()
    late.set_exception(TimeoutError("HTTP proxies not available after 60s."))
    ray = LocalRay("head:1", tmp_path, late)
    now_s = time.monotonic()
    _wait_until_reachable(ray, SlowProxies(), now_s + 60, 60)
    with pytest.raises(UserError, match=r"^HTTP cannot be reached after 0 s: Proxies not available after 60s\.$"):
        _wait_until_reachable(ray, SlowProxies(), now_s, 0)


def test_a_stop_before_serve_runs_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where Ray has too little for a plan: only that is to be read."""
    import ray
    from ray import serve

    logger = logging.getLogger("ray.serve")
    monkeypatch.setattr(logger, "level", logger.level)  # that it is put back
    logger.setLevel(logging.INFO)  # as its import leaves it
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="x"))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr(serve, "shutdown", lambda: logger.info("Nothing to shut down."))
    monkeypatch.setattr(local, "_listens", lambda address: True)
    local._stop()
    assert caplog.text == ""
