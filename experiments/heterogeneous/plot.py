"""The picture, from the rows that were measured: `python -m experiments.heterogeneous.plot`."""

from pathlib import Path

from experiments.gains import draw, read
from experiments.heterogeneous.suite import SUITE

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "heterogeneous.png"


def plot() -> None:
    draw(read(HERE / "results.csv"), SUITE, PICTURE)


if __name__ == "__main__":
    plot()
