"""Measures all parts on this machine's device, the most telling ones first, until the time is over:

    python -m experiments.gpu.measure --device cuda --dtype float16 --out profiles/measured

Tables go to DIR/NETWORK.json, a profile that `isobatch plan` reads; other figures to DIR/results-KIND.json, and from
there to the table of docs/gpu.md. Each part is kept at once, so that the same command continues with missing parts. A
failed part is kept with its error; `--again` tries it again. `--small` is a trial of a minute on any machine: two
layers, short texts, small batches, no page.
"""

import argparse
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError, check_output
from time import monotonic
from traceback import format_exc
from typing import Any

import torch
from rich.console import Console

from experiments.gpu import answers, decoder, hops, page, systems, tables
from experiments.gpu.tables import TableSetting
from experiments.shared.untrained import NAMES, config, own_cache
from isobatch.cluster.profiling import links
from isobatch.deployments.models.attention import has_kernel
from isobatch.deployments.models.loading import resolve_device
from isobatch.profiles.errors import UserError
from isobatch.profiles.measure import device_name

console = Console(stderr=True)
FIRST = "bert-large"  # the network with published rates
ANSWERS, DECODER, LINK, LIVE = "answers", "decoder", "link", "live"
LEAST_S = 20.0  # the least time for a part
Found = dict[str, Any]


@dataclass(frozen=True)
class GpuPart:
    """A part, whose figures are kept when it ends."""

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
    for name in setting.networks:
        config(name)  # refuses an unknown network before the first measurement
    results = Results.of(wish, setting)
    with own_cache():
        for part in parts(setting, wish):
            if part.name in results.parts or part.name in results.failed:
                continue
            left_s = until_s - monotonic()
            if left_s < LEAST_S:
                console.print(f"{part.name} and what follows: not begun, as {wish.minutes:g} minutes are over")
                break
            _measure_part(part, results, left_s, setting)
            gc.collect()  # a network and its memory may refer to each other
    if results.failed:
        raise UserError("\n".join(["not measured:", *(f"{name}: {why}" for name, why in results.failed.items())]))


def _measure_part(part: GpuPart, results: "Results", left_s: float, setting: TableSetting) -> None:
    console.print(f"{part.name} ({left_s:.0f} s left)")
    begun_s = monotonic()
    try:
        with _within(left_s):
            result = part.measure()
    except Exception as error:  # such as too little memory; other parts are still measured
        console.print(format_exc(), markup=False)
        results.add_failure(part.name, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        _begin_again_if_broken(setting, left_s - (monotonic() - begun_s))
    else:
        results.add(part.name, result | {"measuring_s": round(monotonic() - begun_s, 1)})


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """End a part that takes longer, since device time is expensive."""

    def end(*_: object) -> None:
        raise TimeoutError(f"its time of {seconds:.0f} s is over")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _begin_again_if_broken(setting: TableSetting, left_s: float) -> None:
    """Continue in a new process for the minutes left, since some CUDA errors break the present one."""
    if not setting.on_gpu:
        return
    try:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    except RuntimeError:
        arguments = [each for each in sys.argv[1:] if each != "--again"]
        arguments += ["--minutes", str(max(left_s, 0.0) / 60)]
        os.execv(sys.executable, [sys.executable, "-m", "experiments.gpu.measure", *arguments])


@dataclass
class Results:
    """Measured and failed parts by name; each is written at once."""

    path: Path
    page: Path | None
    about: Found
    parts: dict[str, Found]
    failed: dict[str, str]

    @classmethod
    def of(cls, wish: argparse.Namespace, setting: TableSetting) -> "Results":
        """The results of an earlier run, if it had the same device, settings and versions; otherwise empty ones."""
        about: Found = {
            "device": device_name(setting.device), "dtype": setting.dtype, "backend": setting.backend,
            "trial": wish.small, "versions": versions(setting),
        }  # fmt: skip
        wish.out.mkdir(parents=True, exist_ok=True)
        path = wish.out / f"results-{setting.kind}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        if before and about != {name: before.get(name) for name in about}:
            path.rename(path.with_suffix(f".{before['date']}.old"))
            before = {}
        failed = {} if wish.again else before.get("failed", {})
        return cls(path, wish.page, about, before.get("parts", {}), failed)

    def add(self, name: str, result: Found) -> None:
        self.parts[name] = result
        self._write()

    def add_failure(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        self._write()

    def _write(self) -> None:
        today = datetime.now(UTC).date().isoformat()
        content = {**self.about, "date": today, "parts": self.parts, "failed": self.failed}
        self.path.write_text(json.dumps(content, indent=2) + "\n")
        if self.page:
            page.write(self.page, self.path.parent)


def versions(setting: TableSetting) -> dict[str, str]:
    """The driver, the libraries, and whether torch has the kernel for texts of different lengths."""
    result = {"python": sys.version.split()[0]}
    for package in ("torch", "transformers", "onnxruntime-gpu", "onnxruntime"):
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    if setting.on_gpu:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        result |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)}
        result |= {"driver, clock, power": _by_driver(), "fused attention": str(has_kernel())}
    return result


def _by_driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        return check_output(query, text=True, stderr=DEVNULL, timeout=30).strip().partition("\n")[0]
    except (OSError, CalledProcessError):
        return "nvidia-smi does not say"


def parts(setting: TableSetting, wish: argparse.Namespace) -> Iterator[GpuPart]:
    """All parts, ordered by what they tell for their time."""
    networks = [
        (name, length)
        for name in sorted(setting.networks, key=lambda name: name != FIRST)
        for length in tables.lengths_of(name, setting)
    ]
    timed = [GpuPart(_title(*each), partial(_full_batches, *each, setting, wish)) for each in networks]
    compared = [
        GpuPart(f"{_title(*each)}, {survival}", partial(_compared, *each, survival, setting, wish))
        for each in networks
        for survival in list(systems.SURVIVALS)[: 1 if wish.small else None]
    ]
    yield GpuPart(ANSWERS, partial(answers.measure, setting))
    yield timed[0]
    yield GpuPart(DECODER, partial(decoder.measure, setting))
    yield GpuPart(LINK, partial(_link, setting))
    yield compared[0]
    if setting.layers is None and find_spec("ray"):
        yield GpuPart(LIVE, partial(_live, setting))
    yield from (*timed[1:], *compared[1:])


def _title(name: str, length: int | None) -> str:
    return f"{name} {length}" if length else name


def _full_batches(name: str, length: int | None, setting: TableSetting, wish: argparse.Namespace) -> Found:
    """The rate of full batches, its share of the roofline, and the time of a hop."""
    table = tables.measure(name, length, setting)
    tables.keep(name, [table], wish.out)
    model = tables.network(name, setting)
    batch = tables.inputs(model, name, length).batch(min(32, setting.largest))
    return {
        "rate_per_s": tables.best_rate_per_s(table),
        "each_stop_ms": 1e3 * table.each_stop_s,
        "roofline_shares": tables.roofline_shares(name, table, setting),
        "hop_ms": hops.hop_ms(model, batch),
    }


def _compared(name: str, length: int | None, survival: str, setting: TableSetting, wish: argparse.Namespace) -> Found:
    """The rates of no exits, early exit and constant batches, by the measured table."""
    seconds, slos_ms = (0.05, [1000.0]) if wish.small else (wish.seconds, list(systems.SLOS_MS))
    table = tables.kept(name, length, setting, wish.out)
    bench = systems.bench(name, table, survival, setting)
    return {"systems": [row.as_dict() for row in bench.compare(slos_ms, seconds, rounds=1)]}


def _link(setting: TableSetting) -> Found:
    """The time in which survivors move between two processes with this device, through streams and sockets."""
    sizes, rounds = (links.SIZES, links.ROUNDS) if setting.layers is None else (links.SIZES[:4], 5)
    link, note = links.in_one_machine(setting.device, setting.kind, sizes, rounds)
    rate = {"hop_ms": 1e3 * link.latency_s, "gb_per_s": link.bytes_per_s / 1e9, "turn_ms": 1e3 * link.turn_s}
    return rate | {"by_size": note.partition(": ")[2]}


def _live(setting: TableSetting) -> Found:
    from experiments.real.run import live
    from experiments.real.served import RealCase
    from experiments.shared.real_network import RealSize

    return dict(live(RealCase(setting.dtype, slo_ms=200, size=RealSize.of(setting.device)), 0, turns=4, seconds=8))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--backend", default="torch", help="as `backend:` of isobatch serve, but not auto")
    parser.add_argument("--out", type=Path, default=Path("profiles/measured"))
    parser.add_argument("--networks", default=",".join(NAMES))
    parser.add_argument("--seconds", type=float, default=0.5, help="of load at each rate that is tried")
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="after which no part is begun, and one that runs is ended"
    )
    parser.add_argument("--page", type=Path, help="whose table gets the figures; none: docs/gpu.md, of a trial nothing")
    parser.add_argument("--again", action="store_true", help="try those parts again that have failed")
    parser.add_argument("--small", action="store_true")
    wish = parser.parse_args(arguments)
    if not (wish.small or wish.page):
        wish.page = page.PAGE
    return wish


if __name__ == "__main__":
    main()
