"""Claim: what is promised of accuracy is kept, and how deep inputs must go for that.

The rows of a file are drawn again and again, as `isobatch prepare` would get them. Thresholds are chosen on them, as
now and as before, and tried on all other rows.

And that it stays so while inputs drift: what audits cost, what a controller keeps that acts on them, and what early
answers gain.

It is measured in parts, on all cores. A run that was broken off goes on where it was: finished parts are kept until all
are there, each as long as the code stays the same that it ran.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from hashlib import sha256
from multiprocessing import get_context
from statistics import geometric_mean
from typing import Any

from deployments.folders import cache_directory
from deployments.progress import show
from experiments.promise.audited import watched
from experiments.promise.early import early
from experiments.promise.plans import plans
from experiments.promise.tables import SOURCES
from experiments.promise.tried import ROWS, summed, tried
from experiments.shared.public_data import data
from experiments.shared.version import code_behind
from profiles.losses import Metric

SPLITS = 200
TOGETHER = 25  # splits in a part
OF_CLASSES_SHARE = 0.5  # of the splits, for promises that count classes
OF_CLASSES: tuple[Metric, ...] = ("worst-class", "macro-f1", "mcc")
OF_CLASSES_IN = ("sst2", "agnews")

Part = tuple[Any, ...]  # the name of a kind of work, and what it is done on
WORK: Mapping[str, Callable[..., Any]] = {
    "plans": plans,
    "watched": watched,
    "early": early,
    "tried": tried,
}


def measure(splits: int = SPLITS) -> dict[str, float]:
    for source in SOURCES.values():
        for file, *_ in source.files:
            data(file)  # says what is missing before anything is begun
    tries = dict(_tries(splits))
    parts = [part for some in tries.values() for part in some]
    others: list[Part] = [("watched", what) for what in ("day", "costs", "mended")]
    others += [("early",), *(("plans", name) for name in ROWS)]
    found, figures = _done([*others, *parts]), dict[str, float]()
    for part in others:
        figures |= found[part]
    figures["plan_thresholds_gain"] = geometric_mean([figures[f"plan_thresholds_gain_{name}"] for name in ROWS])
    for suffix, some in tries.items():
        figures |= {f"{figure}_{suffix}": value for figure, value in summed([found[part] for part in some])}
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
    kept, found = cache_directory() / "bench-promise" / "parts.json", dict[Part, Any]()
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_suffix(".part")
    if kept.exists():
        before = {(tuple(part), code): result for part, code, result in json.loads(kept.read_text())}
        found = {part: before[part, _code(part[0])] for part in parts if (part, _code(part[0])) in before}
    missing, failed = [part for part in parts if part not in found], list[BaseException]()
    workers = ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _one_thread)
    with workers:
        futures = {workers.submit(_work, part): part for part in missing}
        for future in show(as_completed(futures), f"parts ({len(found)} were done before)", len(missing)):
            if error := future.exception():  # the others go on, and are kept
                failed.append(error)
                continue
            found[futures[future]] = future.result()
            beside.write_text(json.dumps([(part, _code(part[0]), result) for part, result in found.items()]))
            beside.replace(kept)  # whole, whenever the run is broken off
    if failed:
        raise failed[0]
    kept.unlink(missing_ok=True)
    return found


@cache
def _code(kind: str) -> str:
    """Of all the code that work of this kind may run."""
    module = WORK[kind].__module__.replace(".", "/")
    return sha256(str(code_behind(f"{module}.py")).encode()).hexdigest()[:16]


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _work(part: Part) -> Any:
    kind, *told = part
    return WORK[kind](*told)
