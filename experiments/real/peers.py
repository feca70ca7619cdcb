"""Measures other servers with the same network and exits inside a call, where batches shrink at ramps."""

import asyncio
import time
from dataclasses import replace

from rich.console import Console

from experiments.peers.run import PEERS, Peer, has, running_peer
from experiments.real.served import AskedServer, RealCase
from experiments.shared.real_network import LARGEST_BATCH, texts

SHARED = [peer for peer in PEERS if peer.name in ("ray", "litserve")]
TIMED_S = 3.0  # of calls in this process, an upper bound on such a server's rate
LOW, HIGH = 0.2, 1.1  # seconds of these calls
WARMS_UP_S = 5.0
console = Console(stderr=True, width=140)


def figures(case: RealCase, number: int, seconds: float) -> dict[str, float]:
    """The rate of each peer in one round, searched in a wide range, since peers have no promise."""
    there, per_s = [peer for peer in SHARED if has(peer)], _called_per_s(case)
    result = {f"missing_{peer.name}": float(peer not in there) for peer in SHARED}
    for peer in there:
        result[f"live_per_s_{peer.name}"] = rate_per_s = _sustained_per_s(peer, case, per_s, seconds, number)
        console.print(f"{case.dtype}, {peer.name}: sustains {rate_per_s:.1f}/s")
    return result


def _sustained_per_s(peer: Peer, case: RealCase, per_s: float, seconds: float, seed: int) -> float:
    async def searched(server: AskedServer) -> float:
        await server.ask(LOW * per_s, WARMS_UP_S)
        return await server.sustained_per_s(LOW * per_s, HIGH * per_s, seconds, seed)

    with running_peer(replace(peer, exits=case.dtype), str(case.checkpoint)) as url:
        return asyncio.run(searched(AskedServer(url, case.slo_ms, is_listed=False)))


def _called_per_s(case: RealCase) -> float:
    """Inputs per second of calls with full batches, one after another."""
    from experiments.peers.network import PeerNetwork

    network, sent, calls = PeerNetwork(str(case.checkpoint), case.dtype), texts(LARGEST_BATCH), 0
    network.labels(sent)
    began_s = time.perf_counter()
    while time.perf_counter() < began_s + TIMED_S:
        network.labels(sent)
        calls += 1
    return calls * LARGEST_BATCH / (time.perf_counter() - began_s)
