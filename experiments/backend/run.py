"""Claim: ONNX Runtime is faster than torch on this machine, and on one device constant batches beat both alternatives.

Speed of a backend does not depend on what weights mean: four families run at their true shapes, untrained. What exits
are worth does: the demo, and MiniLM on SST-2 where it is at hand (experiments/backend/minilm.py says how).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console

from deployments.demo import demo_digits, demo_directory
from deployments.models import TorchModel, load
from deployments.models.backends import on_backend
from deployments.models.onnx_model import OnnxModel
from deployments.models.stretch import Stretch
from experiments.backend import minilm, replicas
from experiments.backend.families import batches, untrained
from experiments.onedevice.compare import CONSTANT, STOCK
from experiments.onedevice.report import ratios
from experiments.onedevice.setting import DEMO, Wish, make
from profiles.errors import UserError
from profiles.measure import stopwatch_for
from profiles.model import Batch, SplitModel

FAMILIES = {"bert": "bert-base", "distilbert": "distilbert", "vit": "vit-base", "resnet": "resnet-50"}
SIZES, LENGTH, ROUNDS = (1, 8), 32, 4
ROUNDS_OF_LOAD, LOAD_S = 2, 0.7
DEMO_SLO_MS, MINILM_SLO_MS = 50.0, 1000.0
COUNT = 500  # inputs that answers in 8 bits are compared on
console = Console(stderr=True)


def measure() -> dict[str, float]:
    torch.set_num_threads(1)
    figures = dict[str, float]()
    with _own_cache():
        for family, name in FAMILIES.items():
            console.print(f"{name}: torch, ONNX Runtime")
            figures |= _family(family, untrained(name), batches(name, LENGTH))
        console.print("replicas and threads")
        figures |= _replicas()
    console.print("the demo")
    figures |= _exits("demo", DEMO_SLO_MS, Wish(DEMO, budget_s=15.0, backend="onnx"))
    digits, labels = demo_digits(COUNT)
    figures |= _eight_bits("demo", demo_directory(), list(digits), labels)
    return figures | _minilm()


def _family(family: str, exact: TorchModel, batch_of: Callable[[int], Batch]) -> dict[str, float]:
    """Rounds in turns, medians, and the geometric mean over sizes."""
    systems: dict[str, SplitModel] = {"torch": exact, "onnx": OnnxModel(exact, f"untrained {family}")}
    if family in ("bert", "distilbert"):
        systems["int8"] = OnnxModel(exact, f"untrained {family}", int8=True)
    for each in systems.values():
        if isinstance(each, OnnxModel):
            each.prepare([Stretch(0, exact.num_blocks)], batch_of(1))
    by_size = [_in_turns(systems, batch_of(size)) for size in SIZES]
    others = [name for name in systems if name != "torch"]
    figures = {
        f"{other}_over_torch_{family}": geometric_mean(took["torch"] / took[other] for took in by_size)
        for other in others
    }
    return figures | {f"torch_{family}_per_s": SIZES[-1] / by_size[-1]["torch"]}


def _in_turns(systems: dict[str, SplitModel], batch: Batch) -> dict[str, float]:
    stopwatch = stopwatch_for("cpu")
    took_s: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(1 + ROUNDS):  # the first one warms up
        for name, model in systems.items():
            took_s[name].append(stopwatch(partial(model.run, batch, model.num_blocks, ()))[1])
    return {name: median(seconds[1:]) for name, seconds in took_s.items()}


def _replicas() -> dict[str, float]:
    cores = os.cpu_count() or 1
    ways = {"1x1": (1, 1), "1xall": (1, cores), "allx1": (cores, 1)}
    rates = {name: replicas.rate_per_s(*way, seconds=4.0) for name, way in ways.items()}
    named = {f"replicas_{name}_per_s": rate for name, rate in rates.items()}
    return named | {"many_replicas_over_many_threads": rates["allx1"] / rates["1xall"]}


def _exits(name: str, slo_ms: float, wish: Wish) -> dict[str, float]:
    made = make(wish)
    rows = {row.system: row for row in made.bench.compare([slo_ms], seconds=LOAD_S, rounds=ROUNDS_OF_LOAD)}
    figures = {f"{name}_{what}": ratio for what, ratio in ratios(list(rows.values()), slo_ms).items()}
    for system, row in rows.items():
        figures[f"{name}_{system.replace(' ', '_')}_per_s"] = row.goodput_per_s
    for what, system in (("full", STOCK), ("with_exits", CONSTANT)):
        figures[f"{name}_accuracy_{what}"] = rows[system].accuracy or 0.0
    return figures


def _eight_bits(
    name: str, folder: Path, values: list[object], labels: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> dict[str, float]:
    """The same exits on 8-bit blocks: what changes, on inputs whose labels are known."""
    exact = load(folder)
    served = on_backend(exact, folder, "onnx", int8=True)
    batch = exact.encode(values)
    left, here = (
        exact.run(batch, exact.num_blocks, exact.ramp_blocks).exits,
        Stretch(0, exact.num_blocks, exact.ramp_blocks),
    )
    assert isinstance(served, OnnxModel)
    served.prepare([here], exact.select(batch, np.arange(2)))
    in_8 = served.run(batch, exact.num_blocks, exact.ramp_blocks).exits
    return {
        f"int8_{name}_same_answers": float((in_8.labels == left.labels).mean()),
        f"int8_{name}_same_exits": float((in_8.blocks == left.blocks).mean()),
        f"int8_{name}_accuracy_lost": float((left.labels == labels).mean() - (in_8.labels == labels).mean()),
    }


def _minilm() -> dict[str, float]:
    try:
        folder = minilm.prepared()
        texts, labels = minilm.sentences("test", minilm.TEST_ROWS)
    except UserError as error:
        console.print(f"MiniLM is left out: {error}", highlight=False)
        return {}
    console.print("MiniLM on SST-2")
    wish = Wish(str(folder), data=minilm.test_file(), budget_s=15.0, backend="onnx", largest=32)
    figures = _exits("minilm", MINILM_SLO_MS, wish)
    return figures | _eight_bits("minilm", folder, list(texts[:COUNT]), labels[:COUNT])


@contextmanager
def _own_cache() -> Iterator[None]:
    """Untrained networks are of no use to anybody afterwards."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        yield
