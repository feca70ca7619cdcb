"""How a process listens to others of its application and connects to them: where, under what protection, for how long.

A peer that vanishes without a word (a node that lost its power, a network that is cut) is noticed by the operating
system: it asks idle connections whether anybody is there, and ends those whose bytes nobody confirms.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from profiles.errors import UserError

SILENT_S = 4  # a peer from which nothing comes for so long, not even confirmations, has gone
ANY_PORT = (0,)
HANDSHAKE_S = 5.0

Connection = TypeVar("Connection", bound=asyncio.BaseProtocol)


class Certificates(NamedTuple):
    """Files in PEM: this process's certificate, its key, and the authority that has signed everybody's."""

    certificate: str
    key: str
    authority: str


@dataclass(frozen=True)
class Wire:
    """The address of this process, the ports on which it may listen, and TLS for either direction (None: none)."""

    host: str
    ports: Sequence[int] = ANY_PORT
    inward: ssl.SSLContext | None = None
    outward: ssl.SSLContext | None = None

    async def listen(self, protocol: Callable[[], asyncio.BaseProtocol]) -> tuple[asyncio.Server, str]:
        """Listen on the first free port; returns the address."""
        loop = asyncio.get_running_loop()
        for port in self.ports:
            try:
                server = await loop.create_server(
                    protocol, self.host, port, ssl=self.inward, ssl_handshake_timeout=self._patience_s
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return server, f"{self.host}:{server.sockets[0].getsockname()[1]}"
        taken = f"ports {self.ports[0]} to {self.ports[-1]} of {self.host} are all taken"
        raise UserError(f"{taken}: a node needs two for each replica and one for each front; give ports: more")

    async def connect(self, protocol: Callable[[], Connection], address: str) -> Connection:
        host, _, port = address.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(
            protocol, host, int(port), ssl=self.outward, ssl_handshake_timeout=self._patience_s
        )
        return connection

    @property
    def _patience_s(self) -> float | None:
        return HANDSHAKE_S if self.inward else None


def contexts(files: Certificates) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS for those who come and for those who are asked: both ends must have a certificate of the same authority.

    Names are not compared: nodes come and go, and whoever has a certificate may be any of them.
    """
    return _context(ssl.Purpose.CLIENT_AUTH, files), _context(ssl.Purpose.SERVER_AUTH, files)


def _context(purpose: ssl.Purpose, files: Certificates) -> ssl.SSLContext:
    try:
        for each in files:
            Path(each).open().close()  # without a name, anybody's authority would do
        context = ssl.create_default_context(purpose, cafile=files.authority)
        context.load_cert_chain(files.certificate, files.key)
    except OSError as error:  # ssl's own errors too
        told = "RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT must name its files, on every node"
        raise UserError(f"RAY_USE_TLS is set, but TLS cannot begin ({error}): {told}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def notice_silence(transport: asyncio.BaseTransport) -> None:
    """Let the operating system end this connection when its peer has been silent for `SILENT_S`."""
    ours: Any = transport.get_extra_info("socket")
    if ours is None or not hasattr(socket, "TCP_USER_TIMEOUT"):  # another system than Linux
        return
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S)
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)
