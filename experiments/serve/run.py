"""Claim: serving adds little time to that of the devices, and plans keep their promise.

Requests pass HTTP and HAProxy; virtual devices take their time and compute nothing. The load comes from this process,
over loopback, on the same cores. The controls are the time of the devices alone, and the promise.
"""

from statistics import median

from rich.console import Console

from experiments.serve import measures
from experiments.serve.fleet import BLOCKS, PASS_S, Part, plan, profile, promise_per_s
from experiments.serve.hops import hops
from experiments.serve.servers import served
from isobatch.cluster.load.report import summary

ROUNDS, CLIENTS, SECONDS = 3, 256, 5.0
SLO_MS = 250.0
LEAVING = (3, BLOCKS - 1)  # the exits of half of the inputs each, as in the profile
SLOW_S = 4 * PASS_S  # so that devices are the limit, not this machine
PLANS = {
    "1split": plan(Part(BLOCKS, 2)),
    "2splits": plan(Part(4, 1), Part(BLOCKS, 1)),
    "3splits": plan(Part(3, 1), Part(4, 1, "k80"), Part(BLOCKS, 1)),
}
console = Console(stderr=True)


def measure() -> dict[str, float]:
    figures = _front_door() | _promises()
    console.print("hops")
    return figures | hops()


def _front_door() -> dict[str, float]:
    """The rate of requests through the server, and the latency of a request beside its devices."""
    console.print("two splits of 10 ms")
    with served(plan(Part(4, 4), Part(BLOCKS, 2)), profile(), slo_ms=5000.0) as ours:
        measures.rate(ours, CLIENTS, 1.0)  # warms up
        rps = median(measures.rate(ours, CLIENTS, SECONDS) for _ in range(ROUNDS))
        lone_ms = measures.median_ms(ours, measures.leaving_at(3), count=100)
        light = measures.under(ours, 0.3 * rps, SECONDS, 5000.0, *map(measures.leaving_at, LEAVING))
    one_ms, two_ms = measures.p50s_ms(light, len(LEAVING))
    pass_ms = 1e3 * PASS_S
    return {
        "rps_ours": rps,
        "lone_extra_ms": lone_ms - pass_ms,
        "p50_extra_ms_at_30_percent_one_split": one_ms - pass_ms,
        "p50_extra_ms_at_30_percent": two_ms - 2 * pass_ms,
    }


def _promises() -> dict[str, float]:
    """The goodput over the promise, at Poisson arrivals of exactly the promised rate."""
    figures = {}
    facts = profile(SLOW_S)
    for name, chosen in PLANS.items():
        console.print(f"a promise kept? {name}")
        promised = promise_per_s(chosen, facts)
        with served(chosen, facts, SLO_MS) as url:
            measures.under(url, promised / 2, 2.0, SLO_MS)  # warms up
            kept = summary(measures.under(url, promised, 2 * SECONDS, SLO_MS), SLO_MS)
            figures[f"goodput_share_{name}"] = kept.goodput_per_s / promised
    return figures
