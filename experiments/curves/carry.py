"""Copies published latencies into experiments/curves/published.csv: `python -m experiments.curves.carry`.

For each framework and device it takes the newest release, and networks of known shape. It leaves out inputs of more
than 512 tokens, mixed precisions, calls to a server (Triton), and times that a slow host dominates (below).
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from experiments.curves.published import PUBLISHED_FILE
from experiments.shared.machine import data

FILES = ("tensorrt_demobert", "fastertransformer", "deeplearningexamples", "aitemplate", "pytorch_onnxruntime_misc")
KINDS = {"A100": "a100", "A100-40GB": "a100", "A100-80GB": "a100", "L4": "l4", "RTX3090": "rtx3090", "T4": "t4"}
KINDS |= {"V100": "v100", "V100-16GB": "v100", "V100-32GB": "v100", "A10": "a10", "A40": "a40"}
DTYPES = {"fp16": "float16", "fp32": "float32"}
NETWORKS = {"bert-base": "bert-base", "bert-base-encoder": "bert-base", "bge-base (bert-base)": "bert-base"}
NETWORKS |= {name: name for name in ("bert-large", "bert-6l-768h", "bert-4l-288h", "resnet50")}
NETWORKS |= {"vit-b16-224": "vit-b", "vit-b16-384": "vit-b", "vit-l16-384": "vit-l", "vit-l16-224": "vit-l"}
COLUMNS = ("kind", "framework", "backend", "dtype", "network", "length", "clock", "ms_by_batch", "source")
LONGEST = 512  # beyond, the memory of attention decides
# A host of 1.7 GHz took 1.0 to 1.4 ms for a layer, others take 0.5: its small batches measure the host.
SLOW_HOST = "FasterTransformer"
FLAT = 1.5  # times up to this multiple of the fastest one are the host's
# Frameworks by their names in the sources, with our equivalent backend and the clock of the measurement.
FRAMEWORKS = (
    ("TensorRT 7.2 demoBERT", "tensorrt", "device"),
    ("TensorRT 8.5.1 demoBERT", "tensorrt", "device"),
    ("TensorRT 10.8 demoBERT", "tensorrt", "device"),
    ("TensorRT 8.5 (22.09)", "tensorrt", "wall"),
    ("ORT-CUDA", "onnx", "wall"),
    ("PyTorch eager", "torch", "wall"),
    ("TorchInductor 1.14dev (CUDA graph)", "graphs", "wall"),
    ("AITemplate (CUDA graph)", "graphs", "device"),
)
DOUBTFUL = {"PyTorch eager 2.3.0 (HF)"}  # float32 at more than the device's peak rate, rounded to 1 ms
SUPERSEDED = {("a100", "TensorRT 7.2 demoBERT"), ("a100", "TensorRT 8.5.1 demoBERT"), ("t4", "TensorRT 7.2 demoBERT")}


class Carried(NamedTuple):
    """The properties of one curve of one source."""

    kind: str
    framework: str
    backend: str
    dtype: str
    network: str
    length: str
    clock: str
    source: str


def carry() -> None:
    result: defaultdict[Carried, dict[int, float]] = defaultdict(dict)
    for file in FILES:
        with data(f"profiles/published/{file}.csv").open(newline="") as rows:
            for series, batch, ms in _taken(csv.DictReader(rows)):
                result[series].setdefault(batch, ms)
    with PUBLISHED_FILE.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for series in sorted(result):
            if by_batch := _of_the_framework(series, result[series]):
                pairs = " ".join(f"{batch}:{ms:g}" for batch, ms in sorted(by_batch.items()))
                writer.writerow([*series[:7], pairs, series.source])


def _taken(rows: Iterable[dict[str, str]]) -> Iterator[tuple[Carried, int, float]]:
    for row in rows:
        framework = next((each for each in FRAMEWORKS if row["framework"].startswith(each[0])), None)
        kind, network, dtype = KINDS.get(row["gpu"]), NETWORKS.get(row["network"]), DTYPES.get(row["precision"])
        if not (framework and kind and network and dtype and row["batch"]) or row["kind"] != "mean":
            continue
        if int(row["seq_len"] or 0) > LONGEST or (kind, framework[0]) in SUPERSEDED or row["framework"] in DOUBTFUL:
            continue
        name, backend, clock = row["framework"], framework[1], framework[2]
        series = Carried(kind, name, backend, dtype, network, row["seq_len"], clock, row["source"])
        yield series, int(row["batch"]), float(row["latency_ms"])


def _of_the_framework(series: Carried, by_batch: dict[int, float]) -> dict[int, float]:
    """The times without those of a slow host."""
    if series.backend != "torch" or SLOW_HOST not in series.source:
        return by_batch
    fastest = min(by_batch.values())
    return {batch: ms for batch, ms in by_batch.items() if ms > FLAT * fastest}


if __name__ == "__main__":
    carry()
