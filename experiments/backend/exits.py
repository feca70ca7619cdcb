"""What exits and constant batches are worth on one host thread, and whether they still are on a compressed network.

Each network is compared in float32 and in 8 bits, with ramps made for it (E3's figure 9 puts exits on compressed
models). What becomes of ramps that were made for float32 is measured too: it is why `isobatch prepare` has a --dtype.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deployments.demo import demo_digits, demo_directory
from deployments.models import load
from deployments.models.backends import make_ready, on_backend
from deployments.models.ramps import RampDtype
from deployments.models.stretch import Stretch
from experiments.backend import minilm
from experiments.onedevice.compare import CONSTANT
from experiments.onedevice.report import ratios
from experiments.onedevice.setting import DEMO, Wish, make
from profiles.model import Exits, SplitModel

BUDGET_S, LOAD_S, ROUNDS = 10.0, 0.7, 1
DEMO_SLO_MS, MINILM_SLO_MS = 50.0, 1000.0
COUNT = 500  # inputs that ramps made for float32 are tried on in 8 bits
DTYPES: tuple[RampDtype, ...] = ("float32", "int8")


def of_demo() -> dict[str, float]:
    wishes = {dtype: Wish(DEMO, dtype=dtype, budget_s=BUDGET_S, backend="onnx") for dtype in DTYPES}
    digits, labels = demo_digits(COUNT)
    return _compared("demo", wishes, DEMO_SLO_MS) | _made_for_another("demo", demo_directory(), list(digits), labels)


def of_minilm() -> dict[str, float]:
    file = minilm.test_file()
    wishes = {
        dtype: Wish(str(minilm.prepared(dtype)), data=file, dtype=dtype, budget_s=BUDGET_S, backend="onnx", largest=32)
        for dtype in DTYPES
    }
    texts, labels = minilm.sentences("test", COUNT)
    return _compared("minilm", wishes, MINILM_SLO_MS) | _made_for_another("minilm", minilm.prepared(), texts, labels)


def _compared(name: str, wishes: dict[RampDtype, Wish], slo_ms: float) -> dict[str, float]:
    figures = dict[str, float]()
    for dtype, wish in wishes.items():
        called = name if dtype == "float32" else f"{name}_{dtype}"
        rows = list(make(wish).bench.compare([slo_ms], LOAD_S, ROUNDS))
        figures |= {f"{called}_{what}": ratio for what, ratio in ratios(rows, slo_ms).items()}
        for row in rows:
            system = row.system.replace(" ", "_")
            figures[f"{called}_{system}_per_s"] = row.goodput_per_s
            figures[f"{called}_{system}_accuracy"] = row.accuracy or 0.0
            figures[f"{called}_{system}_depth"] = row.mean_depth or 0.0
    constant = CONSTANT.replace(" ", "_")
    gain = figures[f"{name}_int8_{constant}_per_s"] / figures[f"{name}_{constant}_per_s"]
    return figures | {f"{name}_int8_over_float32": gain}


def _made_for_another(name: str, folder: Path, values: Sequence[Any], labels: np.ndarray[Any, Any]) -> dict[str, float]:
    """Ramps that were made for float32 on 8-bit blocks."""
    exact = load(folder)
    served = on_backend(exact, folder, "onnx", int8=True)
    make_ready(served, folder, [Stretch(0, exact.num_blocks, exact.ramp_blocks)])
    batch = exact.encode(list(values))

    def exits_of(model: SplitModel) -> Exits:
        return model.run(batch, exact.num_blocks, exact.ramp_blocks).exits

    as_made, in_8_bits = exits_of(exact), exits_of(served)
    return {
        f"{name}_int8_float32_ramps_same_exits": float((in_8_bits.blocks == as_made.blocks).mean()),
        f"{name}_int8_float32_ramps_accuracy_lost": float(
            (as_made.labels == labels).mean() - (in_8_bits.labels == labels).mean()
        ),
    }
