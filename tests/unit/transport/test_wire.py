"""Ports, TLS, and how soon a vanished peer is noticed."""

import asyncio
import ctypes
import datetime
import ipaddress
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from isobatch.cluster.serving.ports import is_free
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.transport.connection import MessageConnection
from isobatch.deployments.transport.exchange import Exchange
from isobatch.deployments.transport.holdings import Holdings, LostError, Share, public_address
from isobatch.deployments.transport.packed import Packed, pack
from isobatch.deployments.transport.wire import Certificates, Wire, tls_contexts
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import Batch
from tests.helpers.asking import until

HOST = "127.0.0.1"
_SO_ATTACH_FILTER = 26
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class Listener(MessageConnection):
    """Records the numbers that it receives, and the end of the connection."""

    messages = int

    def __init__(self) -> None:
        self.came: list[int] = []
        self.ended = asyncio.Event()

    def on_message(self, message: int) -> None:
        self.came.append(message)

    def lost(self, error: Exception | None) -> None:
        self.ended.set()


def deaf(connection: MessageConnection) -> None:
    """Let the kernel discard everything that arrives for this socket, without acknowledgement, as in a cut network."""
    nothing = ctypes.create_string_buffer(b"\x06\0\0\0\0\0\0\0")  # one instruction: return 0
    program = struct.pack("=HxxxxxxQ", 1, ctypes.addressof(nothing))
    ours: Any = connection._transport.get_extra_info("socket")
    ours.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


@asynccontextmanager
async def connected(wire: Wire) -> AsyncIterator[tuple[Listener, Listener]]:
    """Both ends of a connection."""
    listening: list[Listener] = []

    def welcome() -> Listener:
        listening.append(Listener())
        return listening[-1]

    server, address = await wire.listen(welcome)
    asking = await wire.connect(Listener, address)
    await until(lambda: listening and hasattr(listening[0], "_transport"))
    async with asyncio.timeout(60):
        yield listening[0], asking
    asking.hang_up()
    server.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize(("loop", "busy", "idle_s"), [(LOOPS[0], False, 2.5), (LOOPS[1], True, 0.0)])
async def test_a_peer_that_vanishes_is_noticed_and_one_that_is_idle_stays(
    monkeypatch: pytest.MonkeyPatch, loop: Any, busy: bool, idle_s: float
) -> None:
    """At both ends, with or without bytes on their way. By default the kernel would take a quarter of an hour."""
    monkeypatch.setattr("isobatch.deployments.transport.wire.SILENCE_LIMIT_S", 1)
    async with connected(Wire(HOST)) as (here, there), connected(Wire(HOST)) as (idle, other):
        deaf(here)
        deaf(there)
        if busy:
            here.send(1)
            there.send(1)
        await asyncio.gather(here.ended.wait(), there.ended.wait(), asyncio.sleep(idle_s))
        assert here.came == there.came == []
        idle.send(1)
        await until(lambda: other.came)


# Ports


async def test_ports_are_taken_from_the_range_and_a_full_range_is_reported() -> None:
    host = "127.0.0.78"  # where no other test listens, and from which none connects
    first = free_row(2, host)
    wire = Wire(host, range(first, first + 2))

    servers = [await wire.listen(Listener) for _ in range(2)]
    assert [address for _, address in servers] == [f"{host}:{first}", f"{host}:{first + 1}"]
    with pytest.raises(UserError, match=f"ports {first} to {first + 1} of {host} are all taken"):
        await wire.listen(Listener)
    for server, _ in servers:
        server.close()


def free_row(count: int, host: str) -> int:
    """The first of `count` free ports in a row."""
    rows = (range(first, first + count) for first in range(24_000, 30_000, count))
    return next(row[0] for row in rows if all(is_free(host, port) for port in row))


# TLS


def authority(folder: Path, name: str) -> Callable[[str], Certificates]:
    """A certificate authority that signs every certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = _signed(name, key, name, key, is_authority=True)
    (folder / f"{name}.pem").write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def certify(node: str) -> Certificates:
        theirs = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(node, theirs, name, key)
        (folder / f"{node}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / f"{node}.key").write_bytes(
            theirs.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return Certificates(*(str(folder / file) for file in (f"{node}.crt", f"{node}.key", f"{name}.pem")))

    return certify


def _signed(name: str, key: Any, issuer: str, issuers: Any, is_authority: bool = False) -> x509.Certificate:
    def named(told: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, told)])

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("10.0.0.9"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(issuers, hashes.SHA256())
    )


def secured(files: Certificates) -> Wire:
    return Wire(HOST, (0,), *tls_contexts(files))


@pytest.mark.parametrize("loop", LOOPS)
async def test_with_certificates_survivors_are_sent_encrypted(tmp_path: Path, loop: Any) -> None:
    """All rows arrive unchanged, and their bytes do not appear on the wire."""
    certify = authority(tmp_path, "ours")

    here, there = Exchange(Holdings()), Exchange(Holdings())
    await here.open(secured(certify("here")))
    await there.open(secured(certify("there")))
    hidden = np.arange(8 * 100_000, dtype=np.float32).reshape(8, -1)
    held = there._holdings.hold(pack(Batch(2, {"hidden": hidden}, np.zeros((8, 0), np.float32))), 9.0)
    for _ in range(2):
        (part,) = await here.gather([Share(held, np.array([7, 0]))])
        assert isinstance(part, Packed)
        assert (part.arrays["hidden"] == hidden[[7, 0]]).all()
    host, _, port = public_address(there._holdings.address).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x05\0\0\0 plain")
    assert b"plain" not in await asyncio.wait_for(reader.read(), 60), "whoever speaks no TLS is shown out"
    writer.close()
    here.close()
    there.close()
    await asyncio.sleep(0.05)


async def test_a_peer_with_a_certificate_of_another_authority_gets_nothing(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")

    there, stranger = Exchange(Holdings()), Exchange(Holdings())
    await there.open(secured(ours("there")))
    held = there._holdings.hold(pack(Batch(2, {}, np.zeros((1, 0), np.float32))), 9.0)
    own, others = ours("mixed"), theirs("stranger")
    for files in (others, Certificates(others.certificate, others.key, own.authority)):
        await stranger.open(secured(files))
        with pytest.raises(LostError):
            await stranger.gather([Share(held, np.array([0]))])
    assert not there.gate.authorized
    there.close()
    stranger.close()
    await asyncio.sleep(0.05)


def test_missing_certificates_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch.deployments.ray_facts import wire_of

    monkeypatch.setattr("isobatch.deployments.ray_facts.node_address", lambda: HOST)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", "/nowhere.crt")
    with pytest.raises(UserError, match="RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT must name"):
        wire_of(checked(AppConfig, {}))
