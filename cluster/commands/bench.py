"""`isobatch bench`: what constant batches gain for a network on the device at hand, without any cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.reading import (
    READS,
    Delimiter,
    Encoding,
    Header,
    ImageColumn,
    LabelColumn,
    Labels,
    PairColumn,
    TextColumn,
    columns_of,
    pairs_of,
)
from deployments.named import known_backend
from profiles.errors import UserError

if TYPE_CHECKING:
    from profiles.files import Profile


def bench(
    model: Annotated[
        str, typer.Argument(help="Directory of a checkpoint made by `isobatch prepare`; demo: the demo's.")
    ],
    data: Annotated[
        Path | None, typer.Option(help=f"Real inputs, with labels if there are, so that exits are real: {READS}.")
    ] = None,
    text_column: TextColumn = None,
    text_pair_column: PairColumn = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    columns: Header = None,
    delimiter: Delimiter = None,
    encoding: Encoding = "utf-8",
    labels: Labels = None,
    profile: Annotated[
        Path | None, typer.Option(help="Of `isobatch profile` on this device; none: measured first, for --budget.")
    ] = None,
    slo_ms: Annotated[str, typer.Option(help="SLOs to compare under.")] = "25,50,100",
    seconds: Annotated[float, typer.Option(min=0.1, help="Load at each rate that is tried, of six.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="The systems take turns; the median round counts.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, or cuda:0.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16, or int8 (CPU, ONNX Runtime).")] = "float32",
    backend: Annotated[str, typer.Option(help="As `backend:` of `isobatch serve`. auto: the fastest here.")] = "auto",
    length: Annotated[int, typer.Option(min=1, help="Tokens per text, where there is no --data.")] = 32,
    largest: Annotated[int, typer.Option(min=1, help="The largest batch.")] = 64,
    budget: Annotated[float, typer.Option(min=0.1, help="Seconds to measure the network for.")] = 20.0,
    threads: Annotated[int, typer.Option(min=1, help="Host threads of a launch.")] = 1,
    streams: Annotated[
        int, typer.Option(min=1, help="Also compare so many launches at once with one at a time, without a deadline.")
    ] = 1,
    max_rows: Annotated[int, typer.Option(min=1, help="A sample of at most so many inputs of --data.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, nothing else.")] = False,
    out: Annotated[Path, typer.Option(help="The same as a file; the picture beside it.")] = Path("bench.json"),
) -> None:
    """Compare the network in full, early exit as it is, and constant batches: what each sustains within an SLO.

    Each is planned by itself for every SLO. Batches are really computed; queues run in virtual time, so that neither a
    front door nor a busy machine is in the way. A rate is sustained when 99 % of the inputs are answered in time.
    "bound" is the share of what no system can exceed by the same table, "depth" the share of blocks that an input runs.
    Without --data, inputs leave as the profile or `isobatch prepare` says, whatever they are.

    Example: [bold]isobatch bench my-bert-ee --data reviews.csv --slo-ms 50,100[/]
    """
    from rich.console import Console

    from cluster.bench import report, setup
    from cluster.commands import check_writable

    console = Console(soft_wrap=True, stderr=as_json, markup=False)
    known_backend(backend)
    slos = _numbers(slo_ms)
    check_writable(out)
    wanted = columns_of(text_column, text_pair_column, image_column, label_column, columns, delimiter, encoding)
    with console.status("loading") as status:
        made = setup.make(
            setup.BenchRequest(
                model,
                data,
                _read(profile),
                device,
                dtype,
                backend,
                length,
                largest,
                budget,
                threads,
                max_rows,
                wanted,
                pairs_of(labels),
            ),
            status.update,
        )
        about_s = made.bench.about_s(slos, seconds, rounds)
        console.print(
            f"comparing computes for up to {about_s:,.0f} s: fewer SLOs (--slo-ms) take less", highlight=False
        )
        several = _several(made.bench, slos, streams, seconds, status.update)
        rows = list(made.bench.compare(slos, seconds, rounds, status.update))
    title = f"{made.bench.profile.model}: {made.table.source}"
    gains = made.bench.gains(slos)
    report.write(rows, made.bench.profile.model, made.table, out, several, gains)
    report.draw(rows, title, out.with_suffix(".png"))
    if as_json:
        print(out.read_text(), end="")
        return
    console.print(report.table(rows, title))
    for note in (
        *report.plan_lines(rows),
        *report.gain_lines(gains),
        *report.stream_lines(several),
        *made.notes,
        *report.unkept(rows, made.table),
        *report.too_short(slos, seconds),
    ):
        console.print(note, highlight=False)
    console.print(f"written to {out}; the picture is {out.with_suffix('.png')}")


def _several(bench: Any, slos: list[float], streams: int, seconds: float, progress: Any) -> list[Any]:
    """Compare one launch at a time with several, for each SLO that a plan keeps; nothing where `streams` is 1."""
    if streams == 1:
        return []
    from cluster.bench import saturated

    found = (saturated.compared(bench, slo_ms, streams, seconds, progress) for slo_ms in slos)
    return [each for each in found if each]


def _numbers(text: str) -> list[float]:
    """
    >>> _numbers("25, 50")
    [25.0, 50.0]
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise UserError(f"--slo-ms {text!r} must be milliseconds, as in 25,50")
    return found


def _read(path: Path | None) -> "Profile | Any":
    from profiles.files import load

    return load(path) if path else None
