"""Claim: under any load, a server answers as many inputs in time as it sustains, and refuses the others at once.

The demo computes on this machine's cores, which the load generator shares. Open loops have the SLO as each request's
deadline: first the best rate is searched, then floods have 1.5, 3 and 10 times that rate, and half of it follows. An
answer is good if the generator reads it within the SLO, else late. The generator may read it late because it waits for
a core: `late_by_server` counts answers that were not there when the generator looked, an SLO after it had sent the
request. Refusals are timed both ways, too. Clients wait beyond their deadlines. A request is lost if its connection
ends without an answer, or if no answer comes for seconds. If the system allows it, the generator has priority for a
core, as a client on another machine would have. `goodput_beside_share_*` compares with runs at the best rate, one
before each flood, while the rest of the flood goes to a decoy, so that the cores' time for generator and HAProxy does
not count.
"""

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from experiments.overload.askers import Asker, grpc_asker, http_asker
from experiments.overload.decoy import decoy
from experiments.serve import servers
from experiments.shared.machine import free_port
from isobatch.cluster.load.generator import Floats, LoadRecord, run_noting_polls
from isobatch.cluster.load.workloads import arrivals
from isobatch.deployments.demo.digits import demo_inputs

SLO_MS = 500.0
FLOODS = {"1_5x": 1.5, "3x": 3.0, "10x": 10.0}
STARTS_PER_S = {(1, "http"): 400.0, (64, "http"): 20.0, (1, "grpc"): 200.0, (64, "grpc"): 20.0}
STEP = 1.5  # the factor between tried rates
BODIES = 32
EDGE_S = 2.0  # seconds at the beginning of a run that do not count, since the run before still empties
PAIRS = 2  # runs beside the decoy, each followed by the flood
SEARCHED = 0.5  # the time of runs that search the best rate, over that of other runs
AFTER_S = 3.0
WARMS_UP_S, KEPT_UP = 2.0, 0.9
COUNTED = ("late", "late_by_server", "lost")
REFUSALS = ("refusal_p99_ms", "refusal_p99_ms_by_server")
console = Console(stderr=True)


@dataclass(frozen=True)
class Target:
    """The two goals of one kind of requests: the server, and the decoy, which refuses every request."""

    server: Asker
    decoy: Asker


@dataclass(frozen=True)
class Flooded:
    """The outcome of one run.

    `late` and `refusal_p99_ms` count from the client's view, `*_by_server` without the client's own delay.
    """

    good_per_s: float
    late: int
    late_by_server: int
    lost: int
    refusal_p99_ms: float
    refusal_p99_ms_by_server: float


def measure(seconds: int = 10, fronts: int = 2, only: str = "") -> dict[str, float]:
    figures: dict[str, float] = {}
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    with decoy() as refusing:
        for count in range(1, fronts + 1):
            with _demo(count) as (url, grpc_port):
                for inputs, protocol in STARTS_PER_S:
                    if (count > 1 and protocol == "grpc") or (only and only != f"{inputs}_{protocol}"):
                        continue
                    name = f"{inputs}_{protocol}" + ("" if count == 1 else f"_{count}fronts")
                    target = _target(url, grpc_port, refusing, inputs, protocol)
                    start_per_s = STARTS_PER_S[inputs, protocol]
                    figures |= _flooded(name, target, start_per_s, float(seconds))
    return figures | _overall(figures)


def _overall(figures: Mapping[str, float]) -> dict[str, float]:
    """The worst figure over all kinds of requests, and the sums of late and lost requests."""

    def each(figure: str) -> list[float]:
        return [value for name, value in figures.items() if re.fullmatch(rf"{figure}_\d+_.*", name)]

    worst = {figure: max(each(figure)) for figure in ("back_after_s", *REFUSALS)}
    return worst | {figure: sum(each(figure)) for figure in COUNTED}


@contextmanager
def _demo(fronts: int) -> Iterator[tuple[str, int]]:
    """The demo without a controller, which might change the plan meanwhile."""
    port = free_port()
    with servers.demo({"name": "demo", "front_replicas": fronts}, grpc_port=port) as base:
        yield f"{base}/predict", port


def _target(url: str, grpc_port: int, refusing: tuple[int, int], inputs: int, protocol: str) -> Target:
    digits = demo_inputs(BODIES * inputs).reshape(BODIES, inputs, 8, 8)
    if protocol == "http":
        return Target(
            http_asker(url, list(digits), SLO_MS),
            http_asker(f"http://127.0.0.1:{refusing[0]}/predict", list(digits), SLO_MS),
        )
    return Target(
        grpc_asker(f"127.0.0.1:{grpc_port}", list(digits), SLO_MS),
        grpc_asker(f"127.0.0.1:{refusing[1]}", list(digits), SLO_MS),
    )


def _flooded(name: str, target: Target, start_per_s: float, seconds: float) -> dict[str, float]:
    best_per_s, best_rate = _best(name, target, start_per_s, EDGE_S + SEARCHED * seconds)
    figures = {f"best_per_s_{name}": best_per_s}
    floods: list[Flooded] = []
    for flood, times in FLOODS.items():
        offered_per_s = times * best_per_s
        beside, seen = list[Flooded](), list[Flooded]()
        for _ in range(PAIRS):
            beside.append(other := _beside(target, best_rate, offered_per_s - best_rate, seconds))
            seen.append(one := _run(target.server, _poisson(offered_per_s, seconds)))
            console.print(
                f"{name} {flood}: good {one.good_per_s:.1f}/s of {best_per_s:.1f}/s, {other.good_per_s:.1f}/s beside "
                f"the decoy; late {one.late}, surely by it {one.late_by_server}, lost {one.lost}, "
                f"refusals p99 {one.refusal_p99_ms:.0f} ms, at least {one.refusal_p99_ms_by_server:.0f} ms"
            )
        floods += seen
        good_per_s, beside_per_s = (fmean(each.good_per_s for each in runs) for runs in (seen, beside))
        figures |= {
            f"goodput_share_{flood}_{name}": good_per_s / best_per_s,
            f"goodput_beside_share_{flood}_{name}": good_per_s / beside_per_s if beside_per_s else 0.0,
        }
    figures[f"back_after_s_{name}"] = _back_after_s(target.server, FLOODS["10x"] * best_per_s, best_per_s / 2)
    figures |= {f"{figure}_{name}": sum(getattr(each, figure) for each in floods) for figure in COUNTED}
    figures |= {f"{figure}_{name}": max(getattr(each, figure) for each in floods) for figure in REFUSALS}
    return figures


def _best(name: str, target: Target, start_per_s: float, seconds: float) -> tuple[float, float]:
    """The best goodput and its rate; the rate grows, or falls, while goodput grows."""
    _run(target.server, _poisson(start_per_s / 2, WARMS_UP_S))

    def good_per_s(rate: float) -> float:
        seen = _run(target.server, _poisson(rate, seconds))
        late = f"late {seen.late}, surely by it {seen.late_by_server}"
        console.print(f"{name} at {rate:.0f}/s: good {seen.good_per_s:.1f}/s, {late}")
        return seen.good_per_s

    return peak(good_per_s, start_per_s)


def peak(good_per_s: Callable[[float], float], rate: float) -> tuple[float, float]:
    """The best goodput of any rate, and the rate. The search ends when a lower rate brings less, or when two higher
    rates in a row exceed the server, since one may fail by chance.

    >>> peak(lambda rate: min(rate, 500.0), 400.0), peak(lambda rate: min(rate, 100.0), 400.0)
    ((500.0, 600.0), (100.0, 400.0))
    """
    best_per_s, best_rate = good_per_s(rate), rate
    step = STEP if best_per_s >= KEPT_UP * rate else 1 / STEP
    missed = 0
    while missed < (2 if step > 1 else 1):
        rate *= step
        found_per_s = good_per_s(rate)
        if found_per_s > best_per_s:
            best_per_s, best_rate = found_per_s, rate
        elif step < 1:
            return best_per_s, best_rate
        missed = missed + 1 if (found_per_s < KEPT_UP * rate) == (step > 1) else 0
    return best_per_s, best_rate


def _beside(target: Target, rate: float, flood_per_s: float, seconds: float) -> Flooded:
    """The goodput at the best rate, while the rest of the flood goes to the decoy."""

    async def both() -> tuple[LoadRecord, LoadRecord]:
        flood = asyncio.create_task(target.decoy.at(_poisson(max(flood_per_s, 1.0), seconds, seed=2)))
        record = await target.server.at(_poisson(rate, seconds))
        return record, await flood

    return _seen(run_noting_polls(both())[0])


def _back_after_s(server: Asker, flood_per_s: float, then_per_s: float) -> float:
    """Seconds from the end of a flood until the last request without a good answer."""
    flood_s = 2.0
    calm = flood_s + _poisson(then_per_s, AFTER_S)
    record = run_noting_polls(server.at(np.concatenate([_poisson(flood_per_s, flood_s), calm])))
    bad = record.due_s[(record.due_s >= flood_s) & ~_good(record)]
    return float(bad.max() - flood_s) if len(bad) else 0.0


def _run(server: Asker, due_s: Floats) -> Flooded:
    return _seen(run_noting_polls(server.at(due_s)))


def _poisson(rate_per_s: float, seconds: float, seed: int = 1) -> Floats:
    return arrivals("poisson", rate_per_s, seconds, seed)


def _good(record: LoadRecord) -> Any:
    return (record.status == 200) & (record.ended_s - record.due_s <= SLO_MS / 1e3)


def _seen(record: LoadRecord) -> Flooded:
    end_s = float(record.due_s.max())
    counted = (record.ended_s >= EDGE_S) & (record.ended_s <= end_s)
    least_s, read_s = record.absent_s - record.sent_s, record.ended_s - record.sent_s
    answered, slo_s = record.status == 200, SLO_MS / 1e3
    refused = np.isin(record.status, (429, 503))
    known = np.isin(record.status, (200, 429, 503, 504))
    return Flooded(
        good_per_s=float((_good(record) & counted).sum()) / (end_s - EDGE_S),
        late=int((answered & (read_s > slo_s)).sum()),
        late_by_server=int((answered & (least_s > slo_s)).sum()),
        lost=int((~known).sum()),
        refusal_p99_ms=_p99_ms(read_s[refused]),
        refusal_p99_ms_by_server=_p99_ms(least_s[refused]),
    )


def _p99_ms(times_s: Floats) -> float:
    return float(1e3 * np.percentile(times_s, 99)) if len(times_s) else 0.0
