"""Measures how a machine's cores are best shared: by few replicas with many threads, or by many with few.

Run as a program, this is one replica: it loads, says so, waits for a line, computes for some seconds, prints its rate.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

BATCH, LENGTH, NETWORK = 8, 32, "distilbert"
SECONDS = 3.0
ROOT = Path(__file__).parents[2]


def compared() -> dict[str, float]:
    """The rates of one replica and of one per core, each with one thread and with one per core; and the best way."""
    cores = os.cpu_count() or 1
    rates = {way: rate_per_s(*way, SECONDS) for way in product((1, cores), (1, cores))}
    figures = {f"replicas_{count}_threads_{threads}_per_s": rate for (count, threads), rate in rates.items()}
    best_replicas, best_threads = max(rates, key=lambda way: rates[way])
    return figures | {"best_replicas": best_replicas, "best_threads": best_threads}


def rate_per_s(replicas: int, threads: int, seconds: float) -> float:
    """Inputs per second of so many processes at once."""
    command = [sys.executable, "-m", __name__, str(threads), str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(replicas)
        ]
        for each in running:
            _line(each)
        for each in running:
            assert each.stdin
            each.stdin.write("go\n")
            each.stdin.flush()
        return sum(float(_line(each)) for each in running)


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a replica ended with exit code {process.wait()} before it had told its rate")
    return line


def main(arguments: Sequence[str]) -> None:
    import torch

    from experiments.backend.families import batches, untrained
    from isobatch.deployments.models.onnx_model import OnnxModel
    from isobatch.deployments.models.served_model import BlockRange

    threads, seconds = int(arguments[0]), float(arguments[1])
    torch.set_num_threads(threads)
    exact = untrained(NETWORK)
    batch = batches(NETWORK, LENGTH)(BATCH)
    model = OnnxModel(exact, f"untrained {NETWORK}")
    model.prepare([BlockRange(0, exact.num_blocks)], batch)
    model.run(batch, exact.num_blocks, ())
    print("ready", flush=True)
    sys.stdin.readline()
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        model.run(batch, exact.num_blocks, ())
        count += BATCH
    print(count / (time.perf_counter() - begun), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
