"""Claim: constant batch on Ray Serve costs little beside the devices, and keeps what a plan promises.

The server runs through HTTP and HAProxy, on virtual devices that take their time and compute nothing; the load comes
from this process, over loopback, on the same cores.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from rich.console import Console

from experiments.serve import measures
from experiments.serve.contenders import CASES, Contest, contenders
from experiments.serve.fleet import BLOCKS, PASS_S, Part, facts_for, plan, profile, promise_per_s
from experiments.serve.hops import hops
from experiments.serve.servers import served
from isobatch.cluster.load.report import summary
from isobatch.cluster.load.workloads import arrivals
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.optimizer.plan import Plan

ROUNDS, CLIENTS, SECONDS = 3, 256, 5.0
SLO_MS = 250.0
LEAVING = (3, BLOCKS - 1)  # as many after the first split as after the second, as in the profile
LOADS = (0.9, 1.1)  # as shares of what the plan promises
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
    return figures | hops() | _ratios()


def _front_door() -> dict[str, float]:
    """The rate of requests that pass, and the latency of a request beside its devices."""
    two = plan(Part(4, 4), Part(BLOCKS, 2))
    console.print("two splits of 10 ms")
    with served(two, profile(), slo_ms=5000.0) as ours:
        measures.rate(ours, CLIENTS, 1.0)  # warms up
        rps = median(measures.rate(ours, CLIENTS, SECONDS) for _ in range(ROUNDS))
        lone_ms = measures.median_ms(ours, measures.leaving_at(3), count=100)
        before_s = measures.fronts(ours)["cpu_s"]
        light = measures.under(ours, 0.3 * rps, SECONDS, 5000.0, *map(measures.leaving_at, LEAVING))
        front_s = measures.fronts(ours)["cpu_s"] - before_s
    return (
        {
            "rps_ours": rps,
            "lone_extra_ms": lone_ms - 1e3 * PASS_S,
            "front_cpu_ms_per_request": 1e3 * front_s / len(light.status),
        }
        | _over_passes("extra", measures.p50s_ms(light, len(LEAVING)))
        | _over_passes("waits", _alone_ms(two, 0.3 * rps))
    )


def _over_passes(name: str, p50s_ms: Sequence[float]) -> dict[str, float]:
    """The latency of inputs beside their one pass, or their two."""
    one, two = (p50_ms - 1e3 * PASS_S * passes for passes, p50_ms in enumerate(p50s_ms, start=1))
    return {f"p50_{name}_ms_at_30_percent_one_split": one, f"p50_{name}_ms_at_30_percent": two}


def _alone_ms(chosen: Plan, per_s: float) -> Sequence[float]:
    """The same medians by the simulator, where only devices take time: it is the time that inputs wait for devices."""
    facts = facts_for(profile(), chosen.devices())
    links = {ends: replace(link, bytes_per_s=1e15, latency_s=0.0) for ends, link in facts.links.items()}
    times_s = arrivals("poisson", per_s, 10 * SECONDS, seed=1)
    inputs = times_s, np.resize(LEAVING, len(times_s))
    report = simulate(World(chosen, replace(facts, links=links), 5.0), [inputs], 10 * SECONDS)
    # Half of the inputs leave half-way, all faster than the others: the quartiles are the medians of both halves.
    return [1e3 * report.tally.quantile_s(share) for share in (0.25, 0.75)]


def _promises() -> dict[str, float]:
    """Offer exactly what the plan promises, by Poisson arrivals; then, for two splits, three times as much."""
    figures = {}
    facts = profile(SLOW_S)
    for name, chosen in PLANS.items():
        console.print(f"a promise kept? {name}")
        promised = promise_per_s(chosen, facts)
        with served(chosen, facts, SLO_MS) as url:
            measures.under(url, promised / 2, 2.0, SLO_MS)  # warms up
            kept = summary(measures.under(url, promised, 2 * SECONDS, SLO_MS), SLO_MS)
            figures[f"promised_per_s_{name}"] = promised
            figures[f"goodput_share_{name}"] = kept.goodput_per_s / promised
            if name == "2splits":
                before = measures.fronts(url)
                flooded = summary(measures.under(url, 3 * promised, 2 * SECONDS, SLO_MS), SLO_MS)
                figures["overload_rss_growth_mb"] = measures.fronts(url)["memory_mb"] - before["memory_mb"]
                figures["overload_share"] = flooded.goodput_per_s / kept.goodput_per_s
                figures["refusal_p50_ms"] = flooded.refusal_p50_ms or 0.0
    return figures


def _ratios() -> dict[str, float]:
    """The goodput of the three systems on the same devices, each at the load that suits it best."""
    figures: dict[str, float] = {}
    for suffix, case in CASES.items():
        goodput = {name: _sustained(name, case, *each) for name, each in contenders(case).items()}
        figures |= {f"goodput_{name}{suffix}": each for name, each in goodput.items()}
        figures |= {f"ratio_{name}{suffix}": goodput["ours"] / goodput[name] for name in ("naive", "stock")}
    return figures


def _sustained(name: str, case: Contest, chosen: Plan, promised_per_s: float) -> float:
    """The better goodput of two loads, a little less than the plan promises and a little more."""
    console.print(f"{case.profile.model}, {name}: {promised_per_s:.0f}/s promised")
    slo_ms = 1e3 * case.slo_s
    with served(chosen, case.profile, slo_ms) as url:
        measures.under(url, promised_per_s / 2, 2.0, slo_ms)  # warms up
        records = [measures.under(url, load * promised_per_s, 2 * SECONDS, slo_ms) for load in LOADS]
        return max(summary(record, slo_ms).goodput_per_s for record in records)
