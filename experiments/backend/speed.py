"""Compares ONNX Runtime with torch, family by family, on the same untrained network at its true shape, in turns."""

from functools import partial
from statistics import geometric_mean, median

from experiments.backend.families import batches, untrained
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.served_model import BlockRange
from isobatch.profiles.measure import stopwatch_for
from isobatch.profiles.model import Batch, SplitModel

FAMILIES = {"bert": "bert-base", "distilbert": "distilbert", "vit": "vit-base", "resnet": "resnet-50"}
TEXTS = ("bert", "distilbert")  # whose dense layers 8 bits are for
SIZES, LENGTH, ROUNDS = (1, 8), 32, 3


def of_family(family: str, layers: int | None = None) -> dict[str, float]:
    """Geometric means, over sizes, of ratios of medians. `layers`: fewer than there are, for a trial."""
    name = FAMILIES[family]
    exact, batch_of = untrained(name, layers=layers), batches(name, LENGTH)
    systems: dict[str, SplitModel] = {"torch": exact}
    for other in ("onnx", "int8") if family in TEXTS else ("onnx",):
        served = OnnxModel(exact, f"untrained {family}", int8=other == "int8")
        served.prepare([BlockRange(0, exact.num_blocks)], batch_of(1))
        systems[other] = served
    by_size = [_in_turns(systems, batch_of(size)) for size in SIZES]
    figures = {
        f"{other}_over_torch_{family}": geometric_mean(took["torch"] / took[other] for took in by_size)
        for other in systems
        if other != "torch"
    }
    return figures | {f"torch_{family}_per_s": SIZES[-1] / by_size[-1]["torch"]}


def _in_turns(systems: dict[str, SplitModel], batch: Batch) -> dict[str, float]:
    """The median seconds of each system, which take turns."""
    stopwatch = stopwatch_for("cpu")
    took_s: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(1 + ROUNDS):  # the first one warms up
        for name, model in systems.items():
            took_s[name].append(stopwatch(partial(model.run, batch, model.num_blocks, ()))[1])
    return {name: median(seconds[1:]) for name, seconds in took_s.items()}
