"""Ports: finds free ones, checks them, and reserves them until another process listens there."""

import random
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import EADDRNOTAVAIL
from itertools import islice
from pathlib import Path

from isobatch.profiles.errors import UserError

# Between Ray's own ports and those of outgoing connections, which might take a port before we listen on it.
OTHER_PORTS = range(20_000, 30_000)
NAME_CHARACTERS = 64  # of a claimed address: names of sockets have at most 108 bytes
EVERYWHERE = ("0.0.0.0", "::")  # all addresses of this machine
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


@contextmanager
def claimed(addresses: Iterable[tuple[str, int]]) -> Iterator[None]:
    """Keep other `isobatch serve` from these hosts and ports until the block ends; raises UserError if one has them.

    A free port alone says little: seconds pass before HAProxy listens there, and it shares the port with others.
    """
    with ExitStack() as held:
        for host, port in addresses:
            claim = held.enter_context(socket.socket(socket.AF_UNIX))
            if _is_taken(claim, f"@isobatch {port} ", _number_of(host)):
                reason = f"another 'isobatch serve' that starts or stops now has port {port} of {host}"
                raise UserError(f"{reason}: wait until it is ready or has ended, or take another port")
        yield


def _is_taken(claim: socket.socket, prefix: str, number: str) -> bool:
    """Take the name of this address, which ends with this process. True if another process has it or one that overlaps.

    The name is taken first, so that of two processes that come at once at least one sees the other.
    """
    name, others = f"{prefix}{number}"[:NAME_CHARACTERS], set[str]()
    try:
        claim.bind(name.replace("@", "\0", 1))
    except OSError:
        return True
    with suppress(OSError):  # where /proc lacks it, equal addresses are still refused
        names = (
            f"@{line.partition('@')[2]}" for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()
        )
        others = {each.removeprefix(prefix) for each in names if each.startswith(prefix) and each != name}
    return bool(others) if number in EVERYWHERE else not others.isdisjoint(EVERYWHERE)


def _number_of(host: str) -> str:
    """The address that a name has, so that localhost is 127.0.0.1; a name without one stays."""
    with suppress(OSError, UnicodeError):
        return socket.gethostbyname(host)
    return host


def is_claimed(host: str, port: int) -> bool:
    """Whether an `isobatch serve` has this address, although it may not listen there yet."""
    try:
        with claimed([(host, port)]):
            return False
    except UserError:
        return True
