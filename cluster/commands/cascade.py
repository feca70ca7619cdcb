"""`isobatch cascade`: combines small and large networks, so that the large ones run only for difficult inputs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from isobatch.cluster.commands import METRICS, Metric, above_0
from isobatch.cluster.commands.shared_options import (
    MOST_SEED,
    READS,
    DeviceHere,
    Labels,
    ReadingOptions,
    with_options,
)


@dataclass(frozen=True, kw_only=True)
class CascadeOptions:
    models: Annotated[
        list[str], typer.Argument(help="Directories or hub ids, from the smallest to the largest; prepared or not.")
    ]
    data: Annotated[Path, f"Inputs, labelled or not, on which no network was trained: {READS}."]
    out: Annotated[Path, "Directory to write the best combination to."]
    devices: Annotated[str, "The fleet, as in cpu=2 or a100=6,t4=15@0.45 (dollars per hour)."]
    slo_ms: Annotated[float, "The deadline that plans must keep."] = 1000.0
    max_accuracy_loss: Annotated[str, "The most that may be lost compared with the last network alone."] = "1%"
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="The confidence with which the loss is tested.")
    ] = 0.95
    metric: Annotated[
        Metric | None, typer.Option(help=f"What the loss is measured by: {METRICS}.", show_default="accuracy")
    ] = None
    policy: Annotated[str, "Which inputs leave early: entropy, confidence, margin, or module:function."] = "entropy"
    levels: Annotated[int, typer.Option(min=1, max=4, help="The most networks in a cascade.")] = 2
    labels: Labels = None
    max_rows: Annotated[int, typer.Option(min=50, help="The most rows; more are sampled uniformly.")] = 20_000
    device: DeviceHere = "auto"
    timing_s: Annotated[float, typer.Option(min=0.1, help="Seconds of timing for each network.")] = 20.0
    largest: Annotated[int, typer.Option(min=1, help="The largest batch to measure.")] = 32
    threads: Annotated[int, typer.Option(min=1, help="Host threads; a Ray replica has one for each of its CPUs.")] = 1
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="For the sample and its parts.")] = 0
    force: Annotated[bool, "Replace OUT if it is a prepared model."] = False


@with_options(options=CascadeOptions, reading=ReadingOptions)
def cascade(options: CascadeOptions, reading: ReadingOptions) -> None:
    """Combine small and large networks, and write the combination that serves most within the allowed loss.

    Each network runs once over the data. Each network alone, each with its exits, and all their cascades are planned
    for the fleet and simulated. The combination that serves most is tested on rows from which nothing was chosen.

    Example: [bold]isobatch cascade my-minilm my-bert --data reviews.csv --devices cpu=4 --slo-ms 200 --out both[/]
    """
    from isobatch.cluster.commands.cascade_run import run

    above_0("--slo-ms", options.slo_ms)
    run(options, reading)
