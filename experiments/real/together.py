"""Replicas that share a device, as PAME's parallel batches do, over one replica that has it alone.

The device is two cores. Alone, a replica computes on both; of two that share the device, each computes on one. Whether
the plan shares it, `isobatch plan` decides by the table that `isobatch profile --together` has measured.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from experiments.real.served import SLACK, PlannedSystem, RealCase, ServedNetwork, chosen_system, facts_of
from experiments.shared.live import Live, bare
from experiments.shared.real_network import KIND, profiled
from isobatch.optimizer import Objective
from isobatch.profiles.devices import whole_kind
from isobatch.profiles.files import Profile

SHARERS = 2
SLO_MS = 500.0
console = Console(stderr=True, width=140)


def figures(case: RealCase, number: int, seconds: float) -> dict[str, float]:
    """What the plans of the whole device and of its parts sustain in one round, in odd rounds the other way round."""
    case = replace(case, slo_ms=SLO_MS, cores=SHARERS)
    with TemporaryDirectory() as folder:
        known = profiled(
            case.checkpoint, Path(folder), dtype=case.dtype, size=case.size, threads=case.cores, together=SHARERS
        )
        planned = _systems(known, case)
        with bare() as here:
            lives = asyncio.run(_lives(here, Path(folder), known, planned[:: 1 - 2 * (number % 2)], case, seconds))
    per_s = {f"live_per_s_{name}": live for name, live in lives.items()}
    promised = {f"promised_per_s_{each.name}": each.promised_per_s for each in planned}
    whole, shared = (each.promised_per_s for each in planned)
    over = {"shared_over_whole": lives["shared"] / lives["whole"], "shared_over_whole_promised": shared / whole}
    return per_s | promised | over


def _systems(known: Profile, case: RealCase) -> list[PlannedSystem]:
    objective = Objective(slo_s=case.slo_ms / 1e3, slack=SLACK, max_batch=case.size.largest)
    part = next(kind for kind in known.kinds if whole_kind(kind) == (KIND, SHARERS))
    devices = {"whole": f"{KIND}=1", "shared": f"{part}={SHARERS}"}
    return [chosen_system(name, facts_of(known, given), objective) for name, given in devices.items()]


async def _lives(
    here: Live, folder: Path, known: Profile, planned: list[PlannedSystem], case: RealCase, seconds: float
) -> dict[str, float]:
    lives = {}
    for number, system in enumerate(planned):
        served = await ServedNetwork.deployed(here, folder, known, system.plan, case)
        await served.warm_up(system)
        lives[system.name] = await served.sustained_per_s(system, seconds, seed=number)
        console.print(f"{system.name} promises {system.promised_per_s:.1f}/s, sustains {lives[system.name]:.1f}/s")
    return lives
