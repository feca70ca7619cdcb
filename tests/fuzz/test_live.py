"""The same at a real server, which only `make fuzz` starts: through HAProxy, at gRPC, and at all ports of replicas.

HTTP comes from two addresses. The client that means well has another, which it shares with those of gRPC.
"""

from functools import partial

import grpc

from tests.fuzz import cases
from tests.fuzz.attack import AT_ONCE, COUNTS, MOST_GROWTH_MIB, attack
from tests.fuzz.clients import HOST, Grpc, attacker, judged, judged_honest, judged_raw, post, raw
from tests.fuzz.live import Live


def test_a_real_server(live: Live) -> None:
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
        for kind, (_, path, case) in cases.HTTP.items():
            await attack(f"{name} {kind}", share, case, partial(_posted, live.http_port, path), AT_ONCE)
        await attack(f"{name} grpc", share, cases.grpc_call, lambda sent: stub.unary(*sent), AT_ONCE)
        await attack(f"{name} grpc_streams", share / 2, cases.grpc_stream, stub.stream, AT_ONCE)
    await attack(f"{name} raw_http", share / 2, cases.raw_http, partial(_raw, live.http_port), AT_ONCE)
    for host, port in live.replica_ports():
        await attack(f"{name} replica", share / 10, cases.frames, partial(_raw, port, host=host), AT_ONCE)


async def _posted(port: int, path: str, sent: tuple[bytes, cases.Headers]) -> str:
    return judged(await post(port, path, sent[1], sent[0], attacker(sent[0])))


async def _raw(port: int, sent: bytes, host: str = HOST) -> str:
    return judged_raw(await raw(port, sent, host))
