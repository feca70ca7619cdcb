"""Claim: a table from datasheets alone has the shape of real curves. Its error is measured on three public sources:

- Vidur's layer times (half precision): seconds of each kernel for 1..4096 tokens. The A100's gave the constants.
- MLPerf's offline rates (8-bit engines, whole systems): how much faster one device is than another, not the rates.
- Gavel's training rates (single precision): how much faster P100 and V100 are than K80.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.shared.public_data import data
from isobatch.profiles.datasheet import Kernel, Shape, bert_large, datasheet_table, kernel_s, linear, resnet50
from isobatch.profiles.devices import CATALOGUE
from isobatch.profiles.sweep import whole_s

GAVEL, MLPERF = (
    "profiles/gavel/isolated_throughputs_derived.csv",
    "profiles/mlperf/inference_v4.1_closed_bert_resnet_retinanet_derived.csv",
)
SQUAD_TOKENS = 176  # what remains of MLPerf's 384 once padding is dropped, as its engines do
MLPERF_NAMES = {
    "l4": "NVIDIA L4",
    "l40s": "NVIDIA L40S",
    "h100": "NVIDIA H100-SXM-80GB",
    "h200": "NVIDIA H200-SXM-141GB",
}


def measure() -> dict[str, float]:
    figures: dict[str, float] = {}
    for device in ("a100", "a40", "h100"):
        errors = np.array([ratio for model in ("llama2_7b", "phi2") for ratio in _vidur(device, model)])
        figures[f"vidur_{device}_median_ratio"] = float(np.median(errors))
        figures[f"vidur_{device}_typical_error"] = float(np.exp(np.median(np.abs(np.log(errors)))) - 1)
        figures[f"vidur_{device}_p95_error"] = float(np.exp(np.quantile(np.abs(np.log(errors)), 0.95)) - 1)
    ratios = Table("model", "devices", "datasheet", "measured", title="how much faster, device against device")
    figures |= _mlperf(ratios) | _gavel(ratios)
    Console(stderr=True).print(ratios)
    return figures


def _vidur(device: str, model: str) -> Iterator[float]:
    """The ratio of the datasheet's time to the measured one, for every dense layer and every number of tokens."""
    with data(f"profiles/vidur/{device}_{model}_mlp.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["num_tensor_parallel_workers"] == "1"]
    for row in rows:
        hidden, inner, tokens = int(row["n_embd"]), int(row["n_expanded_embd"]), int(row["num_tokens"])
        wide = 2 * inner if row["use_gated_mlp"] == "True" else inner
        sizes = {"attn_pre_proj": (hidden, 3 * hidden), "attn_post_proj": (hidden, hidden)}
        sizes |= {"mlp_up_proj": (hidden, wide), "mlp_down_proj": (inner, hidden)}
        for name, (into, out) in sizes.items():
            seconds = float(row[f"time_stats.{name}.median"]) / 1000
            yield _of_tokens(linear(1, into, out), tokens, device) / seconds


def _of_tokens(kernel: Kernel, tokens: int, device: str) -> float:
    return kernel_s(kernel, tokens, CATALOGUE[device], "float16")


def _mlperf(table: Table) -> dict[str, float]:
    """Rates relative to the H100, with every device at its best batch size."""
    figures = {}
    for model, shape in (("bert-99", bert_large(SQUAD_TOKENS)), ("resnet50", resnet50())):
        real = {device: _offline_rate(model, name) for device, name in MLPERF_NAMES.items()}
        predicted = {device: _rate(shape, device, 64, "float16") for device in MLPERF_NAMES}
        for device in ("l4", "l40s", "h200"):
            pair = predicted[device] / predicted["h100"], real[device] / real["h100"]
            figures[f"mlperf_{model}_{device}_over_h100"] = pair[0] / pair[1]
            table.add_row(model, f"{device} / h100", *(f"{value:.2f}" for value in pair))
    return figures


def _offline_rate(model: str, accelerator: str) -> float:
    """The median over submitters of samples per second and device."""
    with data(MLPERF).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["scenario"]) == (model, "Offline")]
    rows = [
        row for row in rows if row["accelerator"] == accelerator and row["valid"] == "VALID" and row["samples_per_s"]
    ]
    return float(np.median([float(row["samples_per_s"]) / float(row["accelerators_per_node"]) for row in rows]))


def _gavel(table: Table) -> dict[str, float]:
    """Rates relative to the K80 at the same batch size: our forward pass beside Gavel's training step."""
    rates: dict[tuple[str, int], float] = defaultdict(float)
    with data(GAVEL).open(newline="") as file:
        for row in csv.DictReader(file):
            if row["job"].startswith("ResNet-50") and row["scale_factor"] == "1":
                batch = int(row["job"].split()[-1].rstrip(")"))
                rates[row["gpu"], batch] = float(row["throughput_steps_per_s"])
    figures = {}
    for device in ("p100", "v100"):
        pairs = []
        for batch in (16, 32, 64):
            predicted = _rate(resnet50(), device, batch, "float32") / _rate(resnet50(), "k80", batch, "float32")
            pairs.append((predicted, rates[device, batch] / rates["k80", batch]))
            table.add_row(f"resnet-50, batch {batch}", f"{device} / k80", *(f"{value:.2f}" for value in pairs[-1]))
        figures[f"gavel_resnet50_{device}_over_k80"] = float(np.median([predicted / real for predicted, real in pairs]))
    return figures


def _rate(shape: Shape, device: str, batch: int, dtype: str) -> float:
    return batch / float(whole_s(datasheet_table(shape, device, dtype=dtype, batch_sizes=(batch,)))[0])
