"""`isobatch profile`: how long a network's blocks take on this machine, and where its inputs leave."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiles.errors import UserError

if TYPE_CHECKING:
    from cluster.profiling import Inputs
    from deployments.models import TorchModel


def profile(
    model: Annotated[str, typer.Argument(help="Directory or hub id of a checkpoint, prepared or not.")],
    out: Annotated[Path, typer.Option(help="File to write, or to add this device to.")] = Path("profile.json"),
    device: Annotated[str, typer.Option(help="auto, cpu, or cuda:0.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    data: Annotated[Path | None, typer.Option(help="Recorded inputs (csv, tsv, jsonl, npz): counts exits.")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Count exits over at most so many of them.")] = 2000,
    budget: Annotated[float, typer.Option(min=0.1, help="Seconds to spend on timing.")] = 60.0,
    lengths: Annotated[str, typer.Option(help="Tokens per text to measure at; images have one size.")] = "32,128",
    largest: Annotated[int, typer.Option(min=1, help="The largest batch to measure.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Host threads; a Ray replica has one per CPU it asks for.")] = 1,
    kind: Annotated[str | None, typer.Option(help="Name of this kind of device, if not the catalogue's.")] = None,
) -> None:
    """Measure blocks, ramps and launches at batch sizes from 1 upwards. Ctrl-C keeps what is measured.

    Example: [bold]isobatch profile my-bert-ee --data reviews.csv --budget 60[/]
    """
    import torch
    from rich.console import Console

    from cluster.profiling import in_batches, kind_of, picture_path, report, source_of, timed
    from deployments.models import load
    from profiles.files import Profile, save
    from profiles.files import load as load_profile
    from profiles.measure import count_exits, device_name
    from profiles.picture import draw

    tokens = _lengths(lengths)
    torch.set_num_threads(threads)
    known = load_profile(out) if out.exists() else None
    network = load(model, device=device, dtype=dtype)
    where = str(network.device)
    called = device_name(where)
    source = source_of(called, dtype, threads)
    recorded = _recorded(model, data, max_rows) if data else []
    inputs = _inputs(network, model, tokens)
    measured = timed(network, inputs, kind or kind_of(called), source, where, budget, largest)
    interrupted = any(each.interrupted for each in measured)
    exits = count_exits(network, in_batches(network, recorded)) if recorded and not interrupted else None
    notes = tuple(str(each) for each in measured)
    new = Profile(Path(model).name, tuple(each.table for each in measured), exits, notes)
    save(known.joined_by(new) if known else new, out)
    draw(new, picture_path(out))
    console = Console(soft_wrap=True)
    console.print(report(new))
    for note in notes:
        console.print(note, highlight=False)
    console.print(f"written to {out}; the picture is {picture_path(out)}")
    if interrupted:
        raise typer.Exit(130)


def _lengths(text: str) -> list[int]:
    """
    >>> _lengths("32, 128")
    [32, 128]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--lengths {text!r} must be numbers of tokens, as in 32,128")
    return [int(part) for part in parts]


def _inputs(network: "TorchModel", model: str, lengths: list[int]) -> "list[Inputs]":
    from cluster.profiling import images, texts
    from deployments.models import checkpoint

    folder = checkpoint.locate(model)
    if not checkpoint.reads_images(folder):
        return list(texts(network, lengths))
    side, channels = checkpoint.image_size(folder)
    return [images(network, side, channels)]


def _recorded(model: str, data: Path, max_rows: int) -> list[Any]:
    """Inputs from a file, read before anything is timed, so that a wrong one is found at once."""
    from itertools import islice

    from deployments.models import checkpoint
    from deployments.prepare.data import rows

    found = rows(data, images=checkpoint.reads_images(checkpoint.locate(model)))
    values = [row.value for row in islice(found, max_rows)]
    if not values:
        raise UserError(f"{data} holds no inputs")
    return values
