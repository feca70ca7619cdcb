"""The options of several commands for reading a file of inputs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from profiles.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deployments.prepare.data import Columns
    from deployments.prepare.sample import LabelNames

READS = "csv, tsv, jsonl, json, Parquet, a directory of `datasets`, npz for images, or CoNLL for labelled words"

TextColumn = Annotated[str | None, typer.Option(help="Column of the texts; if not given, found by common names.")]
PairColumn = Annotated[str | None, typer.Option(help="Column of the second texts of pairs.")]
ImageColumn = Annotated[str | None, typer.Option(help="Column of picture paths or of nested arrays.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of the labels.")]
Header = Annotated[
    str | None, typer.Option("--columns", help="Names for the columns of a file without a header: label,title,text")
]
Delimiter = Annotated[str | None, typer.Option(help="Character between columns; by default a comma, in tsv a tab.")]
Encoding = Annotated[str, typer.Option(help="Encoding of a text file, such as cp1252.")]
Labels = Annotated[
    str | None, typer.Option(help="The head's numbers for the file's labels, if their names differ: neg=0,pos=1")
]


@dataclass(frozen=True)
class ReadingOptions:
    """The values of these options, as a part of a command's options."""

    text_column: str | None
    text_pair_column: str | None
    image_column: str | None
    label_column: str | None
    columns: str | None
    delimiter: str | None
    encoding: str

    @property
    def data_columns(self) -> "Columns":
        columns = (self.text_column, self.text_pair_column, self.image_column, self.label_column, self.columns)
        return columns_of(*columns, self.delimiter, self.encoding)


def columns_of(
    text: str | None,
    pair: str | None,
    image: str | None,
    label: str | None,
    header: str | None,
    delimiter: str | None,
    encoding: str,
) -> "Columns":
    from deployments.prepare.data import Columns
    from deployments.prepare.records import UTF8, Layout

    divider = (delimiter or "").replace("\\t", "\t")
    if len(divider) > 1:
        raise UserError(f"--delimiter {delimiter!r} must be one character")
    names = tuple(header.split(",")) if header else None
    layout = Layout(names, divider or None, UTF8 if encoding.lower() in ("utf-8", "utf8") else encoding)
    return Columns(text, pair, image, label, layout)


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
