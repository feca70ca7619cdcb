"""Measures what exits and constant batches gain on one host thread, also for a compressed network.

Each network is compared in float32 and in 8 bits, with ramps made for it (E3's figure 9 puts exits on compressed
models).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.backend import minilm
from isobatch.cluster.bench.compare import CONSTANT, NAIVE, STOCK, Bench, ComparedSystem
from isobatch.cluster.bench.real_device import Source
from isobatch.cluster.bench.setup import BenchRequest, make
from isobatch.deployments.models.ramps import RampDtype
from isobatch.deployments.named import DEMO_NAME
from isobatch.profiles.model import SplitModel

BUDGET_S = 8.0


@dataclass(frozen=True)
class Load:
    """A load, whose seconds are several times the SLO, so that inputs still inside at its end weigh little."""

    slo_ms: float
    seconds: float
    rounds: int


DEMO_LOAD, MINILM_LOAD = Load(50.0, 0.7, 3), Load(250.0, 1.5, 1)  # the latter's rates take longer to be tried
TOGETHER = 16  # inputs in a batch while answers are judged
NAMES = {STOCK: "stock", NAIVE: "naive", CONSTANT: "constant"}
DTYPES: tuple[RampDtype, ...] = ("float32", "int8")


def of_demo() -> dict[str, float]:
    requests = {dtype: BenchRequest(DEMO_NAME, dtype=dtype, budget_s=BUDGET_S, backend="onnx") for dtype in DTYPES}
    return _compared("demo", requests, DEMO_LOAD)


def of_minilm() -> dict[str, float]:
    options = {"data": minilm.test_file(), "budget_s": BUDGET_S, "backend": "onnx", "largest": 32}
    requests = {dtype: BenchRequest(str(minilm.prepared(dtype)), dtype=dtype, **options) for dtype in DTYPES}  # type: ignore[arg-type]
    return _compared("minilm", requests, MINILM_LOAD)


def _compared(name: str, requests: dict[RampDtype, BenchRequest], load: Load) -> dict[str, float]:
    figures = dict[str, float]()
    for dtype, wish in requests.items():
        bench, _ = make(wish)
        figures |= _of_one(name if dtype == "float32" else f"{name}_{dtype}", bench, load)
    return figures


def _of_one(called: str, bench: Bench, load: Load) -> dict[str, float]:
    rows = list(bench.compare([load.slo_ms], load.seconds, load.rounds))
    figures = {f"{called}_{what}": ratio for what, ratio in ratios(rows, load.slo_ms).items()}
    figures |= {f"{called}_{NAMES[row.system]}_per_s": row.goodput_per_s for row in rows}
    full, exits = (accuracy(bench.model, bench.source, ramps) for ramps in ((), bench.model.ramp_blocks))
    return figures | {f"{called}_exits_cost_points": 100 * (full - exits)}


def ratios(rows: Sequence[ComparedSystem], slo_ms: float) -> dict[str, float]:
    """The goodput of constant batch over that of each other system that serves anything."""
    systems = {row.system: row for row in rows if row.slo_ms == slo_ms}
    constant = next(row for system, row in systems.items() if system not in (STOCK, NAIVE))
    names = {"constant_over_naive": systems[NAIVE], "constant_over_stock": systems[STOCK]}
    return {
        name: constant.goodput_per_s / other.goodput_per_s for name, other in names.items() if other.goodput_per_s > 0
    }


def accuracy(model: SplitModel, source: Source, ramps: Collection[int]) -> float:
    """The share of inputs that are answered right with these ramps open."""
    assert source.labels is not None, "This is a bug: what is compared has labels."
    right = list[bool]()
    for start in range(0, len(source.inputs), TOGETHER):
        batch = model.merge(source.inputs[start : start + TOGETHER])
        exits = model.run(batch, model.num_blocks, ramps).exits
        right += (exits.labels == source.labels[start + exits.rows]).tolist()
    return float(np.mean(right))
