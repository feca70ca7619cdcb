"""The options of commands: parameters of a function, or fields of dataclasses that several commands share.

A text beside the type of an option is its help, as in `Annotated[int, "..."]`, and an option whose default is False is
a flag. Others are annotated for typer.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.console import Console

from isobatch.cluster.load import traces, workloads
from isobatch.cluster.load.workloads import Floats
from isobatch.deployments.named import known_device
from isobatch.deployments.prepare.data import Columns, Row, rows, taken
from isobatch.deployments.prepare.records import UTF8, Layout
from isobatch.deployments.prepare.sample import LabelNames
from isobatch.deployments.resources import check_here, gpus_here
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import MOST_LARGEST, USUAL_LARGEST

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


MOST_SEED = 2**32 - 1  # that every generator of random numbers takes
READS = "csv, tsv, jsonl, json, Parquet, a directory of `datasets`, npz for images, or CoNLL for labelled words"

Labels = Annotated[
    str | None, typer.Option(help="The head's numbers for the file's labels, if their names differ: neg=0,pos=1")
]

Queries = Annotated[
    bool,
    typer.Option(
        "--queries", help="For rerankers: rows with the same query are a list of documents, labels their relevance."
    ),
]


def _here(device: str) -> str:
    """Refuse a device that is not known or not here, before anything is read."""
    check_here(known_device(device), gpus_here)
    return device


LargestTimed = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The largest batch to time.",
        show_default=f"{USUAL_LARGEST}, or up to {MOST_LARGEST} if that answers more",
    ),
]

DeviceHere = Annotated[str, typer.Option(callback=_here, help="Where networks compute: auto, cpu, cuda or cuda:0.")]


@dataclass(frozen=True, kw_only=True)
class TextFileOptions:
    text_column: Annotated[str | None, "Column of the texts; if not given, found by common names."] = None
    columns: Annotated[str | None, "Names for the columns of a file without a header: label,title,text"] = None
    delimiter: Annotated[str | None, "Character between columns; by default a comma, in tsv a tab."] = None
    encoding: Annotated[str, "Encoding of a text file, such as cp1252."] = "utf-8"

    @property
    def data_columns(self) -> Columns:
        divider = (self.delimiter or "").replace("\\t", "\t")
        if len(divider) > 1:
            raise UserError(f"--delimiter {self.delimiter!r} must be one character")
        names = tuple(cells(self.columns)) if self.columns else None
        encoding = UTF8 if self.encoding.lower() in ("utf-8", "utf8") else self.encoding
        return Columns(self.text_column, layout=Layout(names, divider or None, encoding))

    def rows(
        self, console: Console, data: Path, channels: int | None, pairs: bool, flags: Sequence[str] = ()
    ) -> Iterator[Row]:
        """The rows of a file (prepare/data.py); a sentence says which columns are read."""
        columns = replace(self.data_columns, flags=tuple(flags))
        console.print(taken(data, columns, channels=channels, pairs=pairs), highlight=False, soft_wrap=True)
        return rows(data, columns, channels=channels, pairs=pairs)

    def rows_for(self, folder: Path, console: Console, data: Path) -> Iterator[Row]:
        from isobatch.deployments.models import checkpoint

        task = checkpoint.task_at(folder)
        flags = checkpoint.label_names(folder) if task.by_label else ()
        return self.rows(console, data, checkpoint.channels_of(folder), not task.by_token, flags)


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(TextFileOptions):
    """The options for a file of inputs of any type."""

    text_pair_column: Annotated[str | None, "Column of the second texts of pairs."] = None
    image_column: Annotated[str | None, "Column of picture paths or of nested arrays."] = None
    label_column: Annotated[str | None, "Column of the labels."] = None
    label_separator: Annotated[str, "Between the labels in a cell, where an input has several."] = ","

    @property
    def data_columns(self) -> Columns:
        columns = super().data_columns
        return replace(columns, pair=self.text_pair_column, image=self.image_column, label=self.label_column)


def check_unread(given: Mapping[str, object], why: str) -> None:
    """Raise UserError if one of these options is given, as nothing would read it.

    >>> check_unread({"--url": None}, "is for a server")
    """
    if option := next((option for option, is_given in given.items() if is_given), None):
        raise UserError(f"{option} {why}")


def check_not_given(options: "DataclassInstance", names: Iterable[str], why: str) -> None:
    """The same for options that do not have their defaults."""
    defaults = {each.name: each.default for each in fields(options)}
    # []: the default of an option that may be repeated
    check_unread({flag(name): getattr(options, name) not in (defaults[name], []) for name in names}, why)


def check_only(kind: "type[DataclassInstance]", options: "DataclassInstance", why: str) -> None:
    """The same for options that this kind does not have."""
    own = {each.name for each in fields(kind)}
    check_not_given(options, [each.name for each in fields(options) if each.name not in own], why)


def check_no_file(options: ReadingOptions, **others: object) -> None:
    """Raise UserError if an option of `ReadingOptions` or another one is given that is for --data, as there is none."""
    check_not_given(options, (each.name for each in fields(ReadingOptions)), why := "is for --data: name a file")
    check_unread({flag(name): is_given for name, is_given in others.items()}, why)


def label_names(folder: Path, labels: str | None, separator: str = ",") -> LabelNames:
    """The names of labels: the head's, and those in --labels. `separator`: between several labels of an input."""
    from isobatch.deployments.models import checkpoint

    check_separator(separator)
    names, reduced = checkpoint.label_names(folder), checkpoint.reduces_labels(folder)
    return LabelNames(names, pairs_of(labels), separator, reduced)


def check_separator(separator: str) -> None:
    if not separator:
        raise UserError("--label-separator '' is empty: give the sign between labels, as in --label-separator ';'")


def cells(text: str) -> list[str]:
    """The parts of an option between commas. Quotation marks keep a comma, as in csv.

    >>> cells('label, "title, text"')
    ['label', 'title, text']
    """
    try:
        return next(csv.reader([text], skipinitialspace=True))
    except csv.Error:
        raise UserError(f"{text!r} must be one line, with commas between its parts") from None


def pairs_of(labels: str | None) -> Mapping[str, str]:
    """
    >>> pairs_of('neg=0, "so, so"=1, a=b=2')
    {'neg': '0', 'so, so': '1', 'a=b': '2'}
    """
    parts = [part.rpartition("=") for part in cells(labels or "") if part.strip()]
    if wrong := next(("".join(part) for part in parts if not (part[0].strip() and part[2].strip())), None):
        raise UserError(f"--labels {wrong!r} must be NAME=NUMBER, as in neg=0,pos=1")
    names = [name.strip() for name, _, _ in parts]
    lower = [name.lower() for name in names]  # as they are compared with those of a file
    if twice := next((name for name in lower if lower.count(name) > 1), None):
        raise UserError(f"--labels names {twice!r} twice: give each label one number")
    return {name: number.strip() for name, (*_, number) in zip(names, parts, strict=True)}


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions:
    """The options for when inputs arrive: by a process at a rate, or as in a trace."""

    rate: Annotated[float | None, "Inputs per second on average. None with --trace: the trace's own rate."] = None
    trace: Annotated[Path | None, "A recorded trace to follow, scaled to --rate (docs/simulator.md: formats)."] = None
    trace_each_s: Annotated[
        float | None, "Seconds for which each count of the trace is, if the file does not say it."
    ] = None
    arrivals: Annotated[str, "poisson, gamma or uniform."] = "poisson"
    cv: Annotated[float, "Variation of the gaps between arrivals (gamma)."] = 3.0
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same arrivals.")] = 0

    @property
    def given(self) -> bool:
        return self.rate is not None or self.trace is not None

    @property
    def trace_text(self) -> str:
        """The reading of the trace's file, as text; empty without a trace."""
        return traces.description(self.trace, self.trace_each_s) if self.trace else ""

    def check_read(self) -> None:
        """Raise UserError for an option that does not apply to such arrivals."""
        if self.trace:
            check_not_given(self, ("arrivals", "cv"), "is not for --trace, which has its own arrivals")
        else:
            check_not_given(self, ("trace_each_s",), "is for --trace: name the trace")
        if self.arrivals != "gamma":
            check_not_given(self, ("cv",), "is for --arrivals gamma")

    def times_s(self, seconds: float) -> Floats:
        if self.trace:
            return traces.trace(self.trace, self.rate, seconds, self.seed, self.trace_each_s)
        if self.rate is None:
            raise UserError("give --rate, or --trace to follow a trace at its own rate")
        return workloads.arrivals(self.arrivals, self.rate, seconds, self.seed, self.cv)


Command = Callable[..., None]


def with_options(**classes: "type[DataclassInstance]") -> Callable[[Command], Command]:
    """Adds the fields of these classes to a command's own options. Its function gets an object of each.

    A field that several classes have is one option.
    """

    def decorate(function: Command) -> Command:
        parameters = signature(function, eval_str=True).parameters
        own = {name: each for name, each in parameters.items() if name not in classes}
        options = own | {each.name: each for kind in classes.values() for each in _parameters(kind)}

        @wraps(function)
        def command(**values: Any) -> None:
            objects = {
                name: kind(**{each.name: values[each.name] for each in fields(kind)}) for name, kind in classes.items()
            }
            function(**{name: values[name] for name in own}, **objects)

        keywords = [_as_option(each).replace(kind=Parameter.KEYWORD_ONLY) for each in options.values()]
        command.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in keywords}
        return command

    return decorate


def in_panels(panels: Mapping[str, Iterable[str]]) -> Callable[[Command], Command]:
    """Puts options of a command into these panels of --help."""

    def decorate(command: Command) -> Command:
        for panel, names in panels.items():
            for name in names:
                (option,) = command.__annotations__[name].__metadata__
                option.rich_help_panel = panel
        return command

    return decorate


def called(command: Command, **values: Any) -> None:
    """Call a command as from the command line: options that are not given have their defaults."""
    defaults = {name: each.default for name, each in signature(command).parameters.items()}
    command(**(defaults | values))


def flag(name: str) -> str:
    """The command line's option for a parameter of a command.

    >>> flag("slo_ms"), flag("as_json")
    ('--slo-ms', '--json')
    """
    return f"--{name.removeprefix('as_').replace('_', '-')}"


def _parameters(kind: "type[DataclassInstance]") -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    defaults = {each.name: Parameter.empty if each.default is MISSING else each.default for each in fields(kind)}
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
    ]


def _as_option(parameter: Parameter) -> Parameter:
    if get_origin(parameter.annotation) is not Annotated:
        return parameter
    kind, option = get_args(parameter.annotation)
    if isinstance(option, str):
        names = (flag(parameter.name),) if parameter.default is False else ()
        option = typer.Option(*names, help=option)
    return parameter.replace(annotation=Annotated[kind, option])
