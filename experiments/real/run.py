"""Claim: what a plan promises happens with real compute, and constant batches are worth what the planner says.

BERT-base in random weights, whose inputs leave by chance at a given survival, on Ray Serve over HTTP, one replica of
one thread. Systems take turns, round by round; all is on one machine's cores, the generator too.
"""

import asyncio
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from experiments.real import launches
from experiments.real.served import CONSTANT, Nearly, PlannedSystem, ServedNetwork, core_times, systems
from experiments.shared.live import Live, bare
from experiments.shared.real_network import checkpoint, profiled
from optimizer import Plan
from profiles.files import Profile

console = Console(stderr=True, width=140)


def measure(
    parts: str = "launches,live", dtypes: str = "bfloat16,float32,int8", slo_ms: int = 1000, rounds: int = 3,
    seconds: int = 8,
) -> dict[str, float]:  # fmt: skip
    """`rounds` of a search for what each system sustains, in steps of so many `seconds`, for each precision."""
    figures: dict[str, float] = {}
    for dtype in dtypes.split(","):
        if "launches" in parts and dtype != "int8":
            figures |= {f"{name}_{dtype}": value for name, value in launches.figures(dtype).items()}
        if "live" in parts:
            figures |= {f"{name}_{dtype}": value for name, value in _live(dtype, slo_ms, rounds, seconds).items()}
    return figures


def _live(dtype: str, slo_ms: float, rounds: int, seconds: float) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        known = profiled(checkpoint(), Path(folder), dtype=dtype)
        result = systems(known, slo_ms / 1e3)
        with bare() as here:
            return asyncio.run(_measured(here, Path(folder), known, result, dtype, slo_ms, rounds, seconds))


async def _measured(
    here: Live, folder: Path, known: Profile, result: list[PlannedSystem], dtype: str, slo_ms: float, rounds: int,
    seconds: float,
) -> dict[str, float]:  # fmt: skip
    served = await ServedNetwork.deployed(here, folder, known, result[0].plan, dtype, slo_ms)
    rates: dict[str, list[float]] = {system.name: [] for system in result}
    looks: dict[str, list[Nearly]] = {system.name: [] for system in result}
    stolen, total = core_times()
    for number in range(rounds):
        for system in result if number % 2 == 0 else result[::-1]:
            await served.follow(system)
            looks[system.name].append(await served.nearly(system, 2 * seconds))
            rates[system.name].append(await served.sustained_per_s(system, seconds, seed=number))
            console.print(
                f"{dtype}, round {number + 1} of {rounds}, {system.name}: {_told(system.plan)} promises "
                f"{system.promised_per_s:.1f}/s, sustains {rates[system.name][-1]:.1f}/s; {looks[system.name][-1]}"
            )
    stolen, total = (after - before for after, before in zip(core_times(), (stolen, total), strict=True))
    return figures_of(result, rates, looks) | {"stolen_share": stolen / total}


def _told(plan: Plan) -> str:
    return ", ".join(f"{split.blocks_text} at {split.batch_size}" for split in plan.splits)


def figures_of(
    result: list[PlannedSystem], rates: dict[str, list[float]], looks: dict[str, list[Nearly]]
) -> dict[str, float]:
    live = {name: median(each) for name, each in rates.items()}
    figures = {f"promised_per_s_{system.name}": system.promised_per_s for system in result}
    figures |= {f"live_per_s_{name}": value for name, value in live.items()}
    figures |= {f"live_over_promise_{each.name}": live[each.name] / each.promised_per_s for each in result}
    simple = {name: value for name, value in live.items() if name != CONSTANT}
    figures |= {f"constant_over_{name}": live[CONSTANT] / value for name, value in simple.items() if value}
    nearly = looks[CONSTANT]
    return figures | {
        "chosen_over_best_simple": live[CONSTANT] / (max(simple.values()) or 1e-9),
        "fill": median(each.fill for each in nearly),
        "replica_idle_share": median(each.idle_share for each in nearly),
        "wall_over_processor": median(each.wall_over_processor for each in nearly),
        "launches_over_tables": median(each.launches_over_tables for each in nearly),
        "in_time_at_90_percent": median(each.in_time for each in nearly),
    }
