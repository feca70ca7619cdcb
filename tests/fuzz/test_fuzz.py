"""Cases by the thousand in `make test`, by the hundred thousand in `make fuzz`: nobody's bytes stop what listens here.

No case is a 5xx but 503 and 504, takes over a second, makes memory grow or spoils what an honest client is told.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from cluster.serving.serve_file import serve_file
from deployments.models.ramps import read_rules
from optimizer.plan import read_plan
from profiles import files
from profiles.errors import UserError
from tests.fuzz import cases
from tests.fuzz.attack import AT_ONCE, COUNTS, MOST_GROWTH_MIB, attack, refused_share, rss_mib, within_s
from tests.fuzz.clients import HOST, Grpc, Honest, judged, judged_raw, post, raw
from tests.fuzz.live import Live
from tests.fuzz.served import Served

ROOT = Path(__file__).parents[2]
Act = Callable[[Any], Coroutine[Any, Any, str]]

INFER = "/v2/models/toy/infer"
HTTP = {
    "predict": (0.20, "/predict", cases.predict),
    "v2_json": (0.22, INFER, cases.v2_json),
    "v2_binary": (0.14, INFER, cases.v2_binary),
}


def within_memory(kind: str, half: Callable[[], Any]) -> None:
    """Attack twice: what is set aside once is so in the first half, what leaks grows in the second, too."""
    half()
    before_mib = rss_mib()
    half()
    grown_mib = rss_mib() - before_mib
    COUNTS["memory", f"{kind}_grown_mib"] = round(grown_mib)
    assert grown_mib < MOST_GROWTH_MIB


@pytest.mark.parametrize("kind", HTTP)
def test_http(served: Served, kind: str) -> None:
    share, path, case = HTTP[kind]

    async def act(sent: tuple[bytes, cases.Headers]) -> str:
        return judged(await served.ask(path, sent[1], sent[0]))

    within_memory(kind, lambda: served.run(attack(kind, share / 2, case, act)))


def test_raw_http(served: Served) -> None:
    async def act(sent: bytes) -> str:
        return judged_raw(await raw(served.http_port, sent))

    within_memory("raw_http", lambda: served.run(attack("raw_http", 0.03, cases.http, act, AT_ONCE)))


def test_grpc(served: Served) -> None:
    async def act(sent: tuple[str, bytes]) -> str:
        return await served.grpc.unary(*sent)

    within_memory("grpc", lambda: served.run(attack("grpc", 0.05, cases.grpc_call, act)))


def test_grpc_streams(served: Served) -> None:
    within_memory(
        "grpc_streams", lambda: served.run(attack("grpc_streams", 0.02, cases.grpc_stream, served.grpc.stream))
    )


@pytest.mark.parametrize("which", ["orders", "exchange"])
def test_replica_sockets(served: Served, which: str) -> None:
    port = served.orders_port if which == "orders" else served.exchange_port

    async def act(sent: bytes) -> str:
        await raw(port, sent)
        assert not served.orders.door.guests
        return "no order taken"

    within_memory(which, lambda: served.run(attack(which, 0.02, cases.frames, act, AT_ONCE)))


def test_the_honest_client_was_right_and_was_not_kept_waiting(served: Served) -> None:
    judged_honest("honest", served.honest)


def judged_honest(where: str, honest: Honest) -> None:
    refused = len(honest.refusals)
    COUNTS[where, "right"] = honest.asked - honest.wrong - refused
    COUNTS[where, "wrong"], COUNTS[where, "refused"] = honest.wrong, refused
    COUNTS[where, "worst_ms"] = round(1e3 * honest.worst_s)
    assert honest.asked
    assert not honest.wrong
    assert refused < refused_share() * honest.asked, (refused, honest.asked, honest.refusals[0])
    assert honest.worst_s < within_s()


# Files

FILES: dict[str, tuple[Path, Callable[[Path], object]]] = {
    "serve.yaml": (ROOT / "cluster" / "demo.yaml", lambda path: serve_file(path, {})),
    "plan": (ROOT / "cluster" / "demo" / "plan.json", read_plan),
    "profile": (ROOT / "cluster" / "demo" / "profile.json", files.load),
    "exits": (ROOT / "deployments" / "demo" / "demo-float32" / "exits.json", read_rules),
}


@pytest.mark.parametrize("kind", FILES)
def test_files(tmp_path: Path, kind: str) -> None:
    """A file is read, or refused in one line."""
    valid, read = FILES[kind]
    path = tmp_path / f"case{valid.suffix}"
    content = valid.read_bytes()

    async def act(sent: bytes) -> str:
        path.write_bytes(sent)
        began_s, refusal = time.process_time(), ""
        try:
            read(path)
        except UserError as error:
            refusal = str(error)
        assert time.process_time() - began_s < 1
        assert "\n" not in refusal
        return "refused" if refusal else "read"

    case = partial(cases.file, content, yaml.safe_load(content))
    within_memory(kind, lambda: asyncio.run(attack(kind, 0.01, case, act)))


# A real server


def test_a_real_server(live: Live) -> None:
    """Through HAProxy, at the front's gRPC, and at all ports of replicas."""
    live.run(_attacked(live, "warming up", 0.005))
    before_mib = live.memory_mib()
    live.run(_attacked(live, "live", 0.02))
    after_mib = live.memory_mib()
    assert set(before_mib) <= set(after_mib), "a process has ended"
    grown_mib = max(after_mib[each] - before_mib[each] for each in before_mib)
    COUNTS["memory", "live_grown_mib"] = round(grown_mib)
    judged_honest("honest_live", live.honest)
    assert grown_mib < MOST_GROWTH_MIB


async def _attacked(live: Live, name: str, share: float) -> None:
    async with grpc.aio.insecure_channel(f"{HOST}:{live.grpc_port}") as channel:
        stub = Grpc(channel)
        for kind, (_, path, case) in HTTP.items():
            await attack(f"{name} {kind}", share, case, partial(_posted, live.http_port, path), AT_ONCE)
        await attack(f"{name} grpc", share, cases.grpc_call, lambda sent: stub.unary(*sent), AT_ONCE)
        await attack(f"{name} grpc_streams", share / 2, cases.grpc_stream, stub.stream, AT_ONCE)
    await attack(f"{name} raw_http", share / 2, cases.http, partial(_raw, live.http_port), AT_ONCE)
    for host, port in live.replica_ports():
        await attack(f"{name} replica", share / 10, cases.frames, partial(_raw, port, host=host), AT_ONCE)


async def _posted(port: int, path: str, sent: tuple[bytes, cases.Headers]) -> str:
    return judged(await post(port, path, sent[1], sent[0]))


async def _raw(port: int, sent: bytes, host: str = HOST) -> str:
    return judged_raw(await raw(port, sent, host))
