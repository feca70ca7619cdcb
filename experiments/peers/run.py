"""Claim: with real compute, isobatch answers more inputs in time than other servers of the same network.

Plain Ray Serve with `@serve.batch`, LitServe and BentoML serve the network in full, and with the same exits inside a
call; the first two on one worker and on two. isobatch serves it in one process, in two processes without a plan, and on
two replicas by a plan; each with exits, and in full as a control. All use ONNX Runtime with one thread a worker and
batches of at most 32, on the same cores as the load. The best number of clients counts for each, and apart from that
the best rate of random arrivals: clients that wait for their answers come back together, which fills the batches of a
server that answers a batch at once, and a refused client asks again at once. One server runs at a time, since
LitServe's idle workers poll; every other round has the opposite order. The output names peers that are not installed,
at the beginning and at the end.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from experiments.peers.network import BATCH, ONNX, READY
from experiments.serve.fleet import serve_file_of
from experiments.serve.servers import isobatch, running
from experiments.shared import minilm
from experiments.shared.commands import run_isobatch
from experiments.shared.machine import free_port
from experiments.shared.real_network import SURVIVAL, checkpoint, texts
from isobatch.cluster.load.generator import LoadGenerator
from isobatch.cluster.load.report import Summary, summary
from isobatch.cluster.load.workloads import arrivals
from isobatch.profiles.errors import UserError

SLO_MS = 200.0
CLIENTS = (16, 32, 64, 512)
RATES = 7  # of random arrivals, at most
FIRST = 0.5  # the first rate, as a share of the best goodput with clients
STEP = 1.25  # the factor from one rate to the next
LAST = 0.8  # a share of the best goodput: a rate with less is the last one
PATIENCE_S = 1.0  # after the last arrival
ARRIVALS = "arrivals_"  # before the names of figures with random arrivals
INPUTS = 256  # that are sent, and as many others for the profile
LONE, LONE_PER_S = 50, 10.0  # lone requests, and their rate
WARMS_UP = 16  # clients
MINILM_BLOCKS, MINILM_WIDTH = 6, 384
console = Console(stderr=True)


@dataclass(frozen=True)
class Peer:
    """A way to serve a network.

    `needs`: the module that must be installed. `listed`: a request holds a list. `exits`: as in PeerNetwork. `whole`:
    of ours, each worker computes the whole network, without a plan. `batch`: the largest; BentoML ignores it.
    """

    name: str
    needs: str
    listed: bool = False
    workers: int = 1
    exits: str = ""
    headers: str = ""
    whole: bool = False
    batch: int = BATCH

    @property
    def ours(self) -> bool:
        return self.name.startswith("isobatch")


FULL = (
    Peer("ray", "ray"),
    Peer("ray_2", "ray", workers=2),
    Peer("litserve", "litserve"),
    Peer("litserve_2", "litserve", workers=2),
    Peer("bentoml", "bentoml", listed=True),
)
WITH_EXITS = tuple(replace(peer, name=f"{peer.name}_exits", exits=ONNX) for peer in FULL)
PEERS = (*FULL, *WITH_EXITS)
OURS = (
    Peer("isobatch", "ray"),
    Peer("isobatch_2_whole", "ray", workers=2, whole=True),
    Peer("isobatch_2", "ray", workers=2),
)
OURS_FULL = tuple(replace(own, name=f"{own.name}_full", headers="X-Full: 1\r\n") for own in OURS)
PROFILED_S = 30  # seconds of timing, by which the plan for two replicas is made


@dataclass(frozen=True)
class PeerWorkload:
    """A network, texts for it, and other texts for its profile."""

    name: str
    folder: str
    inputs: Sequence[str]
    recorded: Sequence[str]

    def bodies(self, listed: bool) -> list[bytes]:
        return [json.dumps({"inputs": [value] if listed else value}).encode() for value in self.inputs]


def workloads() -> Iterator[PeerWorkload]:
    """A BERT of MiniLM's shape with random weights, and MiniLM on SST-2 if its weights are at hand."""
    random = str(checkpoint(SURVIVAL[:MINILM_BLOCKS], MINILM_WIDTH))
    yield PeerWorkload("random", random, texts(INPUTS), texts(INPUTS, seed=1))
    try:
        sentences = minilm.sentences("test", 2 * INPUTS)[0]
        yield PeerWorkload("minilm", str(minilm.prepared()), sentences[:INPUTS], sentences[INPUTS:])
    except UserError as error:
        console.print(f"[bold red]minilm IS NOT MEASURED[/] ({error}): it needs {minilm.NEEDS}", soft_wrap=True)


@dataclass(frozen=True)
class PeerRound:
    """The figures of one server in one round."""

    lone_ms: float
    goodput_per_s: Mapping[str, float]  # at best, with clients ("") and with random arrivals


def measure(rounds: int = 2, seconds: int = 4, only: str = "") -> dict[str, float]:
    """`rounds` of `seconds` for every number of clients; `only` one workload (random, minilm)."""
    there = [peer for peer in PEERS if has(peer)]
    missing = [peer for peer in PEERS if peer not in there]
    _tell_missing(missing)
    figures: dict[str, float] = {f"missing_{peer.name}": float(peer in missing) for peer in PEERS}
    with TemporaryDirectory() as folder:
        for workload in workloads():
            if only in ("", workload.name):
                figures |= _compared(workload, [*OURS, *OURS_FULL, *there], Path(folder), rounds, float(seconds))
    _tell_missing(missing)
    lone = [value for name, value in figures.items() if name.startswith("lone_over_leanest_")]
    return figures | ({"lone_request_over_leanest": max(lone)} if lone else {})


def python(peer: Peer) -> str:
    """The Python of a peer: this one, or the one in ISOBATCH_PEERS for a peer that is not our dependency."""
    return sys.executable if peer.needs == OURS[0].needs else os.environ.get("ISOBATCH_PEERS", sys.executable)


def has(peer: Peer) -> bool:
    return (
        subprocess.run([python(peer), "-c", f"import {peer.needs}"], capture_output=True, check=False).returncode == 0
    )


def _tell_missing(missing: Sequence[Peer]) -> None:
    for peer in missing:
        console.print(
            f"[bold red]{peer.name} IS NOT MEASURED[/]: {python(peer)} has no {peer.needs}: "
            "pip install 'isobatch\\[peers]' there, or name another Python in ISOBATCH_PEERS"
        )


def _compared(
    workload: PeerWorkload, systems: Sequence[Peer], folder: Path, rounds: int, seconds: float
) -> dict[str, float]:
    """Every other round has the opposite order, so that a machine that slows down favours no server."""
    result: defaultdict[str, list[PeerRound]] = defaultdict(list)
    _plan(workload, folder)
    for number in range(rounds):
        for system in systems if number % 2 == 0 else systems[::-1]:
            seen = _seen(workload, system, folder, seconds)
            result[system.name].append(seen)
            console.print(
                f"{workload.name}, round {number + 1} of {rounds}, {system.name}: in time "
                f"{seen.goodput_per_s['']:,.0f}/s with clients, {seen.goodput_per_s[ARRIVALS]:,.0f}/s with arrivals; "
                f"lone {seen.lone_ms:.1f} ms"
            )
    return _figures(workload.name, result)


def _figures(workload: str, result: Mapping[str, Sequence[PeerRound]]) -> dict[str, float]:
    figures = dict[str, float]()
    lone_ms = {name: median(seen.lone_ms for seen in rounds) for name, rounds in result.items()}
    figures |= {f"lone_ms_{name}_{workload}": value for name, value in lone_ms.items()}
    for load in ("", ARRIVALS):
        goodput = {name: median(seen.goodput_per_s[load] for seen in rounds) for name, rounds in result.items()}
        figures |= {f"{load}goodput_per_s_{name}_{workload}": value for name, value in goodput.items()}
        figures |= {f"{load}{name}_{workload}": ratio for name, ratio in over_best(goodput).items()}
    others = [lone_ms[peer.name] for peer in PEERS if peer.name in lone_ms]
    if others:
        figures[f"lone_over_leanest_{workload}"] = lone_ms[OURS[0].name] / min(others)
    return figures


def over_best(goodput: Mapping[str, float]) -> dict[str, float]:
    """Our best goodput over that of other servers: with exits, in full, and with exits over in full.

    >>> over_best({"isobatch": 45.0, "isobatch_2": 60.0, "ray_exits": 40.0, "ray": 20.0, "ray_2": 30.0})
    {'exits_over_best_exits': 1.5, 'exits_over_best_full': 2.0}
    """
    best = {
        name: max(rates)
        for name, group in {"ours": OURS, "ours_full": OURS_FULL, "exits": WITH_EXITS, "full": FULL}.items()
        if (rates := [goodput[peer.name] for peer in group if peer.name in goodput])
    }
    ratios = {
        "exits_over_best_exits": ("ours", "exits"),
        "full_over_best_full": ("ours_full", "full"),
        "exits_over_best_full": ("ours", "full"),
        "exits_over_own_full": ("ours", "ours_full"),
    }
    return {name: best[above] / best[below] for name, (above, below) in ratios.items() if {above, below} <= best.keys()}


def _plan(workload: PeerWorkload, folder: Path) -> None:
    """Write the profile of this machine, with the exits of other inputs, and the plan for two replicas."""
    data, profile = folder / "inputs.jsonl", folder / "profile.json"
    data.write_text("".join(json.dumps({"text": each}) + "\n" for each in workload.recorded))
    profile.unlink(missing_ok=True)
    run_isobatch(
        "profile", workload.folder, "--data", data, "--out", profile, "--backend", "onnx", "--dtype", "float32",
        "--kind", "cpu", "--largest", BATCH, "--timing-s", PROFILED_S,
    )  # fmt: skip
    limits = ("--devices", "cpu=2", "--slo-ms", SLO_MS, "--backend", "onnx", "--max-batch", BATCH)
    run_isobatch("plan", "--profile", profile, "--out", folder / "plan.json", *limits)


def _seen(workload: PeerWorkload, system: Peer, folder: Path, seconds: float) -> PeerRound:
    own = isobatch(_served(workload, system, folder)) if system.ours else running_peer(system, workload.folder)
    with own as url:
        load = partial(LoadGenerator, url, workload.bodies(system.listed), headers=system.headers)
        _clients(load, WARMS_UP, min(seconds, 2.0))
        lone = asyncio.run(load().at(arrivals("uniform", LONE_PER_S, LONE / LONE_PER_S, seed=1)))
        by_clients = max(_clients(load, count, seconds).goodput_per_s for count in CLIENTS)
        goodput = {"": by_clients, ARRIVALS: _best_by_arrivals(load, FIRST * by_clients, seconds)}
        return PeerRound(summary(lone, SLO_MS).latency_ms["p50"], goodput)


def _served(workload: PeerWorkload, system: Peer, folder: Path) -> Path:
    fields = {"model": workload.folder, "backend": "onnx", "dtype": "float32", "slo_ms": SLO_MS}
    if system.workers == 1 or system.whole:
        return serve_file_of(folder, {**fields, "max_batch": BATCH, "replicas": system.workers})
    files = {name: str(folder / f"{name}.json") for name in ("plan", "profile")}
    return serve_file_of(folder, {**fields, **files, "cpus_per_replica": 0})


@contextmanager
def running_peer(peer: Peer, folder: str) -> Iterator[str]:
    port = free_port()
    options = [folder, str(port), str(peer.workers), peer.exits, str(peer.batch)]
    with running([python(peer), "-m", f"experiments.peers.{peer.needs}_peer", *options], READY):
        yield f"http://127.0.0.1:{port}/predict"


def _best_by_arrivals(load: Callable[..., LoadGenerator], per_s: float, seconds: float) -> float:
    """The best goodput at rising rates of random arrivals."""
    best_per_s = 0.0
    for seed in range(RATES if per_s > 0 else 0):
        record = asyncio.run(load().at(arrivals("poisson", per_s * STEP**seed, seconds, seed), PATIENCE_S))
        goodput_per_s = summary(record, SLO_MS).goodput_per_s
        best_per_s = max(best_per_s, goodput_per_s)
        if goodput_per_s < LAST * best_per_s:
            break
    return best_per_s


def _clients(load: Callable[..., LoadGenerator], count: int, seconds: float) -> Summary:
    return summary(asyncio.run(load(connections=count).by_clients(count, seconds)), SLO_MS)
