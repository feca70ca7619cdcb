"""Measures other servers with the same network and exits inside a call, where batches shrink at ramps."""

import asyncio
from dataclasses import replace

from rich.console import Console

from experiments.peers.run import PEERS, Peer, has, running_peer
from experiments.real.served import AskedServer, RealCase
from experiments.shared.rate_search import FIRST, RateSearch, in_turns
from experiments.shared.real_network import LARGEST_BATCH, UNCAPPED_BATCH

SHARED = [peer for peer in PEERS if peer.name in ("ray", "ray_2", "litserve", "litserve_2")]  # with 1 or 2 workers
SHARED += [replace(peer, name=f"{peer.name}_large", batch=UNCAPPED_BATCH) for peer in SHARED if peer.needs == "ray"]
CLIENTS, WARMS_UP_S = 2 * LARGEST_BATCH, 5.0  # that wait for their answers: the rate of these is the first guess
console = Console(stderr=True, width=140)


def figures(case: RealCase, number: int, turns: int, seconds: float) -> dict[str, float]:
    """The rate of each peer in one round, by the same search as that of a plan; its first guess is no promise."""
    there = [peer for peer in SHARED if has(peer)]
    result = {f"missing_{peer.name}": float(peer not in there) for peer in SHARED}
    for peer in there:
        result[f"live_per_s_{peer.name}"] = rate_per_s = _sustained_per_s(peer, case, turns, seconds, number)
        console.print(f"{case.dtype}, {peer.name}: sustains {rate_per_s:.1f}/s")
    return result


def _sustained_per_s(peer: Peer, case: RealCase, turns: int, seconds: float, seed: int) -> float:
    async def searched(server: AskedServer) -> float:
        async def passes(name: str, per_s: float, turn: int) -> bool:
            return await server.sustains(per_s, seconds, turns * seed + turn)

        search = RateSearch(FIRST * await server.answered_per_s(CLIENTS, WARMS_UP_S))
        await in_turns({peer.name: search}, turns, passes)
        return search.sustained_per_s

    with running_peer(replace(peer, exits=case.dtype), str(case.checkpoint)) as url:
        return asyncio.run(searched(AskedServer(url, case.slo_ms, is_listed=False)))
