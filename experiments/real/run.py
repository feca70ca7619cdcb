"""Claim: what a plan promises happens with real compute, and constant batches are worth what the planner says.

BERT-base in random weights, whose inputs leave by chance at a given survival, on Ray Serve over HTTP, one replica of
one thread. A round profiles the network, plans, and serves: the machine's speed changes within minutes, so that a
promise counts for its own round only. All is on one machine's cores, the generator too. The figures of a round are kept
when it ends, so that an interrupted run goes on with the next.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from experiments.forecast.traces import elasticbert_survival
from experiments.real import idle, launches, peers
from experiments.real.served import CONSTANT, Nearly, PlannedSystem, RealCase, ServedNetwork, core_times, systems
from experiments.shared.kept_parts import kept_part
from experiments.shared.live import Live, bare
from experiments.shared.machine import end_as_by_ctrl_c
from experiments.shared.real_network import DTYPE, SURVIVAL, profiled
from isobatch.optimizer import Plan
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile
from isobatch.profiles.sweep import rate_per_s

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
AGAIN_S = 10.0  # for which the network is timed after the rounds, as the machine's speed changes with its neighbours
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
        if name in wanted:
            yield from _rounds(name, first, few, seconds)
    if "idle" in wanted:
        yield RealPart("idle", "", partial(idle.figures, seconds))
    if "peers" in wanted:
        yield RealPart(f"peers {first.dtype}", f"_{first.dtype}", partial(peers.figures, first, few, seconds))


def _rounds(name: str, case: RealCase, rounds: int, seconds: float) -> Iterator[RealPart]:
    suffix = f"_{case.dtype}" if name == "live" else f"_{name}_{case.dtype}"
    for number in range(rounds):
        figures = partial(_round, name, case, number, seconds)
        yield RealPart(f"{name} {case.dtype}, round {number + 1}", suffix, figures)


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


def _round(name: str, case: RealCase, number: int, seconds: float) -> dict[str, float]:
    try:
        return live(OTHERS[name](case) if name in OTHERS else case, number, seconds)
    except UserError as error:  # recorded exits are no part of the project
        console.print(f"[bold red]not measured[/]: {error}")
        return {"missing": 1.0}


def live(case: RealCase, number: int, seconds: float) -> dict[str, float]:
    """The figures of one round: the systems take turns, in odd rounds the other way round."""
    with TemporaryDirectory() as folder:
        known = profiled(case.checkpoint, Path(folder), dtype=case.dtype, size=case.size)
        with bare() as here:
            figures = asyncio.run(_measured(here, Path(folder), known, case, number, seconds))
        again = profiled(case.checkpoint, Path(folder), AGAIN_S, case.dtype, case.size)
        return figures | {"machine_slower": _slower(again, known)}


def _slower(later: Profile, before: Profile) -> float:
    """The time of the largest launch that both profiles have, without exits: later, over before."""
    tables = [profile.table(before.kinds[0]) for profile in (later, before)]
    size = min(table.largest for table in tables)
    after_s, before_s = (size / float(rate_per_s(table, size)) for table in tables)
    return after_s / before_s


async def _measured(
    here: Live, folder: Path, known: Profile, case: RealCase, number: int, seconds: float
) -> dict[str, float]:
    """All systems once, in the order of this round, and a look at the chosen one."""
    planned = systems(known, case.slo_ms / 1e3, case.replicas, case.size.largest)
    served = await ServedNetwork.deployed(here, folder, known, planned[0].plan, case)
    live: dict[str, float] = {}
    stolen, total = core_times()
    for system in planned if number % 2 == 0 else planned[::-1]:
        await served.follow(system)
        live[system.name] = await served.sustained_per_s(system, seconds, seed=number)
        console.print(
            f"{system.name}: {_splits(system.plan)} promises {system.promised_per_s:.1f}/s, "
            f"sustains {live[system.name]:.1f}/s"
        )
        if system.name == CONSTANT:
            nearly = await served.nearly(system, seconds)
            console.print(str(nearly))
    stolen, total = (after - before for after, before in zip(core_times(), (stolen, total), strict=True))
    return figures_of(planned, live, nearly) | {"stolen_share": stolen / total}


def _splits(plan: Plan) -> str:
    return ", ".join(f"{split.blocks_text} at {split.batch_size}" for split in plan.splits)


def figures_of(planned: list[PlannedSystem], live: dict[str, float], nearly: Nearly) -> dict[str, float]:
    """`live`: what each system sustains. `nearly` was seen of the chosen one."""
    figures = {f"promised_per_s_{system.name}": system.promised_per_s for system in planned}
    figures |= {f"live_per_s_{name}": value for name, value in live.items()}
    figures |= {f"live_over_promise_{each.name}": live[each.name] / each.promised_per_s for each in planned}
    simple = {name: value for name, value in live.items() if name != CONSTANT}
    figures |= {f"constant_over_{name}": live[CONSTANT] / value for name, value in simple.items() if value}
    best = live[CONSTANT] / (max(simple.values()) or 1e-9)
    return figures | {"chosen_over_best_simple": best} | asdict(nearly)
