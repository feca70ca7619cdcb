"""Claim: whatever is asked of it, a server goes on answering what it can, in time, and tells the others at once.

The demo on this machine's cores with real compute, which the load generator shares. Open loop, every request with the
SLO as its deadline: first what can be done at best, then 1.5, 3 and 10 times that, then half of it. An answer is good
within the SLO; it is late if the server, not the generator, took longer (over gRPC the client itself ends a call at its
deadline). `goodput_beside_share_*` compares with what is done at the best rate while the rest of the flood goes to a
decoy: what the generator and HAProxy take of the cores by themselves counts against neither.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console

from cluster.load.generator import Floats, LoadRecord
from cluster.load.workloads import arrivals
from cluster.serving.local import ROOT, free_port
from deployments.demo.digits import demo_inputs
from experiments.overload.askers import Asker, GrpcAsker, HttpAsker
from experiments.overload.decoy import decoy
from experiments.serve import measures, servers

SLO_MS = 500.0
FLOODS = {"1_5x": 1.5, "3x": 3.0, "10x": 10.0}
STARTS_PER_S = {(1, "http"): 400.0, (64, "http"): 20.0, (1, "grpc"): 200.0, (64, "grpc"): 20.0}
STEP = 1.5  # from one rate that is tried to the next
BODIES = 32
EDGE_S = 1.0  # at both ends of a run, which do not count: it starts, and it empties
AFTER_S = 3.0
console = Console(stderr=True)


@dataclass(frozen=True)
class Target:
    """Where one kind of requests goes: to the server, or to what refuses everything."""

    server: Asker
    decoy: Asker


@dataclass(frozen=True)
class Flooded:
    """What came of one run. `generator_cores`: its own processor time, by the second."""

    offered_per_s: float
    good_per_s: float
    late: int
    lost: int
    refusal_p99_ms: float
    generator_cores: float


def measure(seconds: int = 4, fronts: int = 2, only: str = "") -> dict[str, float]:
    figures: dict[str, float] = {}
    with decoy() as refusing:
        for count in range(1, fronts + 1):
            with _demo(count) as (url, grpc_port):
                for inputs, protocol in STARTS_PER_S:
                    if (count > 1 and protocol == "grpc") or (only and only != f"{inputs}_{protocol}"):
                        continue
                    name = f"{inputs}_{protocol}" + ("" if count == 1 else f"_{count}fronts")
                    target = _target(url, grpc_port, refusing, inputs, protocol)
                    start_per_s = STARTS_PER_S[inputs, protocol]
                    figures |= _flooded(name, url, target, start_per_s, float(seconds))
    for figure in ("refusal_p99_ms", "back_after_s", "rss_growth_mb"):
        figures[figure] = max(value for name, value in figures.items() if name.startswith(f"{figure}_"))
    for figure in ("late", "lost"):
        figures[figure] = sum(value for name, value in figures.items() if name.startswith(f"{figure}_"))
    return figures


@contextmanager
def _demo(fronts: int) -> Iterator[tuple[str, int]]:
    """The demo without a controller, which would change its plan meanwhile."""
    port = free_port(0)
    arguments = {
        "name": "demo",
        "plan": str(ROOT / "cluster/demo/plan.json"),
        "profile": str(ROOT / "cluster/demo/profile.json"),
        "cpus_per_replica": 0,
        "front_replicas": fronts,
    }
    application = {"name": "bench", "import_path": "deployments.app:build", "args": arguments}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "serve.yaml"
        file.write_text(json.dumps({"applications": [application]}))  # JSON is YAML
        with servers.isobatch(file, port) as url:
            yield url, port


def _target(url: str, grpc_port: int, refusing: tuple[int, int], inputs: int, protocol: str) -> Target:
    digits = demo_inputs(BODIES * inputs).reshape(BODIES, inputs, 8, 8)
    if protocol == "http":
        return Target(
            HttpAsker(url, list(digits), SLO_MS),
            HttpAsker(f"http://127.0.0.1:{refusing[0]}/predict", list(digits), SLO_MS),
        )
    return Target(
        GrpcAsker(f"127.0.0.1:{grpc_port}", "demo", list(digits), SLO_MS),
        GrpcAsker(f"127.0.0.1:{refusing[1]}", "demo", list(digits), SLO_MS),
    )


def _flooded(name: str, url: str, target: Target, start_per_s: float, seconds: float) -> dict[str, float]:
    best_per_s, best_rate = _best(name, target, start_per_s, seconds)
    figures = {f"best_per_s_{name}": best_per_s}
    before_mb = measures.fronts(url)["memory_mb"]
    late = lost = 0
    refusal_ms = 0.0
    for flood, times in FLOODS.items():
        offered_per_s = times * best_per_s
        seen = _run(target.server, _poisson(offered_per_s, seconds))
        beside = _beside(target, best_rate, offered_per_s - best_rate, seconds)
        figures |= {
            f"goodput_share_{flood}_{name}": seen.good_per_s / best_per_s,
            f"goodput_beside_share_{flood}_{name}": seen.good_per_s / beside.good_per_s if beside.good_per_s else 0.0,
            f"generator_cores_{flood}_{name}": seen.generator_cores,
            f"offered_share_{flood}_{name}": seen.offered_per_s / offered_per_s,
        }
        late, lost, refusal_ms = late + seen.late, lost + seen.lost, max(refusal_ms, seen.refusal_p99_ms)
        console.print(
            f"{name} {flood}: good {seen.good_per_s:.1f}/s of {best_per_s:.1f}/s, {beside.good_per_s:.1f}/s beside the "
            f"decoy; late {seen.late}, lost {seen.lost}, refusals p99 {seen.refusal_p99_ms:.0f} ms, "
            f"generator {seen.generator_cores:.2f} cores"
        )
    figures[f"back_after_s_{name}"] = _back_after_s(target.server, FLOODS["10x"] * best_per_s, best_per_s / 2)
    return figures | {
        f"late_{name}": late,
        f"lost_{name}": lost,
        f"refusal_p99_ms_{name}": refusal_ms,
        f"rss_growth_mb_{name}": measures.fronts(url)["memory_mb"] - before_mb,
    }


def _best(name: str, target: Target, start_per_s: float, seconds: float) -> tuple[float, float]:
    """The most that comes in time at any rate, and that rate: it grows while that brings more."""
    _run(target.server, _poisson(start_per_s / 2, 2.0))  # warms up
    rate, best_per_s, best_rate = start_per_s, 0.0, start_per_s
    while True:
        seen = _run(target.server, _poisson(rate, seconds))
        console.print(f"{name} at {rate:.0f}/s: good {seen.good_per_s:.1f}/s, late {seen.late}")
        if seen.good_per_s > best_per_s:
            best_per_s, best_rate = seen.good_per_s, rate
        if seen.good_per_s < 0.9 * rate:
            return best_per_s, best_rate
        rate *= STEP


def _beside(target: Target, rate: float, flood_per_s: float, seconds: float) -> Flooded:
    """What comes in time at the best rate, while the rest of the flood goes to the decoy."""

    async def both() -> tuple[LoadRecord, LoadRecord]:
        flood = asyncio.create_task(target.decoy.at(_poisson(max(flood_per_s, 1.0), seconds)))
        record = await target.server.at(_poisson(rate, seconds))
        return record, await flood

    began_s, cpu_s = time.perf_counter(), time.process_time()
    record, _ = asyncio.run(both())
    return _seen(record, (time.process_time() - cpu_s) / (time.perf_counter() - began_s))


def _back_after_s(server: Asker, flood_per_s: float, then_per_s: float) -> float:
    """How long after the end of a flood the last request came that had no good answer."""
    flood_s = 2.0
    calm = flood_s + _poisson(then_per_s, AFTER_S)
    record = asyncio.run(server.at(np.concatenate([_poisson(flood_per_s, flood_s), calm])))
    bad = record.due_s[(record.due_s >= flood_s) & ~_good(record)]
    return float(bad.max() - flood_s) if len(bad) else 0.0


def _run(server: Asker, due_s: Floats) -> Flooded:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    record = asyncio.run(server.at(due_s))
    return _seen(record, (time.process_time() - cpu_s) / (time.perf_counter() - began_s))


def _poisson(rate_per_s: float, seconds: float) -> Floats:
    return arrivals("poisson", rate_per_s, seconds, seed=1)


def _good(record: LoadRecord) -> Any:
    return (record.status == 200) & (record.ended_s - record.due_s <= SLO_MS / 1e3)


def _seen(record: LoadRecord, cores: float) -> Flooded:
    end_s = float(record.due_s.max())
    counted = (record.ended_s >= EDGE_S) & (record.ended_s <= end_s)
    server_s = record.ended_s - record.sent_s
    refused = np.isin(record.status, (429, 503))
    known = np.isin(record.status, (200, 429, 503, 504))
    return Flooded(
        offered_per_s=float(np.isfinite(record.sent_s).sum()) / max(end_s, float(np.nanmax(record.reached_s))),
        good_per_s=float((_good(record) & counted).sum()) / (end_s - EDGE_S),
        late=int(((record.status == 200) & (server_s > SLO_MS / 1e3)).sum()),
        lost=int((~known).sum()),
        refusal_p99_ms=float(1e3 * np.percentile(server_s[refused], 99)) if refused.any() else 0.0,
        generator_cores=cores,
    )
