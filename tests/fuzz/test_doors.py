"""The attack table of docs/security.md: each attack is done to each interface, beside a client that means well.

The table says what the attacker gets. A client at another address must be answered within `HONEST_S`.
"""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from experiments.shared.machine import free_port
from isobatch.deployments.config import AppConfig
from isobatch.deployments.front import bodies, grpc_proxy
from isobatch.deployments.front.http import create_api
from isobatch.deployments.front.open_inference.messages import SERVICE
from isobatch.deployments.front.service import Service
from tests.fuzz.cases import COMPLETION, PREDICT, TEXT_INFER, as_json, text_infer
from tests.fuzz.clients import ATTACKERS, HOST
from tests.helpers.grpc_proxy import REQUEST, frame, headers
from tests.helpers.haproxy import haproxy
from tests.helpers.serving import in_a_thread

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
CONNECTIONS = 120  # of all clients, in these tests
OF_EACH = 60  # connections that an attacker tries to open
REQUEST_S = 1  # instead of ten seconds
READ_S = 3.0  # instead of thirty
PROMPTS = 20  # at once
ARRIVING = 20  # bodies at once, instead of 256
HONEST_S = 1.5
KEY = "secret-of-the-test"
LIMIT = 2**16  # bytes of a body
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b"", stream=0)
INFERENCE = headers(f"/{SERVICE}/ModelInfer")


@dataclass(frozen=True)
class Door:
    """An interface, with a request that is right. `path`: of HTTP; gRPC has none. `locked`: the port that has a key."""

    port: int
    locked: int
    path: str
    body: bytes

    def honest(self) -> None:
        answer = status(self.port, request(self)) if self.path else code(self.port, self.body)
        assert answer in ("200", "OK")


def said(port: int, request: bytes, source: str = HOST) -> bytes:
    """What comes back until the connection ends."""
    came = b""
    with (
        socket.create_connection((HOST, port), timeout=10, source_address=(source, 0)) as connection,
        suppress(OSError),
    ):
        connection.sendall(request)
        while part := connection.recv(65536):
            came += part
    return came


def request(door: Door, lines: str = "", body: bytes | None = None) -> bytes:
    """A request over HTTP after which the connection ends; `lines`: of its head, instead of the usual ones."""
    body = door.body if body is None else body
    host = "" if "Host: " in lines else "Host: x\r\n"
    length = "" if "Content-Length: " in lines else f"Content-Length: {len(body)}\r\n"
    return f"POST {door.path} HTTP/1.1\r\n{host}{length}{lines}Connection: close\r\n\r\n".encode() + body


def status(port: int, request: bytes) -> str:
    return status_in(said(port, request))


def status_in(reply: bytes) -> str:
    return reply.split(b" ", 2)[1].decode() if reply.startswith(b"HTTP/") else "ended"


def code(port: int, message: bytes) -> str:
    """The status of an inference over gRPC."""
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        try:
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(message, timeout=10)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


# What is attacked


@contextmanager
def behind_proxies(
    folder: Path, kind: str, make: Callable[[int, str | None], Any], path: str, body: bytes, message: bytes
) -> Iterator[dict[str, Door]]:
    """The interfaces of a network behind HAProxy; and the same with a key."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_THE_TEST", KEY)
        patch.setattr(grpc_proxy, "CONNECTIONS", CONNECTIONS)
        patch.setattr(grpc_proxy, "REQUEST_S", REQUEST_S)
        patch.setattr(grpc_proxy, "KEEP_ALIVE_S", REQUEST_S)
        patch.setattr(bodies, "MOST_ARRIVING", ARRIVING)
        patch.setattr(bodies, "READ_WITHIN_S", READ_S)
        port, locked = free_port(), free_port()
        bases = [stack.enter_context(in_a_thread(make(*each))) for each in ((port, None), (locked, "KEY_OF_THE_TEST"))]
        front, locked_front = (int(base.rpartition(":")[2]) for base in bases)
        proxy = haproxy(folder, front=front, prefix="/", within_s=REQUEST_S, connections=CONNECTIONS)
        yield {
            f"{kind}, HTTP": Door(stack.enter_context(proxy), locked_front, path, body),
            f"{kind}, gRPC": Door(port, locked, "", message),
        }


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Door]]:
    def make(grpc_port: int, key: str | None) -> Any:
        config = {"model": "/models/toy", "loader": "tests.fuzz.served:load", "slo_ms": 60_000, "max_body_bytes": LIMIT}
        return create_api(Service(AppConfig(grpc_port=grpc_port, api_key_variable=key, **config), time.perf_counter))

    folder = tmp_path_factory.mktemp("c")
    with behind_proxies(folder, "classifier", make, "/predict", as_json(PREDICT), REQUEST) as doors:
        yield doors


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Door]]:
    from experiments.demos.sums import tokenizer
    from isobatch.deployments.decoding.openai_api import create_decoder_api
    from tests.helpers.decoder_world import CONFIG, World
    from tests.helpers.tiny_decoders import decoder

    worlds = list[World]()

    def make(grpc_port: int, key: str | None) -> Any:
        worlds.append(world := World(decoder(), tokenizer()))
        world.front.config = CONFIG.model_copy(update={"grpc_port": grpc_port, "max_body_bytes": LIMIT})
        world.front.key = KEY.encode() if key else None
        return create_decoder_api(world.front)

    folder = tmp_path_factory.mktemp("d")
    with behind_proxies(folder, "decoder", make, "/v1/completions", as_json(COMPLETION), TEXT_INFER) as doors:
        yield doors
    for world in worlds:
        world.loop.end()


# The attacks: each returns what its sender got


def by_many(door: Door, sent: bytes) -> str:
    """Two addresses open many connections, send this, and wait for what comes until their connections end."""
    got = set[str]()
    with ExitStack() as stack:
        opened = []
        for source in ATTACKERS:
            for _ in range(OF_EACH):
                try:
                    connection = socket.create_connection((HOST, door.port), timeout=10, source_address=(source, 0))
                    opened.append(stack.enter_context(connection))
                    connection.sendall(sent)
                except OSError:
                    got.add("ended")
        door.honest()
        for connection in opened:
            came = b""
            try:
                while part := connection.recv(65536):
                    came += part
            except TimeoutError:
                got.add("held")
                break
            except OSError:
                pass
            got.add(status_in(came))
    return ", ".join(sorted(got))


def idle(door: Door) -> str:
    return by_many(door, b"" if door.path else PREFACE)


def endless_headers(door: Door) -> str:
    return by_many(door, b"POST / HTTP/1.1\r\nX-Slow: " if door.path else PREFACE + frame(1, 0, INFERENCE[:-10]))


def endless_body(door: Door) -> str:
    if door.path:
        return by_many(door, request(door, "Content-Length: 60000\r\n", b"x" * 20_000))
    start = b"\0" + (10**6).to_bytes(4, "big") + bytes(1000)
    return by_many(door, PREFACE + frame(1, 4, INFERENCE) + frame(0, 0, start))


def no_key(door: Door) -> str:
    return status(door.locked, request(door)) if door.path else code(door.locked, door.body)


def too_large(door: Door) -> str:
    if door.path:
        return status(door.port, request(door, body=b"x" * (LIMIT + 1)))
    return code(door.port, bytes(LIMIT + 1))


def no_request(door: Door) -> str:
    return status(door.port, b"nonsense\r\n\r\n")


def nested(door: Door) -> str:
    return status(door.port, request(door, body=b"[" * 50_000)) if door.path else code(door.port, b"\x2a\x04" * 20_000)


def long_prompts(door: Door) -> str:
    """Many at once, each of which would take long to tokenize."""
    if door.body not in (as_json(COMPLETION), TEXT_INFER):
        return "-"
    with ThreadPoolExecutor(PROMPTS) as pool:
        if door.path:
            sent = request(door, body=as_json(COMPLETION | {"prompt": "1" * 60_000}))
            replies = [pool.submit(status, door.port, sent) for _ in range(PROMPTS)]
        else:
            replies = [pool.submit(code, door.port, text_infer(b"1" * 60_000)) for _ in range(PROMPTS)]
        door.honest()
        return ", ".join(sorted({each.result() for each in replies}))


def other_host(door: Door) -> str:
    return status(door.port, request(door, "Host: evil.example\r\n")) if door.path else "-"


def other_page(door: Door) -> str:
    return status(door.port, request(door, "Origin: http://evil.example\r\n")) if door.path else "-"


def unknown_method(door: Door) -> str:
    if door.path:
        return status(door.port, request(door).replace(b"POST", b"FOO", 1))
    reply = said(door.port, PREFACE + frame(1, 5, headers(f"/{SERVICE}/ModelInfer", "FOO")))
    return "UNIMPLEMENTED" if b"grpc-status" in reply and b"a call of gRPC is a POST" in reply else "answered"


ATTACKS: dict[str, Callable[[Door], str]] = {
    "idle connections": idle,
    "headers that do not end": endless_headers,
    "bodies that do not end": endless_body,
    "no key where one is needed": no_key,
    "a body that is too large": too_large,
    "bytes that are no request": no_request,
    "deeply nested lists": nested,
    "prompts far longer than the context": long_prompts,
    "another host (DNS rebinding)": other_host,
    "a page of another server": other_page,
    "an unknown method": unknown_method,
}


def table() -> dict[str, dict[str, str]]:
    """The attack table of the document: by attack and interface what the attacker gets."""
    text = DOCUMENT.read_text().partition("## Attacks")[2]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    head, _, *others = rows
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in others}


TABLE = table()


def test_the_table_has_each_attack() -> None:
    assert list(TABLE) == list(ATTACKS)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("interface", ["classifier, HTTP", "classifier, gRPC", "decoder, HTTP", "decoder, gRPC"])
def test_each_attack_at_each_interface(request: pytest.FixtureRequest, interface: str, name: str) -> None:
    door: Door = request.getfixturevalue(interface.partition(",")[0])[interface]
    assert ATTACKS[name](door) == TABLE[name][interface]
    began_s = time.monotonic()
    door.honest()
    assert time.monotonic() - began_s < HONEST_S
