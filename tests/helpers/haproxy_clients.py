"""Clients of a HAProxy that runs before fronts of a test, and these fronts."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from select import select

from isobatch.deployments.front.proxy import Burden, ProxyLimit, servers_at
from tests.helpers.haproxy import haproxy

NODE = "192.0.2.1"  # the address of HAProxy's node for others
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
WHOLE = b"POST /app/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def allow(folder: Path, front: int, requests: int, slo_ms: float | None = None) -> None:
    """Limit the requests to the front at this port, as the front itself does."""
    orders = folder / "node" / "admin.sock"
    assert servers_at(orders, None, NODE) == []
    ProxyLimit(orders, lambda: Burden(0, 0, 0), lambda: servers_at(orders, front, NODE), slo_ms)._send(requests)


def asked(port: int, path: str = "/", source: str = "127.0.0.1", said: bytes | None = None) -> tuple[int, bytes, bytes]:
    """Status, headers and body."""
    with socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() if said is None else said)
        reply = b""
        while b"}" not in reply and (came := connection.recv(4096)):
            reply += came
    headers, _, body = reply.partition(b"\r\n\r\n")
    return int(headers.split()[1]), headers.lower(), body


class Crowd:
    """Clients of a HAProxy before one front, which answers only what the test answers."""

    def __init__(self, front: socket.socket, port: int, stack: ExitStack) -> None:
        self.front, self._port, self._stack = front, port, stack

    def ask(self, said: str = "POST /app/predict", source: str = "127.0.0.1", header: str = "") -> socket.socket:
        asking = socket.create_connection(("127.0.0.1", self._port), timeout=60, source_address=(source, 0))
        self._stack.enter_context(asking).sendall(f"{said} HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
        time.sleep(0.01)
        return asking

    def arrived(self) -> tuple[socket.socket, bytes]:
        """The next connection of HAProxy to the front, and its first bytes; none if no connection comes in time."""
        with suppress(TimeoutError):
            connection = self._stack.enter_context(self.front.accept()[0])
            connection.settimeout(60)
            return connection, connection.recv(4096)
        return self.front, b""


@contextmanager
def crowd(folder: Path, places: int, **told: int) -> Iterator[Crowd]:
    """HAProxy before a front that takes this number of requests at once."""
    with socket.create_server(("127.0.0.1", 0)) as front, ExitStack() as stack:
        front.settimeout(60)
        place = front.getsockname()[1]
        port = stack.enter_context(haproxy(folder, front=place, **told))
        allow(folder, place, places)
        yield Crowd(front, port, stack)


@contextmanager
def answering(status: Callable[[int], int]) -> Iterator[int]:
    """The port of a front that answers each request at once with the status for the length of its body."""

    class Front(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status(int(self.headers["Content-Length"] or 0)))
            self.send_header("Content-Length", "2")
            self.end_headers()
            with suppress(OSError):  # where HAProxy answers in its place, it closes the connection
                self.wfile.write(b"{}")

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Front) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def ended(connections: list[socket.socket]) -> int:
    """The number of these connections that HAProxy has answered or ended."""
    return len(select(connections, [], [], 0)[0])
