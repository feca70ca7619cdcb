"""Reads the records of a file of inputs in any format: csv, tsv and jsonl row by row, json, Parquet and Arrow."""

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

from isobatch.deployments.folders import files_of_data
from isobatch.profiles.errors import UserError

TABLES = (".csv", ".tsv")
# One word and its label per line, and a blank line after each text.
CONLL = (".conll", ".iob", ".bio", ".txt")
TEXTS = (*TABLES, ".jsonl", ".json", *CONLL)
ARROW = (".parquet", ".arrow")
READ_AT_ONCE = 256  # rows of a Parquet file, which may hold pictures
WHOLE_ARROW = b"ARROW1"  # with which files begin that end with a list of their parts; `datasets` writes streams
FORMATS = (*TEXTS, *ARROW, ".npz")
UTF8 = "utf-8-sig"  # UTF-8 with or without a byte order mark, which some programs write

# The columns of labelled words, with the names that the library `datasets` uses.
WORDS = "tokens"
LABELS = "ner_tags"
BETWEEN_DOCUMENTS = "-DOCSTART-"  # CoNLL files have this word between documents
_OF_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}")  # the name of a file in a data set of the hub: its split, its number

Record = Mapping[Any, Any]


@dataclass(frozen=True)
class Layout:
    """The layout of a text file. `header`: the names of its columns, if its first row does not hold them."""

    header: tuple[str, ...] | None = None
    delimiter: str | None = None  # None: commas in csv, tabs in tsv
    encoding: str = UTF8


class NamedNumber(int):
    """A label that a file holds as a number of its own, with the name that the file gives it."""

    name: str

    @classmethod
    def of(cls, names: Sequence[str], value: Any) -> Any:
        """Numbers in a cell, or in the list that it holds, with their names; -1, for no label, has none.

        >>> str(NamedNumber.of(["neg", "pos"], 1)), NamedNumber.of(["neg", "pos"], [1, -1])
        ('pos', [1, -1])
        """
        if isinstance(value, list):
            return [cls.of(names, each) for each in value]
        if not (isinstance(value, int) and 0 <= value < len(names)):
            return value
        number = cls(value)
        number.name = names[value]
        return number

    def __str__(self) -> str:
        return self.name


def records(path: Path, layout: Layout) -> Iterator[Record]:
    """Every record in order, as a mapping from column names. A directory must be one that `datasets` has saved."""
    if path.is_dir():
        for part in _parts(path):
            with one_line_errors(part, layout):
                yield from _arrow(part)
    elif suffix_of(path) in ARROW:
        yield from _arrow(path)
    else:
        with path.open(encoding=layout.encoding, newline="") as file:
            yield from _of_text(path, file, layout)


def suffix_of(path: Path) -> str:
    """The suffix of a file's name in lower case."""
    return path.suffix.lower()


def check_format(path: Path, layout: Layout) -> None:
    """Raise UserError if files of this format cannot be read, or if `layout` has options for other formats."""
    suffix = suffix_of(path)
    for option, value, formats in (
        ("--columns", layout.header, TABLES),
        ("--delimiter", layout.delimiter, TABLES),
        ("--encoding", layout.encoding != UTF8, TEXTS),
    ):
        if value and suffix not in formats:
            raise UserError(f"{path}: {option} is only for {', '.join(formats)}")
    if suffix not in FORMATS and not path.exists():
        raise UserError(f"{path}: cannot be read: No such file or directory")
    if suffix not in FORMATS and not path.is_dir():
        raise UserError(f"{path}: cannot read {path.suffix or 'a file without a suffix'}; use {', '.join(FORMATS)}")


def _of_text(path: Path, file: IO[str], layout: Layout) -> Iterator[Record]:
    if suffix_of(path) == ".jsonl" or (suffix_of(path) == ".json" and _has_lines(file)):
        return _json_lines(path, file)
    if suffix_of(path) in CONLL:
        return _sentences(path, file)
    return _json_array(path, file) if suffix_of(path) == ".json" else _table(path, file, layout)


def _table(path: Path, file: IO[str], layout: Layout) -> Iterator[Record]:
    # Tab-separated files usually have no quoting: a single quotation mark is text, as in GLUE's files.
    csv.field_size_limit(sys.maxsize)
    if suffix_of(path) == ".tsv":
        tabs = layout.delimiter or "\t"
        yield from _stripped(path, csv.DictReader(file, layout.header, delimiter=tabs, quoting=csv.QUOTE_NONE))
        return
    # Not strict, one extra quotation mark would join all rows up to the next one.
    table = csv.DictReader(file, layout.header, delimiter=layout.delimiter or ",", strict=True)
    try:
        yield from _stripped(path, table)
    except csv.Error as error:
        raise UserError(
            f"{path}: up to line {table.reader.line_num} its quotation marks do not pair ({error}): write a "
            "quotation mark inside a quoted text twice"
        ) from error


def _stripped(path: Path, table: "csv.DictReader[str]") -> "csv.DictReader[str]":
    """The table without blanks around the names of its columns, which differ, and without empty lines before them."""
    names = [name.strip() for name in table.fieldnames or next(filter(any, table.reader), ())]
    _check_differ(path, names, "; a file without a header needs --columns")
    table.fieldnames = names
    return table


def _check_differ(path: Path, names: Sequence[str], hint: str = "") -> None:
    if twice := next((name for name, count in Counter(names).items() if name and count > 1), None):
        raise UserError(f"{path}: two columns are named {twice[:40]!r}{hint}")


def _json_lines(path: Path, file: IO[str]) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield _object(f"{path}: line {number}", parsed(f"{path}: line {number}", line))


def _has_lines(file: IO[str]) -> bool:
    """Whether each line is an object, as `datasets` and pandas also write to .json: by the first two lines."""
    first, second = file.readline().strip(), file.readline().strip()
    file.seek(0)
    return first.startswith("{") and first.endswith("}") and second.startswith("{")


def _json_array(path: Path, file: IO[str]) -> Iterator[Record]:
    content = parsed(str(path), file.read())
    if not isinstance(content, list):
        raise UserError(f"{path} is not a JSON array but {type(content).__name__}; one object per line is .jsonl")
    for number, item in enumerate(content, start=1):
        yield _object(f"{path}: item {number}", item)


def _sentences(path: Path, file: IO[str]) -> Iterator[Record]:
    """Texts of a CoNLL file. A line has a word first and its label last, if labels exist; other columns are ignored."""
    words, labels, columns = list[str](), list[str](), None
    for number, line in enumerate(chain(file, [""]), start=1):
        cells = [cell.strip() for cell in line.split("\t" if "\t" in line else None)]
        if not any(cells) or cells[0] == BETWEEN_DOCUMENTS:
            if words:
                yield {WORDS: words, LABELS: labels} if labels else {WORDS: words}
            words, labels = [], []
            continue
        columns = columns or len(cells)
        if len(cells) != columns or not all((cells[0], cells[-1])):
            problem = f"has {len(cells)} columns, the lines before it {columns}"
            if len(cells) == columns:
                problem = f"has an empty {'label' if cells[0] else 'word'}"
            raise UserError(f"{path}: line {number} {problem}: {line.strip()[:60]!r}")
        words.append(cells[0])
        labels += cells[-1:] if columns > 1 else []


def _object(where: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object but {type(value).__name__}")
    return value


def parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"{where} is not JSON: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}") from error


def _parts(folder: Path) -> Sequence[Path]:
    """The files of a split that `datasets` has saved. Of several splits the user must choose one."""
    if files := files_of_data(folder):
        of_splits = {match[1] for file in files if (match := _OF_SPLIT.match(file.name))}
        if len(of_splits) > 1:
            raise UserError(f"{folder}: holds several splits, {', '.join(sorted(of_splits))}: give the file of one")
        return files
    splits = [each.name for each in sorted(folder.iterdir()) if each.is_dir() and any(each.glob("*.arrow"))]
    places = ", ".join(f"{folder}/{name}" for name in splits)
    hint = f"choose one of its splits: {places}" if splits else "name a file in it, or a directory of `datasets`"
    raise UserError(f"{folder}: holds no *.arrow or *.parquet; {hint}")


def _arrow(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise UserError(f"{path}: reading it needs pyarrow: pip install 'isobatch[parquet]'") from error
    if suffix_of(path) == ".parquet":
        with parquet.ParquetFile(path) as file:
            yield from _of_batches(path, file.schema_arrow, file.iter_batches(READ_AT_ONCE))
        return
    with path.open("rb") as file:
        whole = file.read(len(WHOLE_ARROW)) == WHOLE_ARROW
    with (ipc.open_file if whole else ipc.open_stream)(path) as opened:
        batches = map(opened.get_batch, range(opened.num_record_batches)) if whole else opened
        yield from _of_batches(path, opened.schema, batches)


def _of_batches(path: Path, schema: Any, batches: Iterable[Any]) -> Iterator[Record]:
    _check_differ(path, schema.names)
    named = _label_names(schema.metadata or {})
    for batch in batches:
        for record in batch.to_pylist():
            yield record | {name: NamedNumber.of(named[name], record[name]) for name in named if name in record}


def _label_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """The names of the labels in each column of numbers for which `datasets` has written some, in their order."""
    info = json.loads(metadata.get(b"huggingface", b"{}")).get("info") or {}
    features = {name: each for name, each in (info.get("features") or {}).items() if isinstance(each, dict)}
    of_cells = {name: each.get("feature", each) for name, each in features.items()}  # or of the lists in cells
    return {name: each["names"] for name, each in of_cells.items() if "names" in each}


@contextmanager
def one_line_errors(path: Path, layout: Layout) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except UnicodeError as error:
        encoding = "UTF-8" if layout.encoding == UTF8 else layout.encoding
        raise UserError(f"{path}: not {encoding} text ({error}); --encoding names another, such as cp1252") from error
    except LookupError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (csv.Error, BadZipFile, ValueError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{path}: cannot be read as {path.suffix}: {reason}") from error
