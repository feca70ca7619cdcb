"""`isobatch profile`: how long a network's blocks take on this machine, and where its inputs leave."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.commands.reading import (
    READS,
    Delimiter,
    Encoding,
    Header,
    ImageColumn,
    LabelColumn,
    PairColumn,
    ReadingOptions,
    TextColumn,
)
from deployments.named import known_backend


@dataclass(frozen=True)
class _CommonOptions:
    model: str
    out: Path
    device: str
    dtype: str
    budget: float
    threads: int
    kind: str | None
    devices: str


@dataclass(frozen=True)
class ClassifierProfileOptions(_CommonOptions, ReadingOptions):
    """The options for a network that classifies."""

    backend: str
    data: Path | None
    max_rows: int
    lengths: str | None
    largest: int


@dataclass(frozen=True)
class DecoderProfileOptions(_CommonOptions):
    """The options for a decoder, a network that writes texts token by token."""


def profile(
    model: Annotated[
        str,
        typer.Argument(help="Directory or hub id of a checkpoint, prepared or not; demo, llm-demo: the built-in ones."),
    ],
    out: Annotated[Path, typer.Option(help="File to write, or to add this device to.")] = Path("profile.json"),
    device: Annotated[str, typer.Option(help="auto, cpu, or cuda:0.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16, or int8 (CPU, ONNX Runtime).")] = "float32",
    backend: Annotated[
        str,
        typer.Option(help="As `backend:` of `isobatch serve`, which should be the same. auto: the fastest here."),
    ] = "torch",
    data: Annotated[Path | None, typer.Option(help=f"Recorded inputs: counts exits. {READS}.")] = None,
    text_column: TextColumn = None,
    text_pair_column: PairColumn = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    columns: Header = None,
    delimiter: Delimiter = None,
    encoding: Encoding = "utf-8",
    max_rows: Annotated[
        int, typer.Option(min=1, help="Count exits over a sample of at most this many of them.")
    ] = 2000,
    budget: Annotated[
        float, typer.Option(min=0.1, help="Seconds of timing; the first sizes are measured whatever they cost.")
    ] = 60.0,
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens per text to measure at; none: texts as long as those of --data, else 32,128."),
    ] = None,
    largest: Annotated[int, typer.Option(min=1, help="The largest batch to measure.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Host threads; a Ray replica has one per CPU it asks for.")] = 1,
    kind: Annotated[str | None, typer.Option(help="Name of this kind of device, if not the catalogue's.")] = None,
    devices: Annotated[
        str, typer.Option(help="Add tables of these kinds from published times, not measured: v100,p100,k80.")
    ] = "",
) -> None:
    """Measure blocks, ramps and launches at batch sizes from 1 upwards. Ctrl-C keeps what is measured.

    For a decoder, launches of its engine are timed, and the cost of each part of a launch is fitted to them.

    Example: [bold]isobatch profile my-bert-ee --data reviews.csv --budget 60[/]
    """
    values: dict[str, Any] = dict(locals())
    from cluster.commands import check_writable, options_for
    from deployments.decoding.ramp_rules import is_decoder
    from deployments.models import checkpoint

    known_backend(backend)
    check_writable(out)
    source = checkpoint.locate(model)
    if is_decoder(source):
        from cluster.commands.profile_texts import profile_texts

        refusal = "is for classifiers: a decoder's workload is the one that isobatch prepare has measured"
        profile_texts(options_for(DecoderProfileOptions, profile, values, refusal), source)
    else:
        from cluster.commands.profile_inputs import profile_inputs

        profile_inputs(options_for(ClassifierProfileOptions, profile, values, "is for decoders"), source)
