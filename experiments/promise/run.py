"""Claim: what is promised of accuracy is kept, and how deep inputs must go for that.

The rows of a file are drawn again and again, as `isobatch prepare` would get them. Thresholds are chosen on them, as
now and as before, and tried on all other rows. Beside it, on the same ladder, a bound by betting (Waudby-Smith and
Ramdas, 2023), which is as tight as any that asks nothing of the losses but that they are bounded.

And that it stays so while inputs drift: what audits cost, what a controller keeps that acts on them, and what early
answers gain.

It is measured in parts, on all cores. A run that was broken off goes on where it was: finished parts are kept until all
are there, as long as the code stays the same.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from deployments.folders import cache_directory
from deployments.prepare.sample import TEST_SHARE
from deployments.progress import show
from experiments.promise.audited import Setting, audit_costs, day, mended
from experiments.promise.before import searched
from experiments.promise.early import answered_early
from experiments.promise.plans import gained
from experiments.promise.tables import SOURCES, Recorded, recorded
from experiments.shared.public_data import data
from experiments.shared.version import code_of
from profiles.evidence import Evidence
from profiles.exit_table import highest, ladder, outcome
from profiles.losses import OF_ALL, Floats, Indices, Metric

MAX_LOSS, CONFIDENCE, SPLITS = 0.01, 0.95, 200
TOGETHER = 25  # splits in a part
OF_CLASSES_SHARE = 0.5  # of the splits, for promises that count classes
ROWS = {"sst2": 10_000, "agnews": 5_000, "demo": 10_000}  # of a file; the demo's are digits, each distorted anew
BEFORE_SHARE = 0.2  # of the rows, on which thresholds were chosen before
OF_CLASSES: tuple[Metric, ...] = ("worst-class", "macro-f1", "mcc")
OF_CLASSES_IN = ("sst2", "agnews")
EXACT, BETTING, BEFORE = "", "betting_", "before_"  # as the names of the figures begin

Part = tuple[Any, ...]  # the name of a kind of work, and what it is done on


def measure(splits: int = SPLITS) -> dict[str, float]:
    for source in SOURCES.values():
        for file, *_ in source.files:
            data(file)  # says what is missing before anything is begun
    tries = dict(_tries(splits))
    parts = [part for some in tries.values() for part in some]
    found = _done([*(("plans", name) for name in ROWS), ("watched",), ("early",), *parts])
    figures = dict[str, float]()
    for kind in (*(("plans", name) for name in ROWS), ("watched",), ("early",)):
        figures |= found[kind]
    figures["plan_thresholds_gain"] = geometric_mean([figures[f"plan_thresholds_gain_{name}"] for name in ROWS])
    for suffix, some in tries.items():
        figures |= {f"{figure}_{suffix}": value for figure, value in _summed([found[part] for part in some])}
    return figures


def _tries(splits: int) -> Iterator[tuple[str, list[Part]]]:
    """What is tried, by the end of its figures' names, in parts."""
    yield from ((name, _parts_of(name, "accuracy", splits)) for name in ROWS)
    yield "demo_agreement", _parts_of("demo", "agreement", splits)
    for name in OF_CLASSES_IN:
        for metric in OF_CLASSES:
            fewer = max(1, round(OF_CLASSES_SHARE * splits))
            yield f"{name}_{metric.replace('-', '_')}", _parts_of(name, metric, fewer)


def _parts_of(name: str, metric: Metric, splits: int) -> list[Part]:
    starts = range(0, splits, TOGETHER)
    return [("tried", name, metric, start, min(start + TOGETHER, splits)) for start in starts]


# Parts, and what was done before


def _done(parts: list[Part]) -> dict[Part, Any]:
    """What each part found, now or before."""
    kept, found = _kept_in(), dict[Part, Any]()
    if kept.exists():
        found = {tuple(part): result for part, result in json.loads(kept.read_text())}
    missing = [part for part in parts if part not in found]
    workers = ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _one_thread)
    with workers:
        futures = {workers.submit(_work, part): part for part in missing}
        for future in show(as_completed(futures), f"parts ({len(found)} were done before)", len(missing)):
            found[futures[future]] = future.result()
            kept.write_text(json.dumps(list(found.items())))
    kept.unlink(missing_ok=True)
    return found


def _kept_in() -> Path:
    folder = cache_directory() / "bench-promise"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{sha256(str(code_of('promise')).encode()).hexdigest()[:16]}.json"


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _work(part: Part) -> Any:
    kind, *told = part
    return WORK[kind](*told)


@cache
def _table(name: str) -> Recorded:
    return recorded(name)


def _tried(name: str, metric: Metric, start: int, stop: int) -> dict[str, list[tuple[float, float]]]:
    """What other rows lose, and how deep they go, for each method and draw."""
    table, rows, seen = _table(name), ROWS[name], defaultdict[str, list[tuple[float, float]]](list)
    for seed in range(start, stop):
        order = np.random.default_rng(seed).permutation(table.known.num_inputs)
        others = table.known.of(order[rows:])
        for method, chosen in _chosen(table.of(order[:rows]), metric).items():
            found = outcome(others, chosen, metric)
            seen[method].append((float(found.lost.mean), float(found.cost)))
    return dict(seen)


def _summed(parts: list[dict[str, list[tuple[float, float]]]]) -> Iterator[tuple[str, float]]:
    """How often more than was promised is lost by other rows, and how deep these go on average, for each method."""
    for method in parts[0]:
        lost, depths = np.array([each for part in parts for each in part[method]]).T
        yield f"{method}exceeded_share", float((lost > MAX_LOSS).mean())
        yield f"{method}depth", float(depths.mean())
        yield f"{method}lost", float(lost.mean())


def _plans(name: str) -> dict[str, float]:
    evidence, others = _drawn(name, "accuracy")
    figures = {f"{figure}_{name}": value for figure, value in gained(name, evidence, others)}
    planned, counted = evidence.survival(evidence.prepared), others.known.places(evidence.prepared)
    counts = [float((counted >= block).mean()) for block in range(len(planned))]
    off = max(abs(plan / count - 1) for plan, count in zip(planned, counts, strict=True))
    return figures | {f"survivors_off_{name}": off}


def _watched() -> dict[str, float]:
    """What audits cost, and what a controller that acts on them keeps."""
    evidence, others = _drawn("demo", "agreement")
    setting = Setting.of(evidence, others.known)
    return dict([*audit_costs(), *mended(setting), *day(setting)])


def _early() -> dict[str, float]:
    figures = dict[str, float]()
    for name in ("sst2", "agnews"):
        evidence, others = _drawn(name, "agreement")
        figures |= {f"{figure}_{name}": value for figure, value in answered_early(evidence, others.known)}
    return figures


WORK: dict[str, Callable[..., Any]] = {"tried": _tried, "plans": _plans, "watched": _watched, "early": _early}


def _drawn(name: str, metric: Metric) -> tuple[Evidence, Recorded]:
    """What `isobatch prepare` gets in one draw, and all other rows."""
    table, rows = _table(name), ROWS[name]
    order = np.random.default_rng(0).permutation(table.known.num_inputs)
    drawn, (shape, test) = table.of(order[:rows]), _parts(rows)
    evidence = Evidence(drawn.believed.of(shape), drawn.known.of(test), metric, MAX_LOSS, CONFIDENCE)
    return evidence, table.of(order[rows:])


def _parts(rows: int) -> list[Indices]:
    """What a ladder is made from, and what the promise is tested on."""
    return np.split(np.arange(rows), [rows - int(rows * TEST_SHARE)])


def _chosen(drawn: Recorded, metric: Metric) -> dict[str, Indices]:
    rows = np.arange(drawn.known.num_inputs)
    shape, test = _parts(len(rows))
    evidence = Evidence(drawn.believed.of(shape), drawn.known.of(test), metric, MAX_LOSS, CONFIDENCE)
    rungs, tested = ladder(evidence.shape, metric), evidence.test
    chosen = {EXACT: highest(rungs, tested, metric, evidence.shows)}
    if metric not in OF_ALL:
        return chosen
    losses, everyone = tested.losses(metric), np.arange(tested.num_inputs)
    bets = rungs[0]
    for rung in rungs[1:]:
        if not wins(losses[tested.places(rung), everyone], MAX_LOSS, 1 - CONFIDENCE):
            break
        bets = rung
    before = drawn.known.of(rows[: int(len(rows) * BEFORE_SHARE)])
    return chosen | {BETTING: bets, BEFORE: searched(before, metric, MAX_LOSS)}


def wins(losses: Floats, max_loss: float, doubt: float) -> bool:
    """Whether a purse that bets on a loss below `max_loss`, input by input, ever grows to 1 / doubt times what it was.

    A bet is as large as the variance seen so far allows, and never more than half of what could be lost.
    """
    count = len(losses)
    seen = np.arange(1, count + 1)
    means = (max_loss + losses.cumsum()) / (seen + 1)
    variances = (0.25 + ((losses - means) ** 2).cumsum()) / (seen + 1)
    before = np.concatenate(([0.25], variances[:-1]))
    bets = np.minimum(np.sqrt(2 * math.log(1 / doubt) / (count * before)), 0.5 / (1 - max_loss))
    return bool(np.log1p(bets * (max_loss - losses)).cumsum().max() >= math.log(1 / doubt))
