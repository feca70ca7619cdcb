"""E3's evaluation (SOSP'24, section 5) on curves of published times: what each figure asks, and what the paper says.

Every system has batches of exactly the size on the axis, as in the paper. Devices compute in half precision, by eager
PyTorch (what the paper ran) and by ONNX Runtime (what people serve).
"""

from dataclasses import dataclass

from experiments.planner.settings import BERT_BASE, Network

V100S, MIXED = "v100=16", "v100=6,p100=8,k80=15"  # of about the same price
BACKENDS = ("torch", "onnx")
OURS, EARLY, FULL = "isobatch", "early exit", "no exits"


@dataclass(frozen=True)
class E3Setting:
    """One point of an axis: who is compared, on what, with which batches, within how long."""

    network: Network
    devices: str
    batch: int
    slo_s: float = 0.1
    fixed: bool = True
    systems: tuple[str, ...] = (OURS, EARLY, FULL)
    dtype: str = "float16"


@dataclass(frozen=True)
class E3Figure:
    """A figure of the paper: its axis, and two sentences, on what the paper says and why ours may differ."""

    name: str
    title: str
    axis: str
    settings: tuple[tuple[str, E3Setting], ...]  # by what stands on the axis
    paper: str
    differs: str
    paper_gain: float


def _by_batch(network: Network, devices: str, batches: tuple[int, ...]) -> tuple[tuple[str, E3Setting], ...]:
    return tuple((str(batch), E3Setting(network, devices, batch)) for batch in batches)


FIGURES = (
    E3Figure(
        "fig07", "BERT-base on 16 V100", "batch", _by_batch(BERT_BASE, V100S, (1, 2, 4, 8, 16)),
        "E3 answers up to 1.44 times what the early-exit BERT answers, and 1.30 times BERT-base; at batch 1 it is 3 % "
        "behind early exit.",
        "Who leaves where is assumed (half by the middle, as the paper says of its mix), and what its launches cost "
        "is not in the paper.", 1.44,
    ),
    E3Figure(
        "fig13", "BERT-base on 6 V100, 8 P100, 15 K80", "batch", _by_batch(BERT_BASE, MIXED, (1, 2, 4, 8)),
        "E3 answers up to 1.70 times the better of both on devices of the same price.",
        "Nobody published of a P100 or a K80: their curves are estimated from their printed peaks.", 1.70,
    ),
)  # fmt: skip
