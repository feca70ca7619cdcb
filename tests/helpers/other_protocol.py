"""A port at which something else than HTTP/1.1 is spoken."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

SETTINGS = (
    b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x7f\xff\xff\xff\x00\x04\x00\x40\x00\x00\x00\x06\x00\x00\x20\x00"
)


@contextmanager
def grpc_port() -> Iterator[str]:
    """The URL of a server that begins as each of gRPC does, whatever it is asked."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.recv(65_536)
                client.sendall(SETTINGS)

    Thread(target=answer, daemon=True).start()
    with server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
