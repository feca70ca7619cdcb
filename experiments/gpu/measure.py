"""Measures all on the device at hand, in the order of what tells most, until its time is up:

    python -m experiments.gpu.measure --device cuda --dtype float16 --out profiles/measured

Tables go to DIR/NETWORK.json, a profile that `isobatch plan` reads; all else to DIR/results-KIND.json, and from there
to the table of docs/gpu.md. Each part is kept at once: the same command goes on with those that are missing.
`--small` is a trial of a minute on any machine: two layers, short texts, small batches, no page.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from experiments.backend.families import NAMES, own_cache
from experiments.gpu import decoder, hops, page, systems, tables
from experiments.gpu.tables import TableSetting
from isobatch.deployments.models.loading import resolve_device
from isobatch.profiles.errors import UserError
from isobatch.profiles.measure import device_name

console = Console(stderr=True)
FIRST = "bert-large"  # the network whose rate others have published
DECODER, LIVE = "decoder", "live"
Found = dict[str, Any]


@dataclass(frozen=True)
class GpuPart:
    """A part that is measured and kept by itself."""

    name: str
    measure: Callable[[], Found]


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        _measure(_arguments(arguments))
    except UserError as error:
        sys.exit(str(error))


def _measure(wish: argparse.Namespace) -> None:
    until_s = monotonic() + 60 * wish.minutes
    resolve_device(wish.device)
    setting = TableSetting(wish.device, wish.dtype, wish.backend, networks=tuple(wish.networks.split(",")))
    if wish.small:
        setting = replace(setting, lengths=(16,), largest=4, budget_s=0.5, layers=2)
    about: Found = {
        "device": device_name(setting.device),
        "dtype": setting.dtype,
        "backend": setting.backend,
        "trial": wish.small,
    }
    path, failed = wish.out / f"results-{setting.kind}.json", list[str]()
    found = json.loads(path.read_text()) if path.exists() else {}
    kept = found["parts"] if found and about == {name: found[name] for name in about} else {}
    wish.out.mkdir(parents=True, exist_ok=True)
    with own_cache():
        for part in parts(setting, wish):
            if part.name in kept:
                continue
            if monotonic() > until_s:
                console.print(f"{part.name} and what follows: not begun, as {wish.minutes:g} minutes are over")
                break
            console.print(part.name)
            try:
                kept[part.name] = part.measure()
            except (RuntimeError, ImportError) as error:  # such as no memory: the others are measured nevertheless
                failed.append(f"{part.name}: {error}")
                continue
            today = datetime.now(UTC).date().isoformat()
            path.write_text(json.dumps({**about, "date": today, "parts": kept}, indent=2) + "\n")
            if wish.page:
                page.write(wish.page, wish.out)
    if failed:
        raise UserError("\n".join(["not measured:", *failed]))


def parts(setting: TableSetting, wish: argparse.Namespace) -> Iterator[GpuPart]:
    """All parts, those first that tell most."""
    of_networks = [
        GpuPart(f"{name} {length}" if length else name, partial(_of_one, name, length, setting, wish))
        for name in sorted(setting.networks, key=lambda name: name != FIRST)
        for length in tables.lengths_of(name, setting)
    ]
    yield of_networks[0]
    if setting.layers is None and find_spec("ray"):
        yield GpuPart(LIVE, partial(_live, setting))
    yield GpuPart(DECODER, partial(decoder.measure, setting))
    yield from of_networks[1:]


def _of_one(name: str, length: int | None, setting: TableSetting, wish: argparse.Namespace) -> Found:
    """The rate of full batches, how near the roofline it is, what a hop costs, and what the systems sustain."""
    seconds, slos_ms, survivals = wish.seconds, list(systems.SLOS_MS), list(systems.SURVIVALS)
    if wish.small:
        seconds, slos_ms, survivals = 0.05, [1000.0], survivals[:1]
    table = tables.measure(name, length, setting)
    tables.keep(name, [table], wish.out)
    model = tables.network(name, setting)
    batch = tables.inputs(model, name, length).batch(min(32, setting.largest))
    return {
        "rate_per_s": tables.best_rate_per_s(table),
        "roofline_shares": tables.roofline_shares(name, table, setting),
        "hop_ms": hops.hop_ms(model, batch),
        "systems": {
            survival: [
                row.as_dict()
                for row in systems.bench(name, table, survival, setting).compare(slos_ms, seconds, rounds=1)
            ]
            for survival in survivals
        },
    }


def _live(setting: TableSetting) -> Found:
    from experiments.real.run import live
    from experiments.real.served import RealCase
    from experiments.shared.real_network import RealSize

    return dict(live(RealCase(setting.dtype, slo_ms=200, size=RealSize.of(setting.device)), 0, seconds=8))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--backend", default="torch", help="as `backend:` of isobatch serve, but not auto")
    parser.add_argument("--out", type=Path, default=Path("profiles/measured"))
    parser.add_argument("--networks", default=",".join(NAMES))
    parser.add_argument("--seconds", type=float, default=0.5, help="of load at each rate that is tried")
    parser.add_argument("--minutes", type=float, default=40.0, help="after which no other part is begun")
    parser.add_argument("--page", type=Path, help="whose table gets the figures; none: docs/gpu.md, of a trial nothing")
    parser.add_argument("--small", action="store_true")
    wish = parser.parse_args(arguments)
    if not (wish.small or wish.page):
        wish.page = page.PAGE
    return wish


if __name__ == "__main__":
    main()
