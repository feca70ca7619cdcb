"""`isobatch predict`: answers every input of a file, with a network here or through a server."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from isobatch.cluster.bulk import Answerer, answer_rows, check_out, finish, part_of
from isobatch.cluster.client import outputs_from
from isobatch.cluster.commands import (
    INTERRUPTED,
    Dtype,
    KeyVariable,
    check_writable,
    key_headers,
    server_at,
    share_cores,
)
from isobatch.cluster.commands.shared_options import (
    READS,
    DeviceHere,
    ReadingOptions,
    check_separator,
    check_unread,
    with_options,
)
from isobatch.cluster.load.request_bodies import accepted_at, predicts_at
from isobatch.deployments.folders import content_of, hash_of, locked
from isobatch.deployments.progress import show
from isobatch.deployments.tasks import SCORES, Outputs, are_scores, task_of, top_of
from isobatch.profiles.errors import UserError, naming_target

WEIGHTS = ".safetensors"  # the suffix of files of weights
SERVED_AT_ONCE = 1024  # rows that a server answers between two moments at which answers are kept
Listed = str | int  # the labels to list, as in a request


@dataclass(frozen=True)
class _Source:
    name: str
    channels: int | None  # of images; None: it reads texts
    parts: bool  # the words of a text, or the pixels or points of a picture, get an answer each
    at_once: int  # rows
    answerer: Callable[[], Answerer]
    preprocessor: str = ""  # a hash of the files that say how inputs are read; "": a server's


@with_options(reading=ReadingOptions)
def predict(
    reading: ReadingOptions,
    data: Annotated[Path, typer.Argument(metavar="FILE", help=f"Inputs, labelled or not: {READS}.")],
    out: Annotated[Path, "File to write: .csv, .jsonl or .parquet."],
    model: Annotated[str | None, "Directory, hub id or URL of a checkpoint: this process answers."] = None,
    url: Annotated[str | None, "Address of a server that answers."] = None,
    api_key_variable: KeyVariable = None,
    scores: Annotated[str, "The labels to list with their probabilities: winner, all, or a number of them."] = "winner",
    full: Annotated[bool, "Answers of the full network, without exits."] = False,
    device: DeviceHere = "auto",
    dtype: Annotated[Dtype | None, "With --model: its precision; none: the one for which its ramps were made."] = None,
    force: Annotated[bool, "Start again, and replace OUT."] = False,
) -> None:
    """Answer every input of a file. After an interruption, the same command continues where it stopped.

    Answers have the number of their row. Inputs run in full batches: at every ramp the remaining inputs of several
    batches are joined.

    Example: [bold]isobatch predict reviews.csv --model my-bert-ee --out answers.csv[/]

    Through a server: [bold]isobatch predict reviews.csv --url http://127.0.0.1:8000 --scores all --out answers.jsonl[/]
    """
    if (model is None) == (url is None):
        raise UserError("give either --model DIRECTORY, which answers here, or --url of a server")
    check_unread({"--device": url and device != "auto", "--dtype": url and dtype}, "is for --model: leave it out")
    check_unread({"--api-key-variable": model and api_key_variable}, "is for --url: leave it out")
    check_separator(reading.label_separator)
    check_out(out, force)
    check_writable(out, data)
    listed = int(scores) if scores.isdecimal() else scores
    if not are_scores(listed):
        raise UserError(f"--scores is {scores!r}: {SCORES}")
    console = Console(soft_wrap=True, markup=False, highlight=False)
    headers = key_headers(api_key_variable)
    source = _server(url, headers, listed, full) if url else _local(model or "", listed, full, device, dtype)
    if source.parts and out.suffix == ".csv":
        raise UserError(f"--out {out}: the network gives many labels to each row: write .jsonl or .parquet")
    part, rows = part_of(out), reading.rows(console, data, source.channels, pairs=not source.parts)
    job = {"file": data.name, "network": source.name, "scores": scores, "full": full, "dtype": dtype}
    job["preprocessor"] = source.preprocessor
    with locked(out, f"another isobatch predict writes {out}"), naming_target(part, out):
        if force:
            part.unlink(missing_ok=True)
        try:
            shown = show(rows, f"answering {data.name}")
            count = answer_rows(data, shown, source.answerer(), part, job, source.at_once)
        except KeyboardInterrupt:
            kept = f"{part} has the answers so far; the same command continues from there"
            console.print(f"interrupted: {kept if part.exists() else 'no row was answered yet'}")
            raise typer.Exit(INTERRUPTED) from None
        finish(part, out, reading.label_separator)
    console.print(f"{count:,} rows are answered in {out}")


def _local(model: str, listed: Listed, full: bool, device: str, dtype: Dtype | None) -> _Source:
    share_cores()
    from isobatch.deployments.models import checkpoint
    from isobatch.deployments.models.levels import checkpoints_of
    from isobatch.deployments.models.predict import AT_ONCE

    folder = checkpoint.locate(model)

    def answerer() -> Answerer:
        from isobatch.cluster.evaluation import loaded
        from isobatch.deployments.models.predict import predict as predicted

        network = loaded(folder, device, dtype)
        task, top = task_of(network), top_of(listed, network.num_labels)

        def answer(values: Sequence[Any]) -> list[Outputs]:
            return [
                task.output(each, network.labels, top) | {"exit_block": each.exit_block, "truncated": each.truncated}
                for each in predicted(network, values, not full)
            ]

        return answer

    task = checkpoint.task_at(folder)
    parts = task.by_token or task.by_map
    read = [each for level in checkpoints_of(folder) for each in checkpoint.files(level) if each.suffix != WEIGHTS]
    return _Source(content_of(folder), checkpoint.channels_of(folder), parts, AT_ONCE, answerer, hash_of(read))


def _server(url: str, key: Mapping[str, str], listed: Listed, full: bool) -> _Source:
    at = predicts_at(server_at(url), key)
    accepts, headers = accepted_at(at, key), {**key, **({"X-Full": "1"} if full else {})}

    def answer(values: Sequence[Any]) -> list[Outputs]:
        return list(outputs_from(at, values, headers, scores=listed))

    return _Source(accepts.model, accepts.channels, accepts.parts, SERVED_AT_ONCE, lambda: answer)
