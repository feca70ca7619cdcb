"""The picture, from the rows that were measured: `python -m experiments.homogeneous.plot`."""

import csv
from pathlib import Path

from experiments.gains import Row, draw
from experiments.homogeneous.suite import SUITE

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "homogeneous.png"


def plot() -> None:
    with (HERE / "results.csv").open(newline="") as file:
        rows = [
            Row(row.pop("system"), int(row.pop("batch")), **{k: float(v) for k, v in row.items()})
            for row in csv.DictReader(file)
        ]
    draw(rows, f"{SUITE.network.name} on {SUITE.devices}, simulated, SLO {SUITE.slo_s * 1e3:g} ms", PICTURE)


if __name__ == "__main__":
    plot()
