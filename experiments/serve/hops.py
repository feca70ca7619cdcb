"""Measures the latency that a hop from split to split adds.

16 inputs have 256 KiB after the first split and 3 MiB after the second. A hop's latency is that of a request with the
hop, less that of a request that leaves before it, less the time of the next device.
"""

from statistics import median

from experiments.serve import measures
from experiments.serve.fleet import BATCH, BLOCKS, PASS_S, Part, plan, profile
from experiments.serve.servers import served

ROUNDS, COUNT = 3, 40
KIB, MIB = 2**10, 2**20
LEAVE_AFTER = (1, 3, BLOCKS - 1)  # after no hop, one hop, two hops
WEIGHTS = (256 * KIB // BATCH,) * 2 + (3 * MIB // BATCH,) * (BLOCKS - 2)


def hops() -> dict[str, float]:
    chosen = plan(Part(2, 1), Part(4, 1), Part(BLOCKS, 1))
    with served(chosen, profile(hidden_bytes=WEIGHTS), slo_ms=5000.0) as url:
        return _latencies(url)


def _latencies(url: str) -> dict[str, float]:
    """Latencies are measured in turns, so that other work on the machine affects all of them."""
    rounds = [
        [measures.median_ms(url, measures.leaving_at(block, BATCH), COUNT) for block in LEAVE_AFTER]
        for _ in range(ROUNDS)
    ]
    none, one, both = (median(each) for each in zip(*rounds, strict=True))
    half_ms = 1e3 * PASS_S / 2  # the second split; the third takes twice as long
    return {"hop_256kib_ms": one - none - half_ms, "hop_3mib_ms": both - one - 2 * half_ms}
