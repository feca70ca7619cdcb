"""Read labelled or merely recorded inputs: csv, tsv and jsonl, row by row, whatever their size, and npz for images."""

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from profiles.errors import UserError

TEXT_NAMES = ("sentence", "text", "sentence1", "question", "premise", "review", "content", "input")
PAIR_NAMES = ("sentence2", "text_pair", "hypothesis", "context")
LABEL_NAMES = ("label", "labels", "class", "target", "category", "sentiment", "y")
IMAGE_NAMES = ("image", "images", "img", "pixels", "image_path", "path")
FORMATS = (".csv", ".tsv", ".jsonl", ".npz")


@dataclass(frozen=True)
class Columns:
    """Which columns to read; None: found by the usual names. `header` names them where its first row does not."""

    text: str | None = None
    pair: str | None = None
    image: str | None = None
    label: str | None = None
    header: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Row:
    """One input as a network's `encode` takes it, and its label as the file writes it (None: the file has none)."""

    number: int
    value: Any
    label: Any


def rows(path: Path, columns: Columns = Columns(), *, images: bool = False) -> Iterator[Row]:
    """Every row in order, holding one at a time. Row numbers start at 1 and do not count a header."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path}: cannot read {path.suffix or 'a file without a suffix'}; use {', '.join(FORMATS)}")
    with _one_line_errors(path):
        if path.suffix == ".npz":
            yield from _arrays(path)
        else:
            yield from _picked(path, columns, images)


def _picked(path: Path, columns: Columns, images: bool) -> Iterator[Row]:
    chosen: Columns | None = None
    for number, record in enumerate(_records(path, columns.header), start=1):
        chosen = chosen or _choose(path, list(record), columns, images)
        _check(path, number, record, chosen)
        yield Row(
            number,
            _image(path, number, record, chosen.image) if chosen.image else _text(path, number, record, chosen),
            _cell(path, number, record, chosen.label) if chosen.label else None,
        )


def _check(path: Path, number: int, record: Mapping[Any, Any], chosen: Columns) -> None:
    """Refuse rows that would be misread: a cell without a column (csv: under None), or a label where row 1 has none."""
    if None in record:
        mend = "a text holds no tabs" if path.suffix == ".tsv" else "quote texts that hold commas"
        raise UserError(f"{path}: row {number} has more cells than the header; {mend}")
    if chosen.label is None and (label := _usual(list(record), LABEL_NAMES)):
        raise UserError(f"{path}: row {number} has a label ({label!r}) but row 1 has none; label all rows or none")


def _records(path: Path, header: tuple[str, ...] | None) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from _json_lines(path, file) if path.suffix == ".jsonl" else _table(path, file, header)


def _table(path: Path, file: IO[str], header: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    # Tab-separated files by custom quote nothing: a lone quotation mark is text (GLUE's own files have them).
    csv.field_size_limit(sys.maxsize)
    if path.suffix == ".tsv":
        return csv.DictReader(file, header, delimiter="\t", quoting=csv.QUOTE_NONE)
    return csv.DictReader(file, header)


def _json_lines(path: Path, file: IO[str]) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        record = _parsed(f"{path}: line {number}", line)
        if not isinstance(record, dict):
            raise UserError(f"{path}: line {number} is no JSON object but {type(record).__name__}")
        yield record


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}") from error


def _choose(path: Path, names: list[Any], asked: Columns, images: bool) -> Columns:
    """Every asked column must exist; the input's must be found; label and pair may be absent."""
    for name in (asked.text, asked.pair, asked.image, asked.label):
        if name is not None and name not in names:
            raise _no_column(path, f"no column {name!r}", names)
    if asked.image or (images and not asked.text):
        image = asked.image or _usual(names, IMAGE_NAMES)
        if image is None:
            raise _no_column(path, "no column of images found (name it with --image-column)", names)
        return Columns(image=image, label=asked.label or _usual(names, LABEL_NAMES))
    text = asked.text or _usual(names, TEXT_NAMES)
    if text is None:
        raise _no_column(path, "no column of texts found (name it with --text-column)", names)
    pair = asked.pair or (None if asked.text else _usual(names, (*PAIR_NAMES, *_second_of(text))))
    return Columns(text=text, pair=pair, label=asked.label or _usual(names, LABEL_NAMES))


def _second_of(text: str) -> tuple[str, ...]:
    """GLUE's QNLI calls its pair question and sentence."""
    return ("sentence",) if text == "question" else ()


def _usual(names: Sequence[Any], usual: Sequence[str]) -> str | None:
    """
    >>> _usual(["id", "Text", "Label"], LABEL_NAMES)
    'Label'
    """
    folded = {str(name).lower(): str(name) for name in names}
    return next((folded[name] for name in usual if name in folded), None)


def _no_column(path: Path, what: str, names: Sequence[Any]) -> UserError:
    there = ", ".join(repr(name)[:40] for name in names[:20])
    hint = ". A file without a header needs --columns" if path.suffix in (".csv", ".tsv") else ""
    return UserError(f"{path}: {what}; it has: {there or 'nothing'}{hint}")


def _cell(path: Path, number: int, record: Mapping[str, Any], name: str) -> Any:
    cell = record.get(name)
    if cell is None:
        raise UserError(f"{path}: row {number} has no {name!r}")
    return cell


def _text(path: Path, number: int, record: Mapping[str, Any], chosen: Columns) -> str | tuple[str, ...]:
    names = [name for name in (chosen.text, chosen.pair) if name]
    cells = [_cell(path, number, record, name) for name in names]
    for name, cell in zip(names, cells, strict=True):
        if not isinstance(cell, str):
            raise UserError(f"{path}: row {number}: {name!r} must be a text, got {type(cell).__name__}")
    return cells[0] if len(cells) == 1 else tuple(cells)


def _image(path: Path, number: int, record: Mapping[str, Any], name: str) -> NDArray[Any]:
    """A nested array, as JSON or already parsed, or the path of a picture, relative to the file that names it."""
    where, cell = f"{path}: row {number}", _cell(path, number, record, name)
    if isinstance(cell, str) and not cell.lstrip().startswith("["):
        return _picture(path, number, cell)
    nested = _parsed(f"{where}: {name!r}", cell) if isinstance(cell, str) else cell
    try:
        pixels = np.asarray(nested, np.float32)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {name!r} must be an array of numbers: {error}") from error
    if pixels.ndim not in (2, 3) or not np.isfinite(pixels).all():
        raise UserError(f"{where}: {name!r} must be height x width (x channels) finite numbers, got {pixels.shape}")
    return pixels


def _picture(path: Path, number: int, cell: str) -> NDArray[np.uint8]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path.parent / cell) as picture:
            return np.asarray(picture if picture.mode == "L" else picture.convert("RGB"))
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{path}: row {number}: the picture {cell!r} cannot be read: {error}") from error


def _arrays(path: Path) -> Iterator[Row]:
    with np.load(path, allow_pickle=False) as file:
        if "images" not in file:
            raise _no_column(path, "no array 'images'", file.files)
        images = file["images"]
        labels = file["labels"] if "labels" in file else np.full(images.shape[:1], None)
    if images.ndim not in (3, 4) or images.dtype.kind not in "buif":
        there = f"{images.dtype} {images.shape}"
        raise UserError(f"{path}: 'images' must be numbers, count x height x width (x channels), got {there}")
    if np.ndim(labels) != 1:
        raise UserError(f"{path}: 'labels' must be one label an image, got the shape {np.shape(labels)}")
    if len(labels) != len(images):
        raise UserError(f"{path}: {len(images)} images but {len(labels)} labels")
    for number, (image, label) in enumerate(zip(images, labels, strict=True), start=1):
        yield Row(number, image, label.item() if isinstance(label, np.generic) else label)


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (csv.Error, BadZipFile, ValueError) as error:
        raise UserError(f"{path}: cannot be read as {path.suffix}: {error}") from error
