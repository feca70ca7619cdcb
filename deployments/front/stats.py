"""The content of /stats, over all fronts of an application together."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from deployments.dispatch.route import Route, Stage
from deployments.front.counts import BUSY_S, OUTCOMES, Counts, by_level, survival, together
from deployments.front.driver import Driver
from deployments.front.messages import FrontState, Usage
from profiles.agreement import agreement_text, recent_agreement

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def state_of(driver: Driver) -> FrontState:
    dispatcher = driver.dispatcher
    inside, waiting, replicas = dispatcher.inside, dispatcher.waiting(), dispatcher.replicas()
    counts = driver.counted()
    return FrontState(counts, dispatcher.route, inside, waiting, replicas, usage(), counts.busy_s())


def stats_of(fronts: Sequence[FrontState], promised: float | None = None) -> dict[str, Any]:
    """Sum the fronts' states; the first is the front that was asked. All fronts change plans within milliseconds.

    `promised`: the agreement that audits are held against.
    """
    counts, route = together([each.counts for each in fronts]), fronts[0].route
    splits = [_split(stage, counts, fronts) for stage in route.all_stages]
    audits, in_words = _audits(counts, fronts, promised)
    found = {
        "agreement": in_words,
        "requests": {name: counts.outcomes[name] for name in OUTCOMES},
        "latency_ms": counts.latency_ms(),
        "inside": sum(each.inside for each in fronts),
        "waiting": sum(sum(each.waiting.values()) for each in fronts),
        "splits": splits,
        "exits": {str(block): counts.exits[block] for block in range(route.num_blocks)},
        "survival": survival(counts.exits, route.num_blocks),
        "observations": counts.observations,
        "audits": audits,
        "survivor_bytes": dict(counts.survivor_bytes),
        "replicas": _busy(fronts),
        "fronts": [asdict(each.usage) for each in fronts],
    }
    if route.edges:
        found["levels"] = _levels(counts, route)
    return found if route.length is None else found | {"tokens": _tokens(counts, route)}


def _busy(fronts: Sequence[FrontState]) -> list[dict[str, Any]]:
    """The share of the last seconds in which each replica has computed, for all fronts together."""
    found: dict[str, tuple[str, float]] = {}
    for replica, (kind, spent_s) in (pair for each in fronts for pair in each.busy_s.items()):
        found[replica] = kind, found.get(replica, (kind, 0.0))[1] + spent_s
    return [
        {"replica": replica, "kind": kind, "busy": round(min(1.0, spent_s / BUSY_S), 3)}
        for replica, (kind, spent_s) in sorted(found.items())
    ]


def _levels(counts: Counts, route: Route) -> list[dict[str, Any]]:
    """Of each level of a cascade: its blocks, what it answered, and for whom there was no time to go further."""
    answered, degraded = (by_level(counted, route.edges) for counted in (counts.exits, counts.degraded))
    total = answered.total() + degraded.total()
    return [
        {
            "blocks": [start, stop],
            "answered": answered[level],
            "degraded": degraded[level],
            "share": round((answered[level] + degraded[level]) / total, 4) if total else None,
        }
        for level, (start, stop) in enumerate(pairwise((0, *route.edges, route.num_blocks)))
    ]


def _tokens(counts: Counts, route: Route) -> dict[str, Any]:
    """The same counts in tokens, where the plan counts them; `length`: of the inputs that the plan is made of."""
    return {
        "length": route.length,
        "arrived": counts.arrived_weight,
        "per_input": round(counts.arrived_weight / counts.arrivals, 1) if counts.arrivals else None,
        "answered": counts.exit_weights.total(),
        "survival": survival(counts.exit_weights, route.num_blocks),
    }


def _audits(counts: Counts, fronts: Sequence[FrontState], promised: float | None) -> tuple[dict[str, Any], str]:
    """How many ended, how many disagreed, and what that tells of the promise; the same in words."""
    watches = [each.counts.watched(each.route) for each in fronts]
    total, seen = (
        counts.agreement(fronts[0].route.num_blocks),
        recent_agreement(watches, fronts[0].counts.now_s, promised),
    )
    told = {
        "ended": counts.audited.total(),
        "disagreed": counts.missed.total(),
        "agreement": total and asdict(total),
        "lately": seen.agreement and asdict(seen.agreement),
        "promised": promised,
        "verdict": seen.state,
    }
    return told, agreement_text(seen, promised, total)


def _split(stage: Stage, counts: Counts, fronts: Sequence[FrontState]) -> dict[str, Any]:
    where = stage.group, stage.start
    return {
        "blocks": [stage.start, stage.stop],
        "batch": stage.batch,
        "room": stage.room,
        "ramps": sorted(stage.ramps),
        "group": stage.group,
        "replicas": fronts[0].replicas.get(stage.group, 0),
        "launches": counts.launches[where].count,
        "fill": round(counts.launches[where].fill, 3),
        "waiting": sum(each.waiting.get(where, 0) for each in fronts),
    }


def usage() -> Usage:
    """
    >>> usage().cpu_s > 0
    True
    """
    pages = 0
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Usage(round(time.process_time(), 2), round(pages * _PAGE_BYTES / 2**20, 1))
