"""`isobatch bench`: the gain of constant batches for a network on this machine's device, without a cluster."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isobatch.cluster.commands import Dtype, check_writable, numbers_in
from isobatch.cluster.commands.shared_options import (
    READS,
    DeviceHere,
    Labels,
    LargestTimed,
    ReadingOptions,
    check_no_file,
    check_unread,
    pairs_of,
    with_options,
)
from isobatch.deployments.named import DEMO_NAME, known_backend
from isobatch.deployments.progress import busy
from isobatch.profiles.errors import naming_target

LENGTH = 32  # tokens: the default of --length
MAX_ROWS = 1000  # the default of --max-rows


@with_options(reading=ReadingOptions)
def bench(
    reading: ReadingOptions,
    model: Annotated[
        str, typer.Argument(help="Directory of a checkpoint made by `isobatch prepare`; demo: the demo's.")
    ],
    data: Annotated[Path | None, f"Real inputs, with or without labels, for realistic exits: {READS}."] = None,
    labels: Labels = None,
    slo_ms: Annotated[str, "SLOs for which to compare."] = "25,50,100",
    seconds: Annotated[float, typer.Option(min=0.1, help="The duration of each load; six rates are tried.")] = 1.0,
    device: DeviceHere = "auto",
    dtype: Annotated[Dtype | None, "Precision of the network; int8 on CPUs only. None: as isobatch profile."] = None,
    backend: Annotated[str, "As `backend:` of `isobatch serve`. auto: the fastest here."] = "auto",
    length: Annotated[int, typer.Option(min=1, help="Tokens per text, without --data.")] = LENGTH,
    largest: LargestTimed = None,
    timing_s: Annotated[float, typer.Option(min=0.1, help="Seconds of timing.")] = 20.0,
    threads: Annotated[int, typer.Option(min=1, help="Host threads of a launch.")] = 1,
    max_rows: Annotated[int, typer.Option(min=1, help="The most inputs of --data; more are sampled.")] = MAX_ROWS,
    as_json: Annotated[bool, "Print only the result, as JSON."] = False,
    out: Annotated[Path, "File for the same result."] = Path("bench.json"),
) -> None:
    """Compare the full network, plain early exit, and constant batches: the rate that each sustains within an SLO.

    Each system is planned separately for each SLO. Batches are computed on the device; queues run in virtual time, so
    neither a front nor a busy machine affects the result. A rate is sustained if 99 % of the inputs are answered in
    time. "bound" is the share of an upper bound from the same launch table, "depth" the share of blocks that an input
    runs. Without --data, inputs leave as `isobatch prepare` says, whatever their content.

    Example: [bold]isobatch bench my-bert-ee --data reviews.csv --slo-ms 50,100[/]
    """

    from isobatch.cluster.bench import compare, setup

    console = Console(soft_wrap=True, stderr=as_json, markup=False)
    known_backend(backend)
    check_unread({"--length": data and length != LENGTH}, "is for texts that are made up: leave it out with --data")
    if data is None:  # the demo has inputs of its own
        check_no_file(reading, labels=labels, max_rows=model != DEMO_NAME and max_rows != MAX_ROWS)
    slos = numbers_in("--slo-ms", slo_ms, float, "milliseconds above 0, as in 25,50")
    check_writable(out, data)
    with busy("loading") as now:
        request = setup.BenchRequest(
            model, data, device, dtype, backend, length, largest, timing_s, threads, max_rows,
            reading.data_columns, pairs_of(labels),
        )  # fmt: skip
        made, notes = setup.make(request, now)
        rows = list(made.compare(slos, seconds, rounds=1, progress=now))
    model, (table,), gains = made.profile.model, made.profile.tables, made.gains(slos)
    with naming_target(out, out):
        compare.write(rows, model, table, out, gains)
    if as_json:
        print(out.read_text(), end="")
        return
    console.print(compare.table(rows, f"{model}: {table.source}"))
    notes += (*compare.unkept(rows, table), *compare.too_short(slos, seconds))
    for note in (*compare.plan_lines(rows), *compare.gain_lines(gains), *notes):
        console.print(note, highlight=False)
    console.print(f"written to {out}")
