"""Free ports: finds them, checks them, and reserves them until another process listens there."""

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from errno import EADDRNOTAVAIL
from itertools import islice

from isobatch.profiles.errors import UserError

# Between Ray's own ports and those of outgoing connections, which might take a port before we listen on it.
OTHER_PORTS = range(20_000, 30_000)
SHARED = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)  # another process may then bind a reserved port


def is_free(host: str, port: int) -> bool:
    try:
        check_port(host, port, "")
    except UserError:
        return False
    return True


def check_port(host: str, port: int, option: str) -> None:
    try:
        with socket.socket(_family(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        remedy = f"stop what listens there, or take another with {option}"
        if isinstance(error, socket.gaierror) or error.errno == EADDRNOTAVAIL:
            remedy = "name an address of this machine"
        raise UserError(f"port {port} of {host} cannot be used ({error.strerror}): {remedy}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@contextmanager
def held_ports(number: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Reserve free ports until the block ends. A process that knows them can listen there meanwhile.

    Seconds pass before a started process listens, and other servers of this machine may look for ports meanwhile.
    """
    with ExitStack() as held:
        yield list(islice(_held(held, host), number))


def _held(held: ExitStack, host: str) -> Iterator[int]:
    for port in random.sample(OTHER_PORTS, len(OTHER_PORTS)):
        holder = held.enter_context(socket.socket(_family(host)))
        try:
            holder.bind((host, port))  # fails if any other socket has the port, because it is not shared yet
        except OSError:
            continue
        for option in SHARED:
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        yield port
