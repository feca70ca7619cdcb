"""HAProxy before fronts of several nodes, and behind trusted proxies, which name the client."""

import csv
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from experiments.shared.machine import free_port
from isobatch.cluster.serving.haproxy_edits import HELD
from isobatch.deployments.front.headers import trusted_proxies, waited_s_by
from isobatch.deployments.front.proxy import (
    Refusals,
    haproxy_reply,
    servers_at,
)
from isobatch.profiles.errors import UserError
from tests.helpers.asking import eventually
from tests.helpers.haproxy import haproxy
from tests.helpers.haproxy_clients import (
    NODE,
    WHOLE,
    Crowd,
    allow,
    answering,
    asked,
    crowd,
    ended,
)


def test_a_front_takes_no_time_from_the_clock_of_another_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "kernel"
    kernel.write_text("of another node\n")
    monkeypatch.setattr("isobatch.cluster.serving.haproxy.KERNEL_FILE", kernel)
    with crowd(tmp_path, 1) as clients:
        clients.ask()
        came = clients.arrived()[1].lower().partition(b"x-request-start: ")[2].partition(b"\r\n")[0]
    assert came.endswith(b";of another node")
    assert waited_s_by(came) == 0


def test_a_front_knows_its_servers_from_those_of_other_nodes_with_the_same_port(tmp_path: Path) -> None:
    """By whatever address HAProxy reaches its own node. It counts all that is refused there.

    Nothing listens at the other addresses.
    """
    orders, far = tmp_path / "node" / "admin.sock", ("127.0.0.9", "::1", NODE)

    def own(port: int) -> list[str]:
        return [each for each in servers_at(orders, port, NODE) if not each.endswith("/fallback")]

    with answering(lambda _: 200) as front, haproxy(tmp_path, front=front, far=far):
        names = [each.removeprefix("app/") for each in own(front) if each.startswith("app/")]
        assert names == ["far-1", "front", "far-2", "far-0"]
    orders.unlink()
    with answering(lambda _: 200) as front, haproxy(tmp_path, front=front, far=far[:1]) as port:
        refusals = Refusals()
        haproxy_reply(orders, ";".join(f"disable server app:few/{each}" for each in ("front", "far-0", "fallback")))
        for _ in range(2):
            refusals.read(haproxy_reply(orders, Refusals.command), own(front))
            refused = [asked(port, said=WHOLE)[0] for _ in range(4)]
        assert (refused, refusals.total) == ([503] * 4, 4)


def test_the_first_front_of_a_node_also_limits_those_of_other_nodes(tmp_path: Path) -> None:
    """They get what exceeds its limit, and cannot reach this HAProxy."""
    orders, one, two = tmp_path / "node" / "admin.sock", free_port(), free_port()
    with haproxy(tmp_path, fronts=[one, two], front=two, far=["127.0.0.9"]):
        for places, front in ((9, two), (7, one)):
            allow(tmp_path, front, places)
        rows = csv.DictReader(haproxy_reply(orders, "show stat -1 4 -1").removeprefix("# ").splitlines())
        limits = {row["svname"]: row["slim"] for row in rows if row["pxname"] == "app"}
    assert limits == {f"app-front-{one}": "7", f"app-front-{two}": "9", "far-0": "7", "fallback": str(HELD)}


def test_fronts_of_other_nodes_get_only_what_exceeds_the_limit(tmp_path: Path) -> None:
    with ExitStack() as stack:
        near = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        place = near.getsockname()[1]
        far = stack.enter_context(socket.create_server(("127.0.0.9", place)))
        clients = Crowd(near, stack.enter_context(haproxy(tmp_path, front=place, far=["127.0.0.9"])), stack)
        allow(tmp_path, place, 2)
        for front, number in ((near, 2), (far, 2), (far, 0)):
            clients.ask()
            clients.ask()
            front.settimeout(0.3)
            clients.front = front
            assert sum(bool(clients.arrived()[1]) for _ in range(2)) == number


def test_a_trusted_proxy_names_the_client_and_may_have_all_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOBATCH_TRUSTED_PROXIES", "127.0.0.4/30, fd00::/8")
    with crowd(tmp_path, 1, queued_ms=60_000, queued=5, connections=500) as clients:

        def refused(source: str, forwarded: str = "", least: int = 5) -> int:
            """How many of 20 requests are refused, once at least `least` are."""
            headers = [f"X-Forwarded-For: {forwarded.format(each)}\r\n" if forwarded else "" for each in range(20)]
            asking = [clients.ask(source=source, header=header) for header in headers]
            time.sleep(0 if least else 0.2)
            eventually(lambda: ended(asking) >= least)
            return ended(asking)

        assert refused("127.0.0.5", "10.0.0.{}\r\nX-Forwarded-For: 10.0.0.9, 10.0.0.1"), "the last one asks much"
        assert refused("127.0.0.5", "10.0.0.1, 10.0.1.{}", least=0) == 0, "20 clients ask little"
        assert refused("127.0.0.5", "fd00:0:0:{}::1", least=0) == 0
        assert refused("127.0.0.5"), "it names nobody else"
        assert refused("127.0.0.3", "10.0.2.{}"), "it is no proxy, whatever it sends"


def test_idle_connections_of_a_trusted_proxy_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_TRUSTED_PROXIES", "127.0.0.2/32")
    with haproxy(tmp_path, connections=200) as port, ExitStack() as idle:
        for source in ("127.0.0.3", "127.0.0.2"):
            opened = [socket.create_connection(("127.0.0.1", port), source_address=(source, 0)) for _ in range(60)]
            for each in opened:
                idle.enter_context(each)
            assert source == "127.0.0.2" or eventually(lambda opened=opened: ended(opened))
        time.sleep(0.3)
        assert not ended(opened)


@pytest.mark.parametrize("networks", ["10.0.0.0/33", "10.0.0.1/8", "10.0.0.0/8,", "10.0.0.0/8 fd00::/8", "balancer"])
def test_a_network_of_proxies_that_is_none_is_one_sentence(monkeypatch: pytest.MonkeyPatch, networks: str) -> None:
    monkeypatch.setenv("ISOBATCH_TRUSTED_PROXIES", networks)
    with pytest.raises(UserError, match=rf"ISOBATCH_TRUSTED_PROXIES is '{networks}': it must be networks"):
        trusted_proxies()


def test_it_is_said_that_an_address_is_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_TRUSTED_PROXIES", "10.0.3.7/24")
    with pytest.raises(UserError, match="has host bits set"):
        trusted_proxies()
