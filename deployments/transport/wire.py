"""How a process listens for others of its application and connects to them: addresses, TLS, time limits.

The operating system notices a peer that vanishes (its node lost power, or a network cable was cut): it probes idle
connections, and ends a connection whose bytes are not acknowledged.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from isobatch.profiles.errors import UserError

SILENCE_LIMIT_S = 4  # a peer that sends nothing for this time, not even acknowledgements, counts as lost
ANY_PORT = (0,)  # the operating system chooses a free port
HANDSHAKE_LIMIT_S = 5.0  # for TLS

Connection = TypeVar("Connection", bound=asyncio.BaseProtocol)


class Certificates(NamedTuple):
    """PEM files: this process's certificate, its key, and the authority that has signed the certificates of all."""

    certificate: str
    key: str
    authority: str


@dataclass(frozen=True)
class Wire:
    """The host of this process, the ports on which it may listen, and TLS for either direction (None: plain TCP)."""

    host: str
    ports: Sequence[int] = ANY_PORT
    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None

    async def listen(self, protocol: Callable[[], asyncio.BaseProtocol]) -> tuple[asyncio.Server, str]:
        """Listen on the first free port; returns the address."""
        loop = asyncio.get_running_loop()
        for port in self.ports:
            try:
                server = await loop.create_server(
                    protocol, self.host, port, ssl=self.server_tls, ssl_handshake_timeout=self._handshake_limit_s
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return server, f"{self.host}:{server.sockets[0].getsockname()[1]}"
        raise UserError(
            f"ports {self.ports[0]} to {self.ports[-1]} of {self.host} are all taken: a node needs two for each "
            "replica and one for each front; widen the range under ports:"
        )

    async def connect(self, protocol: Callable[[], Connection], address: str) -> Connection:
        host, _, port = address.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(
            protocol, host, int(port), ssl=self.client_tls, ssl_handshake_timeout=self._handshake_limit_s
        )
        return connection

    @property
    def _handshake_limit_s(self) -> float | None:
        return HANDSHAKE_LIMIT_S if self.server_tls else None


def tls_contexts(files: Certificates) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS as a server and as a client: both ends must have a certificate of the same authority.

    Host names are not compared, because nodes come and go: a certificate is valid for all of them.
    """
    return _context(ssl.Purpose.CLIENT_AUTH, files), _context(ssl.Purpose.SERVER_AUTH, files)


def _context(purpose: ssl.Purpose, files: Certificates) -> ssl.SSLContext:
    try:
        for file in files:
            Path(file).open().close()  # with an empty name, any public authority would be trusted
        context = ssl.create_default_context(purpose, cafile=files.authority)
        context.load_cert_chain(files.certificate, files.key)
    except OSError as error:  # includes ssl's own errors
        raise UserError(
            f"RAY_USE_TLS is set, but TLS cannot begin ({error}): RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and "
            "RAY_TLS_CA_CERT must name its files, on every node"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13 sets it, and would refuse certificates that Ray takes
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def end_on_silence(transport: asyncio.BaseTransport) -> None:
    """Let the operating system end this connection once its peer has been silent for `SILENCE_LIMIT_S`."""
    own: Any = transport.get_extra_info("socket")
    if own is None or not hasattr(socket, "TCP_USER_TIMEOUT"):  # not on Linux
        return
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_LIMIT_S)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_LIMIT_S)
