"""Claim: what a plan promises happens with real compute, and constant batches are worth what the planner says.

BERT-base in random weights, whose inputs leave by chance at a given survival, on Ray Serve over HTTP, one replica of
one thread. A round profiles the network, plans, and serves: the machine's speed changes within minutes, so that a
promise counts for its own round only. The controls are early exit in one split and no exits, in turns, each with its
best batch. Other servers are measured apart from them, minutes later. All is on one machine's cores, the generator too.
The figures of a round are kept when it ends, so that an interrupted run goes on with the next.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from experiments.forecast.traces import elasticbert_survival
from experiments.real import idle, launches, peers
from experiments.real.served import CONSTANT, PlannedSystem, RealCase, ServedNetwork, systems
from experiments.shared.kept_parts import kept_part
from experiments.shared.live import Live, bare
from experiments.shared.machine import end_as_by_ctrl_c
from experiments.shared.real_network import DTYPE, KIND, SURVIVAL, WIDTH, profiled
from isobatch.optimizer import Plan
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile

SIX_LAYERS = 6
PATIENCE = 2  # answers in a row that must agree, in ElasticBERT's recorded exits
# Other SLOs, two replicas, half the network, and half the network with the survival of recorded exits.
OTHERS: Mapping[str, Callable[[RealCase], RealCase]] = {
    "slo200": lambda case: replace(case, slo_ms=200),
    "slo500": lambda case: replace(case, slo_ms=500),
    "twice": lambda case: replace(case, replicas=2),
    "half": lambda case: replace(case, survival=SURVIVAL[:SIX_LAYERS]),
    "recorded": lambda case: replace(case, survival=elasticbert_survival(SIX_LAYERS, PATIENCE)),
}
PARTS = ("launches", "live", *OTHERS, "idle", "peers")
PRECISIONS = tuple(dict.fromkeys((DTYPE, "float32", "int8")))
CHAINS, LAYERS, TOKENS = 40, 144, 32 * 13  # of plain layers: as much arithmetic as BERT-base's; tokens of a batch
console = Console(stderr=True, width=140)


@dataclass(frozen=True)
class RealPart:
    """A part of the benchmark that is measured and kept by itself. The names of its figures end with `suffix`."""

    name: str
    suffix: str
    figures: Callable[[], dict[str, float]]


def measure(
    parts: str = ",".join(PARTS), dtypes: str = ",".join(PRECISIONS), slo_ms: int = 1000, rounds: int = 3,
    seconds: int = 16, again: int = 0,
) -> dict[str, float]:  # fmt: skip
    """`rounds` of a search for what each system sustains, in runs of at least `seconds`, for each precision.

    Only the first precision takes all rounds; the others, and all parts but `launches` and `live`, take a third.
    `again=1`: measure also what the same code has measured on this machine before.
    """
    if unknown := set(parts.split(",")) - set(PARTS):
        raise UserError(f"parts={','.join(sorted(unknown))}: there are {','.join(PARTS)}")
    seen = defaultdict[str, list[float]](list)
    for part in _parts(parts.split(","), RealCase("", slo_ms), dtypes.split(","), rounds, seconds):
        measure_part, options = partial(_in_own_process, part), f"{slo_ms} {seconds}"
        for name, value in kept_part("real", part.name, options, bool(again), measure_part, console).items():
            seen[f"{name}{part.suffix}"].append(value)
    figures = {name: median(values) for name, values in seen.items()}
    return figures | over_peers(figures)


def _parts(wanted: list[str], case: RealCase, dtypes: list[str], rounds: int, seconds: int) -> Iterator[RealPart]:
    first, few = replace(case, dtype=dtypes[0]), max(1, rounds // 3)
    for dtype in dtypes:
        if "launches" in wanted and dtype != "int8":
            yield RealPart(f"launches {dtype}", f"_{dtype}", partial(launches.figures, dtype))
        if "live" in wanted:
            yield from _rounds("live", replace(case, dtype=dtype), rounds if dtype == first.dtype else few, seconds)
    for name in OTHERS:
        if name in wanted and (other := _other(name, first)):
            yield from _rounds(name, other, few, seconds)
    if "idle" in wanted:
        yield RealPart("idle", "", partial(idle.figures, seconds))
    for number in range(few if "peers" in wanted else 0):
        measured = partial(peers.figures, first, number, seconds)
        yield RealPart(f"peers {first.dtype}, round {number + 1}", f"_{first.dtype}", measured)


def _other(name: str, case: RealCase) -> RealCase | None:
    """None: it needs recorded exits, which are no part of the project and not at hand."""
    try:
        return OTHERS[name](case)
    except UserError as error:
        console.print(f"[bold red]{name} IS NOT MEASURED[/]: {error}", soft_wrap=True)
        return None


def _rounds(name: str, case: RealCase, rounds: int, seconds: float) -> Iterator[RealPart]:
    suffix = f"_{case.dtype}" if name == "live" else f"_{name}_{case.dtype}"
    for number in range(rounds):
        yield RealPart(f"{name} {case.dtype}, round {number + 1}", suffix, partial(live, case, number, seconds))


def _in_own_process(part: RealPart) -> dict[str, float]:
    """Each part has a process of its own, since a client of Ray ends its process a minute after that Ray has ended."""
    with get_context("spawn").Pool(1, end_as_by_ctrl_c) as fresh:
        figures = fresh.apply(part.figures)
        fresh.close()
        fresh.join()
    return figures


def over_peers(figures: Mapping[str, float]) -> dict[str, float]:
    """What the chosen plan sustains, over each peer, for the precisions in which both were measured.

    >>> over_peers({"live_per_s_constant_int8": 60.0, "live_per_s_ray_int8": 40.0})
    {'constant_over_ray_int8': 1.5}
    """
    return {
        f"constant_over_{peer.name}_{dtype}": figures[f"live_per_s_{CONSTANT}_{dtype}"] / rate_per_s
        for peer in peers.SHARED
        for dtype in PRECISIONS
        if (rate_per_s := figures.get(f"live_per_s_{peer.name}_{dtype}"))
        and f"live_per_s_{CONSTANT}_{dtype}" in figures
    }


def live(case: RealCase, number: int, seconds: float) -> dict[str, float]:
    """The figures of one round: the systems take turns, in odd rounds the other way round."""
    with TemporaryDirectory() as folder:
        before_s = chain_s(case)
        known = profiled(case.checkpoint, Path(folder), dtype=case.dtype, size=case.size)
        profiled_s = (before_s + chain_s(case)) / 2
        with bare() as here:
            return asyncio.run(_measured(here, Path(folder), known, profiled_s, case, number, seconds))


def chain_s(case: RealCase) -> float:
    """The time of a chain of plain layers on one thread: how fast this machine is now, beside its neighbours.

    Only of a CPU: a GPU has none. In int8 the chain computes as fast as this processor can.
    """
    if case.size.device != KIND:
        return 1.0
    torch.set_num_threads(1)
    dtype = getattr(torch, DTYPE if case.dtype == "int8" else case.dtype)
    layers = [torch.randn(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)]  # each has memory of its own
    hidden, times = torch.randn(TOKENS, WIDTH, dtype=dtype), list[float]()
    with torch.inference_mode():
        for _ in range(CHAINS):
            began_s, each = time.perf_counter(), hidden
            for layer in layers:
                each = torch.nn.functional.linear(each, layer)
            times.append(time.perf_counter() - began_s)
    return median(times)


async def _measured(
    here: Live, folder: Path, known: Profile, profiled_s: float, case: RealCase, number: int, seconds: float
) -> dict[str, float]:
    """All systems once, in the order of this round. `profiled_s`: a chain of plain layers beside the profile."""
    planned = systems(known, case.slo_ms / 1e3, case.replicas, case.size.largest)
    served = await ServedNetwork.deployed(here, folder, known, planned[0].plan, case)
    seen, nearly = dict[str, Seen](), dict[str, float]()
    for system in planned if number % 2 == 0 else planned[::-1]:
        await served.follow(system)
        before_s = chain_s(case)
        sustained_per_s = await served.sustained_per_s(system, seconds, seed=number)
        seen[system.name] = Seen(sustained_per_s, (before_s + chain_s(case)) / 2 / profiled_s)
        if system.name == CONSTANT:
            nearly = asdict(await served.nearly(system, seconds))
        console.print(f"{_splits(system.plan)} promises {system.promised_per_s:.1f}/s: {seen[system.name]}")
    return figures_of(planned, seen) | nearly


def _splits(plan: Plan) -> str:
    return ", ".join(f"{split.blocks_text} at {split.batch_size}" for split in plan.splits)


@dataclass(frozen=True)
class Seen:
    """What a system sustained, and how many times as long a chain of plain layers took then."""

    per_s: float
    slower: float


def figures_of(planned: list[PlannedSystem], seen: Mapping[str, Seen]) -> dict[str, float]:
    figures = dict[str, float]()
    for system in planned:
        name, own = system.name, seen[system.name]
        kept = own.per_s / system.promised_per_s
        figures |= {f"promised_per_s_{name}": system.promised_per_s, f"live_per_s_{name}": own.per_s}
        figures |= {f"live_over_promise_{name}": kept, f"live_over_promise_at_its_speed_{name}": kept * own.slower}
        figures[f"machine_slower_{name}"] = own.slower
    constant_per_s = seen[CONSTANT].per_s
    simple = {name: each.per_s for name, each in seen.items() if name != CONSTANT}
    figures |= {f"constant_over_{name}": constant_per_s / value for name, value in simple.items() if value}
    return figures | {"chosen_over_best_simple": constant_per_s / (max(simple.values()) or 1e-9)}
