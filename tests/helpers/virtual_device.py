"""The latency table and the survival of a virtual device of four blocks."""

from isobatch.profiles.latency import LatencyTable

SURVIVAL = (1.0, 0.8, 0.5, 0.5)
BLOCKS = len(SURVIVAL)


def table() -> LatencyTable:
    rows = tuple(tuple(0.001 * size * (block + 1) for block in range(BLOCKS)) for size in (1, 8))
    ramps = ((0.0001, 0.0001, 0.0001, 0.0),) * 2
    sizes = (100, 200, 300, 400)
    return LatencyTable("v100", (1, 8), rows, ramps, 0.0005, sizes, sizes, "made up")
