"""HAProxy as our script starts it: what it refuses by itself, and in which words."""

import csv
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from select import select

import pytest

from isobatch.cluster.serving.haproxy import HEALTH_WITHIN_S, REQUEST_S, RETRY_S, ready, stopping, write_script
from isobatch.cluster.serving.haproxy_edits import HELD
from isobatch.deployments.deployer.steps import FRONT, NETWORK
from isobatch.deployments.front.headers import sent_s_by, waited_s_by
from isobatch.deployments.front.proxy import (
    FEW,
    FEW_LONG,
    LONG,
    QUESTIONS,
    QUESTIONS_AT_ONCE,
    QUEUED,
    SLO_MAP,
    SLOW,
    Refusals,
    haproxy_reply,
    servers_at,
)
from isobatch.deployments.processes import is_running
from tests.helpers.asking import becomes, eventually
from tests.helpers.haproxy import haproxy
from tests.helpers.haproxy_clients import (
    ANSWER,
    NODE,
    WHOLE,
    Crowd,
    allow,
    answering,
    asked,
    crowd,
    ended,
)


def test_statistics_of_haproxy_are_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "real").chmod(0o700)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "real"))
    config = tmp_path / "of a node.cfg"
    config.write_text("    bind :9101\n    bind *:8000\n    bind 10.0.0.1:8000\n  bind *:8404\n  bind *:84041\n")
    script = write_script(tmp_path, ("8404", "9101"))
    assert subprocess.check_output([script, "-db", "-f", config], text=True) == f"-db -f {config}\n"
    binds = ["127.0.0.1:9101", "*:8000", "10.0.0.1:8000", "127.0.0.1:8404", "*:84041"]
    assert [line.split()[1] for line in config.read_text().splitlines()] == binds


STARTS_HAPROXY = """
import subprocess, sys, time
print(subprocess.Popen([sys.argv[1], "-db"]).pid, flush=True)
time.sleep(600)
"""


def test_haproxy_ends_with_what_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Serve's proxy is killed, as by ray stop --force, the next HAProxy would share the port with this one."""
    (tmp_path / "real").write_text(f"#!/bin/sh\ntouch {tmp_path}/runs\nexec sleep 600\n")
    (tmp_path / "real").chmod(0o700)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "real"))
    command = [sys.executable, "-c", STARTS_HAPROXY, write_script(tmp_path, ())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        number = int(proxy.stdout.readline())
        assert eventually((tmp_path / "runs").exists)
        assert is_running(number)
        proxy.kill()
    assert eventually(lambda: not is_running(number))


def test_what_haproxy_itself_says_is_json_and_no_500(tmp_path: Path) -> None:
    cases = {
        b"GET /app/predict HTTP/1.1\r\nHost: x\r\n\r\n": 503,
        b"GET /-/healthz HTTP/1.1\r\nHost: x\r\n\r\n": 503,
        b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n": 404,
        b"FOO /app/predict HTTP/1.1\r\nHost: x\r\n\r\n": 405,
        b"POST /app/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{": 408,
        b"POST /app/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n{": 503,  # at once
        b"POST /app/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000000\r\n\r\n{": 503,
        b"POST /app/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n{": 503,
    }

    def check(said: bytes) -> None:
        began_s = time.monotonic()
        status, headers, body = asked(port, said=said)
        assert status == cases[said], said
        assert b"application/json" in headers
        assert list(json.loads(body)) == ["error"]
        assert (b"retry-after" in headers) == (status == 503)
        assert status != 408 or time.monotonic() - began_s < REQUEST_S

    with haproxy(tmp_path, within_s=1) as port, ThreadPoolExecutor(len(cases)) as pool:
        assert len([*pool.map(check, cases)]) == len(cases)


@pytest.mark.parametrize(
    ("prefix", "sentence"), [("/app", "there are too many requests now"), ("", "this server stops")]
)
def test_clients_of_openai_read_why_haproxy_refuses(tmp_path: Path, prefix: str, sentence: str) -> None:
    """Their newest library shows nothing but `error.message`."""
    stopping(tmp_path)
    with haproxy(tmp_path) as port:
        for path in ("/v1/completions", "/v1/chat/completions?x=1"):
            status, headers, body = asked(port, f"{prefix}{path}")
            about = json.loads(body)["error"]
            assert (status, about["type"], b"retry-after: " in headers) == (503, "server_error", True)
            assert about["message"].startswith(sentence)


@pytest.mark.parametrize(
    ("line", "expected"), [("POST /other/v1/completions", 404), ("FOO /app/v1/chat/completions", 405)]
)
def test_clients_of_openai_read_what_is_wrong(tmp_path: Path, line: str, expected: int) -> None:
    with haproxy(tmp_path) as port:
        status, _, body = asked(port, said=b"%s HTTP/1.1\r\nHost: x\r\n\r\n" % line.encode())
        about = json.loads(body)["error"]
        assert (status, about["type"], about["code"]) == (expected, "invalid_request_error", None)
        assert about["message"].startswith(("there is no such path", "this method"))


def test_a_connection_has_one_request_at_once_and_not_a_hundred_of_http_2(tmp_path: Path) -> None:
    with haproxy(tmp_path) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
        assert client.recv(4096).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(  # answered by the front, and by HAProxy itself
    ("line", "expected"), [("GET /app/predict", 200), ("GET /other", 404), ("FOO /app/predict", 405)]
)
def test_the_id_of_a_request_is_sent_back(tmp_path: Path, line: str, expected: int) -> None:
    with answering(lambda _: 200) as front, haproxy(tmp_path, front=front) as port:
        for header, times in (
            (b"X-Request-Id: Order 7, of 9", 1),
            (b"X-Other: Order 7, of 9", 0),
            (b"X-Request-Id: " + b"x" * 201, 0),
            (b"X-Request-Id: order 7, of 9\xe9", 0),
        ):
            status, headers, _ = asked(port, said=b"%s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % (line.encode(), header))
            assert status == expected
            assert headers.count(b"x-request-id: order 7, of 9") == times
            assert b"x" * 201 not in headers


def test_requests_are_in_no_log(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as log:
        log.bind(("127.0.0.1", 0))
        with answering(lambda _: 200) as front, haproxy(tmp_path, front=front, log=log.getsockname()[1]) as port:
            for path in ("/app/predict", "/other"):
                asked(port, path)
            lines = []
            while select([log], [], [], 0.2)[0]:
                lines.append(log.recv(2000))
        assert not [line for line in lines if b"HTTP/1.1" in line]


class Refused:
    """The requests for the front at this port that HAProxy has refused."""

    def __init__(self, folder: Path, front: int) -> None:
        self._orders, self._front, self._refusals = folder / "node" / "admin.sock", front, Refusals()
        self.since()

    def since(self) -> int:
        """Their number since the start."""
        statistics = haproxy_reply(self._orders, Refusals.command)
        self._refusals.read(statistics, servers_at(self._orders, self._front, NODE))
        return self._refusals.total


def test_what_a_front_has_no_room_for_is_refused_here_and_connections_stay(tmp_path: Path) -> None:
    """The front takes requests and answers none of them; what it is told is when HAProxy saw them."""
    with crowd(tmp_path, 2) as clients:
        for _ in range(2):
            clients.ask(header="X-Request-Start: t=1\r\nX-Request-Disconnect-Disabled: ?1\r\nX-Request-Id: \u00e9\r\n")
            came = clients.arrived()[1].lower().split()
            assert came.count(b"x-request-start:") == 1
            assert not {b"x-request-disconnect-disabled:", b"x-request-id:"} & set(came)
            waited_s = waited_s_by(came[came.index(b"x-request-start:") + 1])
            assert 0 < waited_s < 60, "whatever the client says, it came just now"
        refused = Refused(tmp_path, clients.front.getsockname()[1])
        beyond, seen, took_s = clients.ask(), set[bytes](), list[float]()
        for number in range(20):
            if number:
                beyond.sendall(b"POST /app/predict HTTP/1.1\r\nHost: x\r\n\r\n")
            began_s = time.monotonic()
            reply = beyond.recv(4096).lower()
            took_s.append(time.monotonic() - began_s)
            assert reply.startswith(b"http/1.1 503")
            seen.add(reply.partition(b"retry-after: ")[2].split()[0])
        becomes(refused.since, len(took_s))  # HAProxy counts a refusal after it has sent it
        assert min(took_s) < 1
        assert seen <= {b"%d" % second for second in range(1, RETRY_S + 1)}
        assert len(seen) > 1, "not all come back at once"


def test_a_front_knows_in_how_much_time_a_body_came(tmp_path: Path) -> None:
    with crowd(tmp_path, 1) as clients:
        asking = clients.ask(header="Content-Length: 2\r\nX-Request-Sent: 9000000\r\n")  # and some milliseconds later
        asking.sendall(b"{}")
        came = clients.arrived()[1].lower().partition(b"x-request-sent: ")[2].partition(b"\r\n")[0]
    assert 0.005 < sent_s_by(came) < 8


def test_who_only_asks_about_a_server_under_flood_gets_through_and_takes_few_places(tmp_path: Path) -> None:
    """All have one address, as behind a balancer. Health checks come before whatever else is asked."""
    with crowd(tmp_path, 1, questions_ms=60_000) as clients:

        def come(patience_s: float = 60.0) -> bytes:
            clients.front.settimeout(patience_s)
            return b" ".join(clients.arrived()[1].split()[:2])

        flood = [clients.ask() for _ in range(3)]
        assert [come(), come(0.3)] == [b"POST /app/predict", b""]
        assert flood[-1].recv(4096).startswith(b"HTTP/1.1 503")
        clients.ask("GET /app/stats", header="Content-Length: 9\r\n")  # what does not come takes no place
        watching = [clients.ask("GET /app/stats") for _ in range(QUESTIONS_AT_ONCE + 4)]
        clients.ask("HEAD /app/healthz")
        first, line = clients.arrived()
        assert line.startswith(b"GET /app/stats ")
        assert [come() for _ in range(QUESTIONS_AT_ONCE - 1)] == [b"GET /app/stats"] * (QUESTIONS_AT_ONCE - 1)
        assert come(0.3) == b""
        first.sendall(ANSWER)
        assert watching[0].recv(4096).startswith(b"HTTP/1.1 200")
        assert come() == b"HEAD /app/healthz"


def test_a_flood_from_one_address_leaves_the_others_their_share(tmp_path: Path) -> None:
    """The front has room for one at a time; whoever asks least is next, however many others came before."""
    with crowd(tmp_path, 1, queued_ms=60_000) as clients:
        for source in (*["127.0.0.2"] * 30, "127.0.0.3"):
            clients.ask(f"POST /app/{source}", source)
        served = []
        for _ in range(20):  # of 31; the first of the flood came when it was none yet
            connection, line = clients.arrived()
            served.append(line.split()[1])
            connection.sendall(ANSWER)
        assert b"/app/127.0.0.3" in served


def test_where_many_wait_who_asks_much_is_refused_at_once_and_who_asks_little_waits_too(tmp_path: Path) -> None:
    with crowd(tmp_path, 1, queued_ms=60_000, queued=5) as clients:

        def refusals(waiting: list[socket.socket]) -> list[bytes]:
            """What is said to them until nothing comes for a moment; who is refused waits no more."""
            replies = []
            while ready := select(waiting, [], [], 0.3)[0]:
                replies += [each.recv(4096) for each in ready]
                waiting = [each for each in waiting if each not in ready]
            return replies

        refused = refusals([clients.ask(source="127.0.0.2") for _ in range(20)])
        assert 5 <= len(refused) < 20
        assert not refusals([clients.ask(source="127.0.0.3")])
        for reply in refused:
            assert reply.startswith(b"HTTP/1.1 503")
            assert b"retry-after: " in reply.lower()
            assert b"there are too many requests now: try again later" in reply


@pytest.mark.parametrize("uses", ["", "    use_backend app if is_app"])
def test_while_it_stops_nobody_is_told_404(tmp_path: Path, uses: str) -> None:
    if uses:
        stopping(tmp_path)
    with haproxy(tmp_path, uses) as port:
        status, headers, body = asked(port, "/predict")
    assert ("backup" in (tmp_path / "node" / "haproxy.cfg").read_text()) == (not uses)
    assert (status, b"retry-after: " in headers) == (503, True)
    assert json.loads(body)["error"].startswith("this server stops" if uses else "no front is running")


def end(folder: Path) -> None:
    """HAProxy takes the front for one that has gone."""
    backends = ("app", *(f"app:{each}" for each in (FEW, FEW_LONG, LONG, QUESTIONS)))
    haproxy_reply(folder / "node" / "admin.sock", ";".join(f"disable server {each}/front" for each in backends))


def test_until_it_is_ready_nobody_waits_in_serves_own_proxy(tmp_path: Path) -> None:
    """That one keeps requests until there is a replica; who is told 503 at once can come again."""
    with answering(lambda _: 404) as serve, haproxy(tmp_path, front=serve, starts=True) as port:
        end(tmp_path)
        status, headers, body = asked(port, "/app/predict")
        assert (status, b"retry-after: " in headers) == (503, True)
        assert b"this server starts or stops" in body
        ready(tmp_path)
        assert asked(port, "/app/predict")[0] == 404, "Serve's proxy has answered"


def test_while_no_front_runs_few_requests_wait_in_serves_own_proxy(tmp_path: Path) -> None:
    """It takes milliseconds of a core for each, which the next front needs to start. Of clients that ask much, it holds
    fewer.
    """
    with socket.create_server(("127.0.0.1", 0)) as serve, ExitStack() as stack:
        serve.settimeout(5)
        clients = Crowd(serve, stack.enter_context(haproxy(tmp_path, front=serve.getsockname()[1])), stack)
        end(tmp_path)
        few = [clients.ask(source=f"127.0.0.{2 + number % 9}") for number in range(QUEUED + 8)]
        held = [clients.arrived()[0] for _ in range(QUEUED)]
        assert eventually(lambda: ended(few) == 8)
        much = [clients.ask() for _ in range(QUEUED + HELD + 8)]
        held += [clients.arrived()[0] for _ in range(HELD)]
        assert eventually(lambda: ended(much) == QUEUED + 8)
        for connection in held:
            connection.sendall(ANSWER)
        assert eventually(lambda: ended([*few, *much]) == len([*few, *much]))


def test_when_it_stops_serves_own_proxy_is_asked_no_more(tmp_path: Path) -> None:
    """Not even by the HAProxy that runs, which gets its next configuration some time after the fronts have gone."""
    with answering(lambda _: 404) as serve, haproxy(tmp_path, front=serve) as port:
        end(tmp_path)
        assert asked(port, "/app/predict")[0] == 404
        stopping(tmp_path)
        assert asked(port, "/app/predict")[0] == 503


def test_idle_connections_leave_places_for_others_and_go_after_a_while(tmp_path: Path) -> None:
    """The first address gets a fifth of all connections, each further one a fifth of those that are left."""
    with haproxy(tmp_path, within_s=2, connections=200) as port, ExitStack() as idle:
        for source, most in (("127.0.0.2", 40), ("127.0.0.3", 32)):
            opened = [socket.create_connection(("127.0.0.1", port), source_address=(source, 0)) for _ in range(60)]
            for each in opened:
                idle.enter_context(each)
            assert eventually(lambda opened=opened, most=most: ended(opened) >= 58 - most)
            time.sleep(0.1)
            assert ended(opened) == pytest.approx(60 - most, abs=2)
        assert asked(port, "/other")[0] == 404

        def is_let_in() -> bool:
            with suppress(OSError, IndexError):  # not yet: its connection is ended
                return asked(port, "/other", source="127.0.0.2")[0] == 404
            return False

        assert eventually(is_let_in, REQUEST_S - 2.0)


UNFINISHED = b"POST /app/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"x" * 17_000


def test_a_408_ends_the_connection_and_a_client_with_many_is_refused_before_the_front(tmp_path: Path) -> None:
    """Only requests that have not arrived completely are refused, and only those of this client."""

    def told(said: bytes, source: str) -> tuple[int, bool]:
        """The status, and whether the connection is closed then."""
        connection = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))
        with connection, connection.makefile("rb") as reply:
            connection.sendall(said)
            status = int(reply.readline().split()[1])
            lines = [line.lower() for line in iter(reply.readline, b"\r\n")]
            (length,) = [int(line.split()[1]) for line in lines if line.startswith(b"content-length")]
            reply.read(length)
            return status, status == 408 and not reply.read(1)

    # The front gives up each body at once that is longer than it should be.
    with answering(lambda size: 408 if size > 2 else 200) as front, haproxy(tmp_path, front=front) as port:
        assert {told(UNFINISHED, "127.0.0.2") for _ in range(SLOW)} == {(408, True)}
        assert told(UNFINISHED, "127.0.0.2") == (408, True)
        assert told(UNFINISHED, "127.0.0.2")[0] == 503
        assert told(UNFINISHED, "127.0.0.3") == (408, True)
        assert told(WHOLE, "127.0.0.2")[0] == 200


def test_a_front_that_hangs_is_passed_over_within_two_seconds(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as hung,
        answering(lambda _: 200) as healthy,
        haproxy(tmp_path, fronts=[hung.getsockname()[1], healthy]) as port,
    ):
        began_s = time.monotonic()
        assert eventually(lambda: is_answered(port))
        assert time.monotonic() - began_s < 5, "two seconds, and the rest for a machine that is busy"
        assert [asked(port, said=WHOLE)[0] for _ in range(5)] == [200] * 5, "nothing reaches the front that hangs"


@pytest.mark.parametrize(("deployment", "shared"), [(FRONT, False), (NETWORK, True)])
def test_requests_fill_the_fronts_of_a_plan_and_are_shared_among_whole_networks(
    tmp_path: Path, deployment: str, shared: bool
) -> None:
    answered = [0, 0]

    def answer(front: int, length: int) -> int:
        answered[front] += length > 0  # a health check has no body
        return 200

    with (
        answering(partial(answer, 0)) as one,
        answering(partial(answer, 1)) as other,
        haproxy(tmp_path, fronts=[one, other], deployment=deployment) as port,
    ):
        assert eventually(lambda: is_answered(port))
        answered[:] = 0, 0
        assert [asked(port, said=WHOLE)[0] for _ in range(8)] == [200] * 8
    assert sorted(answered) == ([4, 4] if shared else [0, 8])


def is_answered(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection, suppress(TimeoutError):
        connection.sendall(WHOLE)
        return bool(connection.recv(1))
    return False


@pytest.mark.parametrize("header", [b"", b"X-Deadline-Ms: 300\r\n", b"X-Deadline-Ms: 300\r\nX-Deadline-Ms: 60000\r\n"])
def test_at_a_front_that_hangs_a_client_gets_503_at_its_deadline(tmp_path: Path, header: bytes) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as hung,
        haproxy(tmp_path, front=(place := hung.getsockname()[1])) as port,
    ):
        allow(tmp_path, place, 100, slo_ms=None if header else 300.0)
        refused = Refused(tmp_path, place)
        for _ in range(2):
            began_s = time.monotonic()
            status, headers, body = asked(port, said=WHOLE.replace(b"Host: x\r\n", b"Host: x\r\n" + header))
            assert (status, b"retry-after: " in headers) == (503, True), body
            assert 0.3 < time.monotonic() - began_s < 30, "the front would never answer"
        assert refused.since() == 0, "the front counts them as abandoned, once it runs again"


def test_while_no_front_answers_a_health_check_gets_503(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung, haproxy(tmp_path, front=hung.getsockname()[1]) as port:
        began_s = time.monotonic()
        assert asked(port, "/app/readyz")[0] == 503
        assert HEALTH_WITHIN_S <= time.monotonic() - began_s < 30


def test_a_haproxy_that_starts_while_no_front_runs_knows_the_slo(tmp_path: Path) -> None:
    """Serve's own proxy takes the requests then, and holds them until a front runs."""
    with socket.create_server(("127.0.0.1", 0)) as holding:
        place = holding.getsockname()[1]
        with haproxy(tmp_path, front=place):
            allow(tmp_path, place, 100, slo_ms=300.0)
        (tmp_path / "node" / "admin.sock").unlink()
        with haproxy(tmp_path, front=place) as port:
            began_s = time.monotonic()
            assert asked(port, said=WHOLE)[0] == 503
            assert 0.3 < time.monotonic() - began_s < 30, "it would be held for ever"


def test_a_front_that_cannot_keep_the_slo_still_sends_its_limit(tmp_path: Path) -> None:
    """As on a full disk; here the file is missing."""
    with socket.create_server(("127.0.0.1", 0)) as front, haproxy(tmp_path, front=(place := front.getsockname()[1])):
        (tmp_path / SLO_MAP).unlink()
        allow(tmp_path, place, 7, slo_ms=300.0)
        statistics = haproxy_reply(tmp_path / "node" / "admin.sock", "show stat -1 4 -1")
        rows = csv.DictReader(statistics.removeprefix("# ").splitlines())
        assert {row["slim"] for row in rows if (row["pxname"], row["svname"]) == ("app", "front")} == {"7"}


@pytest.mark.parametrize("uses", ["", "    use_backend app if is_app"])
def test_the_slo_of_a_deleted_application_is_removed_unless_no_application_is_known(tmp_path: Path, uses: str) -> None:
    """Without any backend, Serve itself has just started."""
    kept, deleted = ["app 300", "app:few 300"], ["gone 20", "gone:few 20", "app2 30"]
    (tmp_path / SLO_MAP).write_text("".join(f"{line}\n" for line in (*kept, *deleted)))
    with haproxy(tmp_path, uses):
        pass
    assert (tmp_path / SLO_MAP).read_text().splitlines() == (kept if uses else [*kept, *deleted])


@pytest.mark.parametrize("line", [b"\n", b"\xff 20\n"])
def test_haproxy_starts_with_a_damaged_map(tmp_path: Path, line: bytes) -> None:
    (tmp_path / SLO_MAP).write_bytes(b"app 300\n" + line)
    with haproxy(tmp_path) as port:
        assert asked(port, "/other")[0] == 404
