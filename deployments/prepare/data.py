"""Reads inputs from files, with or without labels: finds the columns that hold them, and reads row by row."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.models.encode import pixels_of
from isobatch.deployments.prepare.records import (
    LABELS,
    TABLES,
    WORDS,
    Layout,
    check_format,
    one_line_errors,
    parsed,
    records,
    suffix_of,
)
from isobatch.profiles.errors import UserError, WrongInputError

# Usual names of columns, in lower case, the most specific first.
WORD_NAMES = (WORDS, "words")
TAG_NAMES = (LABELS, "tags", "labels", "label", "ner")
TEXT_NAMES = ("sentence", "text", "sentence1", "question", "premise", "review", "content", "input")
# Two columns that make a pair wherever both exist: those of QNLI, of QQP, and of rankers.
PAIRS = (
    ("question", "sentence"), ("question1", "question2"), ("query", "passage"), ("query", "document"), ("query", "text")
)  # fmt: skip
PAIR_NAMES = ("sentence2", "text_pair", "hypothesis", "context")
LABEL_NAMES = ("label", "labels", "class", "target", "category", "sentiment", "y", "relevance", "score", "keypoints")
DOCUMENTS = "documents"  # the column that holds lists of documents, whose relevance is a list, too
IMAGE_NAMES = ("image", "images", "img", "pixels", "image_path", "path")
PictureCell = str | bytes | dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """The columns to read (None: the usual names are tried), and the layout of the file."""

    text: str | None = None
    pair: str | None = None
    image: str | None = None
    label: str | None = None
    layout: Layout = field(default_factory=Layout)
    words: str | None = None  # set if a column holds lists of words
    # The columns of 0 and 1 that say which of several labels an input has; each one that may exist, until the first row
    # shows which do.
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One input as a network's `encode` takes it, and its label as the file writes it (None: it has none).

    A text with labelled words is a list of words, and its label the list of their labels. Where columns of 0 and 1 say
    which labels an input has, its label is the list of these.
    """

    number: int
    value: Any
    label: Any


def rows(path: Path, columns: Columns = Columns(), *, channels: int | None = None, pairs: bool = True) -> Iterator[Row]:
    """Every row in order, one at a time in memory. Row numbers start at 1 and do not count a header.

    `channels`: the channels of the network's images; None for a network that takes texts. `pairs`: the network takes
    pairs of texts, so a second column of texts is read if there is one.
    """
    _check(path, columns, channels, pairs)
    with one_line_errors(path, columns.layout):
        if suffix_of(path) == ".npz":
            yield from _arrays(path, channels)
        else:
            yield from _picked(path, columns, channels, pairs)


def name_of(path: Path) -> str:
    r"""A file's name as JSON can hold it: bytes that are no UTF-8 are escaped.

    >>> name_of(Path("reviews/caf\udce9.csv"))
    'caf\\udce9.csv'
    """
    return path.name.encode(errors="backslashreplace").decode()


@contextmanager
def naming_rows(path: Path, among: Sequence[Row]) -> Iterator[None]:
    """Errors name an input that the network cannot read by its row in the file."""
    try:
        yield
    except WrongInputError as error:
        number = next((row.number for row in among if row.value is error.value), None)
        if number is None:
            raise
        raise UserError(f"{path}: row {number}: the input {error.problem}") from error


def taken(path: Path, columns: Columns = Columns(), *, channels: int | None = None, pairs: bool = True) -> str:
    """A sentence on the columns of a file that are read, which its first row decides."""
    _check(path, columns, channels, pairs)
    if suffix_of(path) == ".npz":
        return f"{path.name}: reading the arrays 'images' and, if it exists, 'labels'"
    with one_line_errors(path, columns.layout):
        numbered = next(_numbered(path, columns), None)
        if numbered is None:
            raise UserError(f"{path} holds no inputs")
        _, first = numbered
        chosen = _choose(path, first, columns, channels is not None, pairs)
    named = {name: getattr(chosen, name) for name in ("text", "pair", "image", "words", "label")}
    sources = [f"{name} from {column!r}" for name, column in named.items() if column]
    read = ", ".join([*sources, *([f"labels from {len(chosen.flags)} columns of 0 and 1"] if chosen.flags else [])])
    others = ", ".join(repr(name) for name in first if name not in (*named.values(), *chosen.flags))
    return f"{path.name}: {read}" + (f"; not read: {others}" if others else "")


def _picked(path: Path, columns: Columns, channels: int | None, pairs: bool) -> Iterator[Row]:
    chosen: Columns | None = None
    first: Mapping[Any, Any] = {}
    for number, record in _numbered(path, columns):
        where = f"{path}: row {number}"
        if chosen is None:
            chosen, first = _choose(path, record, columns, channels is not None, pairs), record
        if not record.keys() <= first.keys() or None in record:
            _check_row(path, where, record, chosen, pairs and not columns.text)
        value: Any
        if chosen.image:
            value = _image(path, where, _cell(where, record, chosen.image), chosen.image, channels)
        else:
            value = _words(where, record, chosen.words) if chosen.words else _text(where, record, chosen)
        label = record.get(chosen.label) if chosen.label else None
        if any(record.get(name) is not None for name in chosen.flags):
            label = [name for name in chosen.flags if _flag(where, record, name)]
        if chosen.words and chosen.label and label is not None:
            _check_labels(where, chosen.label, label, len(value))
        yield Row(number, value, label)


def _numbered(path: Path, columns: Columns) -> Iterator[tuple[int, Mapping[Any, Any]]]:
    """The records of a file with their numbers. A record with a list of documents is one for each document."""
    for number, record in enumerate(records(path, columns.layout), start=1):
        documents = record.get(DOCUMENTS)
        if not isinstance(documents, list):
            yield number, record
            continue
        lists = [name for name in record if isinstance(record[name], list)]
        label = columns.label if columns.label in lists else _usual(lists, LABEL_NAMES)
        if label and len(record[label]) != len(documents):
            numbers = f"{len(documents)} documents but {len(record[label])} values of {label!r}"
            raise UserError(f"{path}: row {number}: has {numbers}: each document needs one")
        rest = {name: cell for name, cell in record.items() if name != DOCUMENTS}
        for place, document in enumerate(documents):
            yield number, {**rest, "document": document, **({label: record[label][place]} if label else {})}


def _check(path: Path, columns: Columns, channels: int | None, pairs: bool) -> None:
    """Refuse a file or columns that the network cannot read."""
    check_format(path, columns.layout)
    if channels is not None and (columns.text or columns.pair):
        raise UserError(f"{path}: the network reads images: name their column with --image-column, not one of texts")
    if channels is None and (columns.image or suffix_of(path) == ".npz"):
        raise UserError(f"{path}: the network reads texts, not images")
    if suffix_of(path) == ".npz" and (columns.image not in (None, "images") or columns.label not in (None, "labels")):
        remedy = "leave out --image-column and --label-column"
        raise UserError(f"{path}: of an .npz the arrays 'images' and 'labels' are read: {remedy}")
    if not pairs and columns.pair:
        raise UserError(f"{path}: the network reads single texts, so --text-pair-column has no use")


def _check_row(path: Path, where: str, record: Mapping[Any, Any], chosen: Columns, may_pair: bool) -> None:
    """Refuse rows that would be misread: a cell without a column (csv: under None), or a label or a second text if row
    1 has none."""
    if None in record:
        remedy = "a text must not hold tabs" if suffix_of(path) == ".tsv" else "quote texts that hold commas"
        raise UserError(f"{where} has more cells than the header; {remedy}")
    if not (chosen.label or chosen.flags) and (
        label := _usual(list(record), TAG_NAMES if chosen.words else LABEL_NAMES)
    ):
        raise UserError(f"{where} has a label ({label!r}) but row 1 has none; label all rows or none")
    if chosen.text and may_pair and not chosen.pair and (second := _usual(list(record), PAIR_NAMES)):
        raise UserError(f"{where} has a second text ({second!r}) but row 1 has none; give it to all rows or none")


def _words(where: str, record: Mapping[str, Any], name: str) -> list[str]:
    words = _cell(where, record, name)
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise UserError(f"{where}: {name!r} must be a list of words, got {_kind(words)}")
    if empty := next((place for place, word in enumerate(words, start=1) if not word.strip()), None):
        raise UserError(f"{where}: {name!r}: word {empty} is empty")
    _check_characters(f"{where}: {name!r}", "".join(words))
    return words


def _check_labels(where: str, name: str, labels: Any, words: int) -> None:
    if not isinstance(labels, list):
        raise UserError(f"{where}: {name!r} must be a list with a label for each word, got {_kind(labels)}")
    if len(labels) != words:
        raise UserError(f"{where}: has {words} words but {len(labels)} labels")


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else type(value).__name__


def _choose(path: Path, record: Mapping[Any, Any], requested: Columns, images: bool, pairs: bool) -> Columns:
    """The columns to read. Every requested column must exist, and one with inputs; others may be absent."""
    names = list(record)
    for name in (requested.text, requested.pair, requested.image, requested.label):
        if name is not None and name not in names:
            raise _no_column(path, f"no column {name!r}", names)
    if images:
        image = requested.image or _usual(names, IMAGE_NAMES)
        if image is None:
            raise _no_column(path, "no column of images found (name it with --image-column)", names)
        return Columns(image=image, **_labels(path, names, requested))
    words = requested.text or _usual(names, WORD_NAMES)
    if words and isinstance(record[words], list):
        return Columns(words=words, label=requested.label or _usual(names, TAG_NAMES))
    may_pair = pairs and not requested.text
    first, second = _usual_pair(names) if may_pair else (None, None)
    text = requested.text or first or _usual(names, TEXT_NAMES)
    if text is None:
        raise _no_column(path, "no column of texts found (name it with --text-column)", names)
    pair = requested.pair or second or (_usual(names, PAIR_NAMES) if may_pair else None)
    return Columns(text=text, pair=pair, **_labels(path, [name for name in names if name != text], requested))


def _labels(path: Path, names: Sequence[Any], requested: Columns) -> dict[str, Any]:
    """The column of labels, or the columns of 0 and 1 that have the names of labels."""
    flags = () if requested.label else tuple(filter(None, (_usual(names, [each.lower()]) for each in requested.flags)))
    if not flags:
        return {"label": requested.label or _usual(names, LABEL_NAMES)}
    if missing := [each for each in requested.flags if _usual(names, [each.lower()]) is None]:
        has = ", ".join(map(repr, flags[:5]))
        raise UserError(f"{path}: has columns of the labels {has}, but none of {missing[0]!r}: each label needs one")
    return {"flags": flags}


def _flag(where: str, record: Mapping[str, Any], name: str) -> bool:
    """A cell of 0 or 1, as any program writes it."""
    cell = _cell(where, record, name)
    sign = str(cell).strip().lower().removesuffix(".0")
    if sign not in ("0", "1", "false", "true"):
        raise UserError(f"{where}: {name!r} is {cell!r}: it must be 1 for an input with this label, else 0")
    return sign in ("1", "true")


def _usual_pair(names: Sequence[Any]) -> tuple[str | None, str | None]:
    """Two columns that make a pair if both exist, although one of them alone may be the text.

    >>> _usual_pair(["index", "question", "sentence", "label"])
    ('question', 'sentence')
    """
    matches = ((_usual(names, [first]), _usual(names, [second])) for first, second in PAIRS)
    return next((pair for pair in matches if all(pair)), (None, None))


def _usual(names: Sequence[Any], usual: Sequence[str]) -> str | None:
    """The column with the first of these names, whatever its capitals.

    >>> _usual(["id", "Text", "Label"], LABEL_NAMES)
    'Label'
    """
    alike = dict[str, list[str]]()
    for name in names:
        alike.setdefault(str(name).strip().lower(), []).append(str(name))
    chosen = next((alike[name] for name in usual if name in alike), [])
    if len(chosen) > 1:
        options = "--text-column, --label-column or --image-column"
        raise ValueError(f"its columns {chosen[0]!r} and {chosen[1]!r} are named alike: rename one, or give {options}")
    return chosen[0] if chosen else None


def _no_column(path: Path, problem: str, names: Sequence[Any]) -> UserError:
    existing, hint = ", ".join(repr(name)[:40] for name in names[:20]), ""
    if suffix_of(path) in TABLES:
        hint = ". A file without a header needs --columns"
        if len(names) == 1 and (delimiter := next((sign for sign in ";|\t," if sign in str(names[0])), None)):
            hint = f". Are its columns divided by {delimiter!r}? Then give --delimiter {delimiter!r}"
    return UserError(f"{path}: {problem}; it has: {existing or 'nothing'}{hint}")


def _cell(where: str, record: Mapping[str, Any], name: str) -> Any:
    cell = record.get(name)
    if cell is None:
        raise UserError(f"{where} has no {name!r}")
    return cell


def _text(where: str, record: Mapping[str, Any], chosen: Columns) -> str | tuple[str, ...]:
    names = [name for name in (chosen.text, chosen.pair) if name]
    cells = [_cell(where, record, name) for name in names]
    for name, cell in zip(names, cells, strict=True):
        if not isinstance(cell, str):
            raise UserError(f"{where}: {name!r} must be a text, got {type(cell).__name__}")
        _check_characters(f"{where}: {name!r}", cell)
    return cells[0] if len(cells) == 1 else tuple(cells)


def _check_characters(where: str, text: str) -> None:
    """Refuse half of a surrogate pair, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"{where}: holds {half}, half of a character: was the text cut in the middle of it?") from error


def _image(path: Path, where: str, cell: Any, name: str, channels: int | None) -> NDArray[Any]:
    """A nested array, as JSON or already parsed, or the path of a picture, relative to the file that names it."""
    named = f"{where}: {name!r}"
    pixels: NDArray[Any]
    if isinstance(cell, dict | bytes) or (isinstance(cell, str) and not cell.lstrip().startswith("[")):
        pixels = _picture(where, path, cell, channels)
    else:
        nested = parsed(named, cell) if isinstance(cell, str) else cell
        try:
            pixels = np.asarray(nested, np.float32)
        except (TypeError, ValueError) as error:
            raise UserError(f"{named} must be an array of numbers: {error}") from error
        if pixels.ndim not in (2, 3) or not np.isfinite(pixels).all():
            raise UserError(f"{named} must be height x width (x channels) finite numbers, got {pixels.shape}")
    _check_channels(named, pixels.shape, channels)
    return pixels


def _check_channels(where: str, shape: Sequence[int], channels: int | None) -> None:
    """Grey images have none; they fit any network."""
    if len(shape) == 3 and shape[2] != channels:
        raise UserError(f"{where} must be height x width or height x width x {channels}, got {tuple(shape)}")


def _picture(where: str, path: Path, cell: PictureCell, channels: int | None) -> NDArray[np.uint8]:
    """The picture as a replica reads it: upright, in 8 bits, and grey where the network reads grey ones."""
    with _opened(f"{where}: the picture", path, cell) as picture:
        is_grey = channels == 1 or picture.mode == "L" or picture.mode.startswith("I;16")
        return pixels_of(picture, "L" if is_grey else "RGB")


def label_picture(where: str, path: Path, cell: PictureCell) -> NDArray[Any]:
    """The labels in a picture whose pixels are labels: those of a palette, or grey values."""
    with _opened(f"{where}: the picture of labels", path, cell) as picture:
        return np.asarray(picture)


@contextmanager
def _opened(what: str, path: Path, cell: PictureCell) -> Iterator[Any]:
    """A picture that the file at `path` names or holds. The library `datasets` stores its bytes or its path."""
    from PIL import Image

    try:
        content = (cell.get("bytes") or cell["path"]) if isinstance(cell, dict) else cell
        with Image.open(path.parent / content if isinstance(content, str) else BytesIO(content)) as picture:
            yield picture
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, Image.DecompressionBombError) as error:
        named = repr(cell) if isinstance(cell, str) else "in it"
        raise UserError(f"{what} {named} cannot be read: {error}") from error


def _arrays(path: Path, channels: int | None) -> Iterator[Row]:
    with path.open("rb") as opened:
        if not is_zipfile(opened):
            raise UserError(f"{path}: is no .npz: numpy.savez writes one, of the arrays 'images' and perhaps 'labels'")
    with np.load(path, allow_pickle=False) as file:
        if "images" not in file:
            raise _no_column(path, "no array 'images'", file.files)
        images = _array(path, file, "images")
        labels = _array(path, file, "labels") if "labels" in file else np.full(images.shape[:1], None)
    if images.ndim not in (3, 4) or images.dtype.kind not in "buif":
        actual = f"{images.dtype} {images.shape}"
        raise UserError(f"{path}: 'images' must be numbers, count x height x width (x channels), got {actual}")
    if 0 in images.shape:
        raise UserError(f"{path} holds no inputs: 'images' has the shape {images.shape}")
    _check_channels(f"{path}: each of 'images'", images.shape[1:], channels)
    if (
        images.dtype.kind == "f"
        and (wrong := np.flatnonzero(~np.isfinite(images.reshape(len(images), -1)).all(1))).size
    ):
        raise UserError(f"{path}: row {wrong[0] + 1}: 'images' must be finite numbers")
    if np.ndim(labels) not in (1, 3):
        raise UserError(f"{path}: 'labels' must be a label or a map for each image, got the shape {np.shape(labels)}")
    if len(labels) != len(images):
        raise UserError(f"{path}: {len(images)} images but {len(labels)} labels")
    for number, (image, label) in enumerate(zip(images, labels, strict=True), start=1):
        yield Row(number, image, label.item() if isinstance(label, np.generic) else label)


def _array(path: Path, file: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    try:
        return file[name]
    except ValueError as error:
        objects = "allow_pickle" in str(error)  # numpy's advice is to trust the file
        problem = "must not be an array of Python objects" if objects else f"cannot be read: {error}"
        raise UserError(f"{path}: {name!r} {problem}") from error
