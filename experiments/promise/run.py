"""Claim: promises of accuracy hold as often as stated, also while inputs drift.

Rows of a file are drawn again and again, as samples of `isobatch prepare`. Thresholds are chosen on them, with a tested
promise and without, and tried on all other rows. Other parts measure the cost of audits, agreement under drift in
virtual time and live, tails, and early answers.

Parts run on all cores. A finished part is kept while its code and its recorded inputs stay the same, so that an
interrupted run continues.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from statistics import geometric_mean
from typing import Any

from experiments.promise.audited import watched
from experiments.promise.early import early
from experiments.promise.live import MINUTES, live
from experiments.promise.plans import plans
from experiments.promise.recordings import ROWS
from experiments.promise.tables import SOURCES, table
from experiments.promise.tail import tail
from experiments.promise.tried import summed, tried
from experiments.shared.kept_parts import kept, place_of
from experiments.shared.machine import data
from isobatch.deployments.progress import show
from isobatch.profiles.losses import Metric

SPLITS = 200
TOGETHER = 25  # splits in a part
OF_CLASSES_SHARE = 0.5  # of the splits, for promises that count classes
OF_CLASSES: tuple[Metric, ...] = ("worst-class", "macro-f1", "mcc")
OF_CLASSES_IN = ("sst2", "agnews")

Part = tuple[Any, ...]  # a kind of work and its arguments
WORK: Mapping[str, Callable[..., Any]] = {
    "table": table,
    "plans": plans,
    "watched": watched,
    "early": early,
    "tail": tail,
    "tried": tried,
}


def measure(splits: int = SPLITS, minutes: int = MINUTES) -> dict[str, float]:
    for source in SOURCES.values():
        for file, *_ in source.files:
            data(file)  # an error names missing data before work begins
    made = _done([("table", name) for name in ROWS])
    recordings = {name: made["table", name] for name in ROWS}
    others: list[Part] = [("plans", name, recordings[name]) for name in ROWS]
    others += [("watched", what, recordings["demo"]) for what in ("day", "costs", "mended")]
    others += [("early", name, recordings[name]) for name in SOURCES]
    others += [("tail", name, recordings[name]) for name in ROWS]
    tries = dict(_tries(splits, recordings))
    finished = _done([*(part for some in tries.values() for part in some), *others])
    _one_thread()
    figures = live(minutes)  # alone on the machine, and never kept, since it depends on the machine
    for part in others:
        figures |= finished[part]
    figures["plan_thresholds_gain"] = geometric_mean([figures[f"plan_thresholds_gain_{name}"] for name in ROWS])
    for suffix, some in tries.items():
        figures |= {f"{figure}_{suffix}": value for figure, value in summed([finished[part] for part in some])}
    return figures


def _tries(splits: int, recordings: Mapping[str, str]) -> Iterator[tuple[str, list[Part]]]:
    """The parts in which promises are tried, by the end of their figures' names."""

    def parts(name: str, metric: Metric, splits: int) -> list[Part]:
        starts = range(0, splits, TOGETHER)
        return [("tried", name, recordings[name], metric, start, min(start + TOGETHER, splits)) for start in starts]

    yield from ((name, parts(name, "accuracy", splits)) for name in ROWS)
    yield "demo_agreement", parts("demo", "agreement", splits)
    for name in OF_CLASSES_IN:
        for metric in OF_CLASSES:
            fewer = max(1, round(OF_CLASSES_SHARE * splits))
            yield f"{name}_{metric.replace('-', '_')}", parts(name, metric, fewer)


def _done(parts: Sequence[Part]) -> dict[Part, Any]:
    """The result of each part, measured now or kept by the same code."""
    finished, failed = dict[Part, Any](), list[BaseException]()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _one_thread) as workers:
        futures = {workers.submit(_work, part): part for part in parts}
        for future in show(as_completed(futures), "parts", len(parts)):
            if error := future.exception():  # other parts continue, and are kept
                failed.append(error)
            else:
                finished[futures[future]] = future.result()
    if failed:
        raise failed[0]
    return finished


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _work(part: Part) -> Any:
    kind, *arguments = part
    module = WORK[kind].__module__.rpartition(".")[2]
    path = place_of("promise", *map(str, part), module=module).with_suffix(".json")
    return kept(path, lambda: WORK[kind](*arguments))
