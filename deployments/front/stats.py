"""The published counts: /stats, with sums over all fronts, and each front's metrics for Prometheus.

Metrics are exported through Ray once a second, and latencies when they are known.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.counts import BUSY_S, OUTCOMES, Counts, by_level, survival, together
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.messages import FrontState, Usage
from isobatch.deployments.metrics import FRONT, MetricSeries
from isobatch.deployments.named import CanaryTerms
from isobatch.profiles.agreement import Agreement, PromiseState, agreement_text, recent_agreement

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def state_of(driver: Driver) -> FrontState:
    dispatcher = driver.dispatcher
    inside, waiting, replicas = dispatcher.inside, dispatcher.waiting(), dispatcher.replicas()
    counts = driver.counted()
    parked = dispatcher.parked
    return FrontState(counts, dispatcher.route, inside, waiting, replicas, usage(), counts.busy_s(), parked)


def stats_of(
    fronts: Sequence[FrontState], promised: float | None = None, canary: CanaryTerms | None = None
) -> dict[str, Any]:
    """The sums of the fronts' states, and the plan of the first front: all change plans within milliseconds.

    `promised`: the agreement that audits should confirm.
    """
    counts, route = together([front.counts for front in fronts]), fronts[0].route
    splits = [_split(stage, counts, fronts) for stage in route.all_stages]
    audits, in_words = _audits(counts, fronts, promised)
    stats = {
        "agreement": in_words,
        "requests": {name: counts.outcomes[name] for name in OUTCOMES},
        "latency_ms": counts.latency_ms(),
        "inside": sum(front.inside for front in fronts),
        "waiting": sum(sum(front.waiting.values()) for front in fronts),
        "splits": splits,
        "exits": {str(block): counts.exits[block] for block in range(route.num_blocks)},
        "survival": survival(counts.exits, route.num_blocks),
        "observations": counts.observations,
        "audits": audits,
        "survivor_bytes": dict(counts.survivor_bytes),
        "replicas": _busy(fronts),
        "fronts": [asdict(front.usage) for front in fronts],
    }
    if route.edges:
        stats["levels"] = _levels(counts, route)
    if canary:
        counted = {name: round(counts.canary[name], 3) for name in ("kept", "missed")}
        stats["canary"] = canary.model_dump() | counted | {"withdrawn_by": int(counts.canary["withdrawn"])}
    return stats if route.length is None else stats | {"tokens": _tokens(counts, route)}


def _busy(fronts: Sequence[FrontState]) -> list[dict[str, Any]]:
    """The share of the last `BUSY_S` in which each replica has computed, for all fronts together."""
    by_replica: dict[str, tuple[str, float]] = {}
    for replica, (kind, spent_s) in (pair for front in fronts for pair in front.busy_s.items()):
        by_replica[replica] = kind, by_replica.get(replica, (kind, 0.0))[1] + spent_s
    return [
        {"replica": replica, "kind": kind, "busy": round(min(1.0, spent_s / BUSY_S), 3)}
        for replica, (kind, spent_s) in sorted(by_replica.items())
    ]


def _levels(counts: Counts, route: Route) -> list[dict[str, Any]]:
    """The blocks of each level of a cascade, and its answers."""
    answered = by_level(counts.exits, route.edges)
    total = answered.total()
    return [
        {
            "blocks": [start, stop],
            "answered": answered[level],
            "share": round(answered[level] / total, 4) if total else None,
        }
        for level, (start, stop) in enumerate(pairwise((0, *route.edges, route.num_blocks)))
    ]


def _tokens(counts: Counts, route: Route) -> dict[str, Any]:
    """The counts in tokens; `length`: the tokens of an input in the plan."""
    return {
        "length": route.length,
        "arrived": counts.arrived_weight,
        "per_input": round(counts.arrived_weight / counts.arrivals, 1) if counts.arrivals else None,
        "answered": counts.exit_weights.total(),
        "survival": survival(counts.exit_weights, route.num_blocks),
    }


def _audits(counts: Counts, fronts: Sequence[FrontState], promised: float | None) -> tuple[dict[str, Any], str]:
    """The results of audits and the state of the promise, as JSON and in words."""
    watches = [front.counts.watched(front.route) for front in fronts]
    total = counts.agreement(fronts[0].route.num_blocks)
    recent = recent_agreement(watches, fronts[0].counts.clock(), promised)
    audits = {
        "ended": counts.audited.total(),
        "disagreed": counts.missed.total(),
        "agreement": total and asdict(total),
        "lately": recent.agreement and asdict(recent.agreement),
        "promised": promised,
        "verdict": recent.state,
    }
    return audits, agreement_text(recent, promised, total)


def _split(stage: Stage, counts: Counts, fronts: Sequence[FrontState]) -> dict[str, Any]:
    key = stage.group, stage.start
    return {
        "blocks": [stage.start, stage.stop],
        "batch": stage.batch,
        "room": stage.room,
        "ramps": sorted(stage.ramps),
        "group": stage.group,
        "replicas": len({replica for front in fronts for replica in front.replicas.get(stage.group, ())}),
        "launches": counts.launches[key].number,
        "fill": counts.launches[key].fill,  # not rounded: readers compute the latest launches' from two of these
        "waiting": sum(front.waiting.get(key, 0) for front in fronts),
    }


def usage() -> Usage:
    """This process's use of its machine.

    >>> usage().cpu_s > 0
    True
    """
    pages = 0
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Usage(round(time.process_time(), 2), round(pages * _PAGE_BYTES / 2**20, 1))


EVERY_S = 1.0  # the time between two exports
NOTHING_KNOWN = Agreement(1.0, 0.0, 1.0, 0)  # the agreement without recent audits: it may be anything


async def export(driver: Driver, promised_per_s: Callable[[], float | None]) -> None:
    """Export until cancelled; works only inside a replica of Serve, whose name Ray adds to each series."""
    from ray.serve import metrics

    series = MetricSeries(FRONT, metrics)
    driver.observe_latency_ms = partial(series.observe, "isobatch_latency_ms")
    while True:
        export_now(series, driver, promised_per_s())
        await asyncio.sleep(EVERY_S)


def export_now(series: MetricSeries, driver: Driver, promised_per_s: float | None) -> None:
    counts, route = driver.counted(), driver.dispatcher.route
    missed, edges = counts.missed.total(), route.edges
    for name, label, totals in (
        ("isobatch_requests", "outcome", {outcome: counts.outcomes[outcome] for outcome in OUTCOMES}),
        ("isobatch_exits", "block", counts.exits),
        ("isobatch_survivor_bytes", "way", counts.survivor_bytes),
        ("isobatch_audits", "outcome", {"agreed": counts.audited.total() - missed, "disagreed": missed}),
        ("isobatch_canary_requests", "outcome", counts.canary),
        ("isobatch_level_answers", "level", by_level(counts.exits, edges) if edges else {}),
    ):
        for value, total in totals.items():
            series.set_total(name, total, **{label: str(value)})
    series.set_total("isobatch_arrived_inputs", counts.arrivals)
    series.set_total("isobatch_arrived_weight", counts.arrived_weight)
    series.set_total("isobatch_in_time_inputs", counts.in_time)
    series.set("isobatch_promised_per_s", promised_per_s or 0.0)
    for (group, block), launches in counts.launches.items():
        series.set_launches(group, block, *launches)
    waiting = driver.dispatcher.waiting()
    for stage in route.all_stages:
        inputs = waiting.get((stage.group, stage.start), 0)
        series.set("isobatch_waiting_inputs", inputs, group=stage.group, block=str(stage.start))
    for group, replicas in driver.dispatcher.replicas().items():
        series.set("isobatch_replicas", len(replicas), group=group)
    series.set("isobatch_parked", float(driver.dispatcher.parked))
    _export_agreement(series, counts, route)


def _export_agreement(series: MetricSeries, counts: Counts, route: Route) -> None:
    recent = recent_agreement([counts.watched(route)], counts.clock(), counts.promised)
    if total := counts.agreement(route.num_blocks):
        for name, agreement in (
            ("isobatch_disagreement", total),
            ("isobatch_disagreement_lately", recent.agreement or NOTHING_KNOWN),
        ):
            for bound, share in (("low", agreement.high), ("mean", agreement.share), ("high", agreement.low)):
                series.set(name, 1 - share, bound=bound)
    for state in get_args(PromiseState) if recent.state else ():
        series.set("isobatch_promise", float(state == recent.state), state=state)
