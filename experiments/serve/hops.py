"""Measures the cost of a hop from split to split: the latency that it adds, and the front's processor time.

16 inputs weigh 256 KiB after the first split and 3 MiB after the second. A hop's latency is that of a request that
makes it, less that of one that leaves before it, less the time of the next device. All by value is measured, too.
"""

from statistics import median

from experiments.serve import measures
from experiments.serve.fleet import BATCH, BLOCKS, PASS_S, Part, plan, profile
from experiments.serve.servers import served

ROUNDS, COUNT = 3, 40
KIB, MIB = 2**10, 2**20
LEAVE_AFTER = (1, 3, BLOCKS - 1)  # after no hop, one, two
WEIGHTS = (256 * KIB // BATCH,) * 2 + (3 * MIB // BATCH,) * (BLOCKS - 2)
WAYS: dict[str, dict[str, object]] = {"": {}, "_by_value": {"by_value_bytes": 2**40}}


def hops() -> dict[str, float]:
    figures: dict[str, float] = {}
    for suffix, fields in WAYS.items():
        chosen = plan(Part(2, 1), Part(4, 1), Part(BLOCKS, 1))
        with served(chosen, profile(hidden_bytes=WEIGHTS), slo_ms=5000.0, **fields) as url:
            result = _latencies(url) | _front(url)
        figures |= {name + suffix: value for name, value in result.items()}
    return figures


def _latencies(url: str) -> dict[str, float]:
    """Latencies measured in turns, so that other work on the machine affects all of them alike."""
    rounds = [
        [measures.median_ms(url, measures.leaving_at(block, BATCH), COUNT) for block in LEAVE_AFTER]
        for _ in range(ROUNDS)
    ]
    none, one, both = (median(each) for each in zip(*rounds, strict=True))
    half_ms = 1e3 * PASS_S / 2  # the second split; the third takes twice as long
    return {"hop_256kib_ms": one - none - half_ms, "hop_3mib_ms": both - one - 2 * half_ms}


def _front(url: str) -> dict[str, float]:
    """The front's processor time for a request that makes both hops."""
    before = measures.stats(url)
    measures.median_ms(url, measures.leaving_at(BLOCKS - 1, BATCH), 3 * COUNT)
    after = measures.stats(url)
    requests = after["requests"]["answered"] - before["requests"]["answered"]
    by_value = [stats["survivor_bytes"].get("by_value", 0) for stats in (before, after)]
    return {
        "front_ms_per_request": 1e3 * (after["fronts"][0]["cpu_s"] - before["fronts"][0]["cpu_s"]) / requests,
        "front_kib_per_request": 2 * (by_value[1] - by_value[0]) / KIB / requests,  # in and out again
    }
