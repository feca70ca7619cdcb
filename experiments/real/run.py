"""Claim: with real compute, a plan sustains its promise, and at least as much as early exit and no exits.

BERT-base with random weights, whose inputs leave at random with a given survival, runs on Ray Serve over HTTP, on one
replica of one thread. A round profiles the network, plans, and serves, since the machine's speed changes within
minutes. The controls are early exit in one split and no exits, each with its best batch; they take turns of seconds
with the plan, in one server. Other servers are measured minutes later. The generator uses the same machine's cores. The
figures of a round are kept when it ends, so that an interrupted run continues with the next round.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory

from rich.console import Console

from experiments.forecast.traces import elasticbert_survival
from experiments.real import idle, launches, peers
from experiments.real.served import CONSTANT, PlannedSystem, RealCase, ServedNetwork, systems
from experiments.real.turns import Sustained, chain_s, in_turns
from experiments.shared.kept_parts import kept_part
from experiments.shared.live import Live, bare, in_own_process
from experiments.shared.real_network import DTYPE, SURVIVAL, UNCAPPED_BATCH, profiled
from isobatch.optimizer import Plan
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile

SIX_LAYERS = 6
TWICE_BEGINS = 0.6  # of the promise of two replicas, whose two cores also run the front and the generator
PATIENCE = 2  # answers in a row that must agree, for ElasticBERT's recorded exits
# Each system's own batch size, other SLOs, two replicas, half the network, and the same with recorded exits' survival.
OTHERS: Mapping[str, Callable[[RealCase], RealCase]] = {
    "large": lambda case: replace(case, size=replace(case.size, largest=UNCAPPED_BATCH)),
    "slo200": lambda case: replace(case, slo_ms=200),
    "slo500": lambda case: replace(case, slo_ms=500),
    "twice": lambda case: replace(case, replicas=2, begin=TWICE_BEGINS),
    "twice_large": lambda case: OTHERS["twice"](OTHERS["large"](case)),
    "half": lambda case: replace(case, survival=SURVIVAL[:SIX_LAYERS]),
    "recorded": lambda case: replace(case, survival=elasticbert_survival(SIX_LAYERS, PATIENCE)),
}
PARTS = ("launches", "live", *OTHERS, "idle", "peers")
PRECISIONS = tuple(dict.fromkeys((DTYPE, "float32", "int8")))
WARMS_UP, WARMS_UP_S = 0.7, 5.0  # of the promise
RATES = ("promised_per_s", "live_", "machine_slower", "constant_over", "chosen_over")  # ratios of rates
console = Console(stderr=True, width=140)


@dataclass(frozen=True)
class RealPart:
    """A part, whose figures are kept when it ends. Their names end with `suffix`."""

    name: str
    suffix: str
    figures: Callable[[], dict[str, float]]


def measure(
    parts: str = ",".join(PARTS), dtypes: str = ",".join(PRECISIONS), slo_ms: int = 1000, rounds: int = 3,
    turns: int = 6, seconds: int = 16, again: int = 0,
) -> dict[str, float]:  # fmt: skip
    """The rate of each system, for each precision, in `rounds` that each have a profile and a plan, and in `turns`.

    Only the first precision has all rounds; other precisions, and all parts except `launches` and `live`, have a third.
    `again=1`: measure parts again that the same code has measured on this machine.
    """
    if unknown := set(parts.split(",")) - set(PARTS):
        raise UserError(f"parts={','.join(sorted(unknown))}: there are {','.join(PARTS)}")
    seen = defaultdict[str, list[float]](list)
    for part in _parts(parts.split(","), RealCase("", slo_ms), dtypes.split(","), rounds, turns, seconds):
        measure_part, options = partial(in_own_process, part.figures), f"{slo_ms} {turns} {seconds}"
        for name, value in kept_part("real", part.name, options, bool(again), measure_part, console).items():
            seen[f"{name}{part.suffix}"].append(value)
    figures = {name: value for of_name in seen.items() for name, value in of_rounds(*of_name).items()}
    return figures | over_peers(figures)


def of_rounds(name: str, values: list[float]) -> dict[str, float]:
    """The figures of several rounds: geometric means of rates and ratios, so that they agree, and medians of others.

    Ratios between systems also have the lowest and the highest round.

    >>> of_rounds("constant_over_no_exits", [1.0, 4.0])
    {'constant_over_no_exits': 2.0, 'constant_over_no_exits_low': 1.0, 'constant_over_no_exits_high': 4.0}
    """
    if not name.startswith(RATES):
        return {name: median(values)}
    combined = {name: geometric_mean(values) if min(values) > 0 else 0.0}
    return combined | ({f"{name}_low": min(values), f"{name}_high": max(values)} if "_over_" in name else {})


def _parts(
    wanted: list[str], case: RealCase, dtypes: list[str], rounds: int, turns: int, seconds: int
) -> Iterator[RealPart]:
    first, few = replace(case, dtype=dtypes[0]), max(1, rounds // 3)
    for dtype in dtypes:
        if "launches" in wanted and dtype != "int8":
            yield RealPart(f"launches {dtype}", f"_{dtype}", partial(launches.figures, dtype))
        if "live" in wanted:
            own = rounds if dtype == first.dtype else few
            yield from _rounds("live", replace(case, dtype=dtype), own, turns, seconds)
    for name in OTHERS:
        if name in wanted and (other := _other(name, first)):
            yield from _rounds(name, other, few, turns, seconds)
    if "idle" in wanted:
        yield RealPart("idle", "", partial(idle.figures, seconds))
    for number in range(few if "peers" in wanted else 0):
        measured = partial(peers.figures, first, number, turns, seconds)
        yield RealPart(f"peers {first.dtype}, round {number + 1}", f"_{first.dtype}", measured)


def _other(name: str, case: RealCase) -> RealCase | None:
    """None: its recorded exits are not at hand; they are not part of the project."""
    try:
        return OTHERS[name](case)
    except UserError as error:
        console.print(f"[bold red]{name} IS NOT MEASURED[/]: {error}", soft_wrap=True)
        return None


def _rounds(name: str, case: RealCase, rounds: int, turns: int, seconds: float) -> Iterator[RealPart]:
    suffix = f"_{case.dtype}" if name == "live" else f"_{name}_{case.dtype}"
    for number in range(rounds):
        yield RealPart(f"{name} {case.dtype}, round {number + 1}", suffix, partial(live, case, number, turns, seconds))


def over_peers(figures: Mapping[str, float]) -> dict[str, float]:
    """The rate of the chosen plan over that of each peer with as many workers, for all precisions with both.

    >>> over_peers({"live_per_s_constant_twice_int8": 90.0, "live_per_s_ray_2_int8": 75.0})
    {'constant_over_ray_2_int8': 1.2}
    """
    ratios = dict[str, float]()
    for peer, dtype in product(peers.SHARED, PRECISIONS):
        workers, batch = "_twice" if peer.workers == 2 else "", "_large" if peer.batch == UNCAPPED_BATCH else ""
        own = f"{CONSTANT}{workers}{batch}"
        own_per_s, per_s = (figures.get(f"live_per_s_{name}_{dtype}") for name in (own, peer.name))
        if own_per_s and per_s:
            ratios[f"constant_over_{peer.name}_{dtype}"] = own_per_s / per_s
    return ratios


def live(case: RealCase, number: int, turns: int, seconds: float) -> dict[str, float]:
    """The figures of one round."""
    with TemporaryDirectory() as folder:
        before_s = chain_s(case)
        known = profiled(case.checkpoint, Path(folder), dtype=case.dtype, size=case.size)
        profiled_s = (before_s + chain_s(case)) / 2
        with bare() as here:
            return asyncio.run(_measured(here, Path(folder), known, profiled_s, case, turns, seconds, number))


async def _measured(
    here: Live, folder: Path, known: Profile, profiled_s: float, case: RealCase, turns: int, seconds: float, seed: int
) -> dict[str, float]:
    """All systems in turns, then the chosen plan near its promise. `profiled_s`: the chain's time at the profile."""
    planned = systems(known, case.slo_ms / 1e3, case.replicas, case.size.largest)
    served = await ServedNetwork.deployed(here, folder, known, planned[0].plan, case)
    for system in planned:
        await served.follow(system)
        await served.server.ask(WARMS_UP * system.promised_per_s, WARMS_UP_S)
    seen = await in_turns(served, planned, lambda: chain_s(case) / profiled_s, turns, seconds, seed, case.begin)
    for system in planned:
        own = seen[system.name]
        console.print(
            f"{system.name}, {_splits(system.plan)}: promises {system.promised_per_s:.1f}/s, "
            f"sustains {own.per_s:.1f}/s on a machine that was {own.slower:.2f} times as slow as at the profile"
        )
    await served.follow(planned[0])
    return figures_of(planned, seen) | asdict(await served.nearly(planned[0], seconds))


def _splits(plan: Plan) -> str:
    return ", ".join(f"{split.blocks_text} at {split.batch_size}" for split in plan.splits)


def figures_of(planned: list[PlannedSystem], seen: Mapping[str, Sustained]) -> dict[str, float]:
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
    best = max(simple.values())
    return figures | ({"chosen_over_best_simple": constant_per_s / best} if best else {})
