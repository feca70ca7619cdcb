"""Measures all on the device at hand: `python -m experiments.gpu.measure --device cuda --dtype float16 --out DIR`.

Tables go to DIR/NETWORK.json, a profile that `isobatch plan` reads; comparisons, hops and shares of the roofline to
DIR/results-KIND.json. Each result is written at once, so that a run that is cut short keeps those it has.
`--small` is a trial of a minute on any machine: two layers, short texts, small batches.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.backend.families import NAMES, own_cache
from experiments.gpu import hops, systems, tables
from isobatch.deployments.models.loading import resolve_device
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.measure import device_name

console = Console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        _measure(_arguments(arguments))
    except UserError as error:
        sys.exit(str(error))


def _measure(wish: argparse.Namespace) -> None:
    resolve_device(wish.device)
    setting = tables.TableSetting(wish.device, wish.dtype, wish.backend, networks=tuple(wish.networks.split(",")))
    seconds, slos_ms, survivals = wish.seconds, list(systems.SLOS_MS), list(systems.SURVIVALS)
    if wish.small:
        setting = replace(setting, lengths=(16,), largest=4, budget_s=0.5, layers=2)
        seconds, slos_ms, survivals = 0.05, [1000.0], survivals[:1]
    measured_by_name: dict[str, Any] = {
        "device": device_name(setting.device),
        "dtype": setting.dtype,
        "backend": setting.backend,
        "date": datetime.now(UTC).date().isoformat(),
        "trial": wish.small,
    }
    with own_cache():
        for name in setting.networks:
            console.print(name)
            made = list(tables.measure(name, setting))
            tables.keep(name, made, wish.out)
            measured_by_name[name] = _of_one(name, made, setting, slos_ms, survivals, seconds)
            (wish.out / f"results-{setting.kind}.json").write_text(json.dumps(measured_by_name, indent=2) + "\n")


def _of_one(
    name: str,
    made: Sequence[LatencyTable],
    setting: tables.TableSetting,
    slos_ms: Sequence[float],
    survivals: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """By length: what the systems sustain, how near the roofline is, what a hop costs."""
    model, result = tables.network(name, setting), dict[str, Any]()
    for table in made:
        batch = tables.inputs(model, name, table.length).batch(min(32, setting.largest))
        benches = {survival: systems.bench(name, table, survival, setting) for survival in survivals}
        result[str(table.length)] = {
            "roofline_shares": tables.roofline_shares(name, table, setting),
            "hop_ms": hops.hop_ms(model, batch),
            "systems": {
                survival: [row.as_dict() for row in bench.compare(slos_ms, seconds, rounds=1)]
                for survival, bench in benches.items()
            },
        }
    return result


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--backend", default="torch", help="as `backend:` of isobatch serve, but not auto")
    parser.add_argument("--out", type=Path, default=Path("profiles/measured"))
    parser.add_argument("--networks", default=",".join(NAMES))
    parser.add_argument("--seconds", type=float, default=0.5, help="of load at each rate that is tried")
    parser.add_argument("--small", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
