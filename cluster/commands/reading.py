"""Options that several commands share: for a file of inputs, and for the times at which inputs arrive."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiles.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.load.workloads import Floats
    from deployments.prepare.data import Columns
    from deployments.prepare.records import Layout
    from deployments.prepare.sample import LabelNames

READS = "csv, tsv, jsonl, json, Parquet, a directory of `datasets`, npz for images, or CoNLL for labelled words"

Labels = Annotated[
    str | None, typer.Option(help="The head's numbers for the file's labels, if their names differ: neg=0,pos=1")
]


@dataclass(frozen=True, kw_only=True)
class TextFileOptions:
    """The options for a file of texts."""

    text_column: Annotated[
        str | None, typer.Option(help="Column of the texts; if not given, found by common names.")
    ] = None
    columns: Annotated[
        str | None,
        typer.Option("--columns", help="Names for the columns of a file without a header: label,title,text"),
    ] = None
    delimiter: Annotated[
        str | None, typer.Option(help="Character between columns; by default a comma, in tsv a tab.")
    ] = None
    encoding: Annotated[str, typer.Option(help="Encoding of a text file, such as cp1252.")] = "utf-8"

    @property
    def data_columns(self) -> "Columns":
        from deployments.prepare.data import Columns

        return Columns(self.text_column, None, None, None, self._layout)

    @property
    def _layout(self) -> "Layout":
        from deployments.prepare.records import UTF8, Layout

        divider = (self.delimiter or "").replace("\\t", "\t")
        if len(divider) > 1:
            raise UserError(f"--delimiter {self.delimiter!r} must be one character")
        names = tuple(self.columns.split(",")) if self.columns else None
        encoding = UTF8 if self.encoding.lower() in ("utf-8", "utf8") else self.encoding
        return Layout(names, divider or None, encoding)


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(TextFileOptions):
    """The options for a file of inputs of any type."""

    text_pair_column: Annotated[str | None, typer.Option(help="Column of the second texts of pairs.")] = None
    image_column: Annotated[str | None, typer.Option(help="Column of picture paths or of nested arrays.")] = None
    label_column: Annotated[str | None, typer.Option(help="Column of the labels.")] = None

    @property
    def data_columns(self) -> "Columns":
        from deployments.prepare.data import Columns

        return Columns(self.text_column, self.text_pair_column, self.image_column, self.label_column, self._layout)


def label_names(names: "Sequence[str]", labels: str | None) -> "LabelNames":
    """The names of labels: the head's, and those in --labels."""
    from deployments.prepare.sample import LabelNames

    return LabelNames(names, pairs_of(labels))


def pairs_of(labels: str | None) -> "Mapping[str, str]":
    """
    >>> pairs_of("neg=0, pos=1")
    {'neg': '0', 'pos': '1'}
    """
    parts = [part.partition("=") for part in (labels or "").split(",") if part.strip()]
    if wrong := next(("".join(part) for part in parts if not (part[0].strip() and part[2].strip())), None):
        raise UserError(f"--labels {wrong!r} must be NAME=NUMBER, as in neg=0,pos=1")
    return {name.strip(): number.strip() for name, _, number in parts}


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions:
    """The options for when inputs arrive: by a process at a rate, or as in a trace."""

    rate: Annotated[
        float | None, typer.Option(help="Inputs per second on average. None with --trace: the trace's own rate.")
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="A recorded trace to follow, scaled to --rate (docs/simulator.md: formats).")
    ] = None
    trace_each_s: Annotated[
        float | None, typer.Option(help="Seconds for which each count of the trace is, if the file does not say it.")
    ] = None
    arrivals: Annotated[str, typer.Option(help="poisson, gamma, uniform, step or daynight.")] = "poisson"
    cv: Annotated[float, typer.Option(help="Variation of the gaps between arrivals (gamma).")] = 3.0
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same arrivals.")] = 0

    @property
    def given(self) -> bool:
        return self.rate is not None or self.trace is not None

    @property
    def trace_text(self) -> str:
        """How the trace's file was understood; empty without a trace."""
        from cluster.load.traces import description

        return description(self.trace, self.trace_each_s) if self.trace else ""

    def times_s(self, seconds: float) -> "Floats":
        from cluster.load import traces, workloads

        if self.trace:
            return traces.trace(self.trace, self.rate, seconds, self.seed, self.trace_each_s)
        if self.rate is None:
            raise UserError("give --rate, or --trace to follow a trace at its own rate")
        return workloads.arrivals(self.arrivals, self.rate, seconds, self.seed, self.cv)
