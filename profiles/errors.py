"""UserError, for every fault that the user can correct, and errors of files that name the user's own path."""

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound="BaseModel")


NO_ROOM = {  # advice for errors of a full disk
    errno.EFBIG: "raise the limit on the sizes of files (ulimit -f)",
    errno.ENOSPC: "free some of the disk, or write to another",
    errno.EDQUOT: "free some of your share of the disk, or write to another",
}


class UserError(ValueError):
    """The user gave a wrong value. The message is one line: the value, and one that would work.

    The command line prints it without a traceback and exits with 2.
    """


class WrongInputError(UserError):
    """One of several inputs cannot be used. `value` is this input, so that a caller can find its row; `problem` is its
    fault."""

    def __init__(self, message: str, value: object = None, problem: str = "") -> None:
        super().__init__(message)
        self.value, self.problem = value, problem


# For errors that pydantic words in terms of Python, by its names of them.
REASONS = {
    "missing": "this field is missing", "unexpected_keyword_argument": "there is no such field",
    "extra_forbidden": "there is no such field", "model_type": "Input should be an object",
}  # fmt: skip
MOST_BYTES = 2**28  # of a text that the user names; the largest profiles have a few MiB
MOST_YAML_BYTES = 64_000  # PyYAML takes 4 us for each, and its parser in C fails on deep nesting


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    try:
        if stat.S_ISCHR(path.stat().st_mode) or stat.S_ISBLK(path.stat().st_mode):
            raise UserError(f"cannot read {path}: it is a device, not a file")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > most_bytes:
        raise UserError(f"{path} has more than {most_bytes:,} bytes: is it the right file?")
    try:
        return content.decode("utf-8-sig")  # some programs begin a file with a byte order mark
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file (UTF-8)") from None


def read_yaml(path: Path) -> Any:
    """The YAML in a file that the user named. A field that a mapping has twice is an error: PyYAML would drop one."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: Any) -> Any:
            node, names = super().compose_mapping_node(anchor), set[str]()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in names:
                        raise ValueError(
                            f"line {key.start_mark.line + 1}: {key.value} is there twice: keep one of them"
                        )
                    names.add(key.value)
            return node

    text = read_text(path, MOST_YAML_BYTES)
    try:
        return yaml.load(text, Loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error


def read_json(path: Path) -> Any:
    """The JSON in a file that the user named."""
    return json_in(read_text(path), path)


def json_in(text: str, source: object) -> Any:
    """The JSON in a text of the user's. `source`: where it comes from, for errors.

    >>> json_in("[" * 100_000, "plan.json")
    Traceback (most recent call last):
        ...
    isobatch.profiles.errors.UserError: plan.json is not JSON: it is nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"{source} is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{source} is not JSON: {error}") from None


@contextmanager
def naming_target(draft: Path, target: Path) -> Iterator[None]:
    """While a draft of `target` is written, errors name the target, also errors of a full disk that name no file."""
    try:
        yield
    except OSError as error:
        name = error.filename2 or error.filename
        place = draft if name is None and error.errno in NO_ROOM else Path(os.fsdecode(name or ""))
        if not place.is_relative_to(draft):
            raise
        raise OSError(error.errno, error.strerror, str(target / place.relative_to(draft))) from error


@dataclass(frozen=True)
class Wrong:
    """The first error that pydantic reports about a user's text."""

    place: str  # names and positions, from outside in; empty if the text as a whole is wrong
    reason: str
    value: object
    kind: str  # pydantic's name of the error, such as extra_forbidden


def first_wrong(error: "ValidationError") -> Wrong:
    """
    >>> from pydantic import TypeAdapter, ValidationError
    >>> try:
    ...     TypeAdapter(dict[str, list[int]]).validate_python({"gpus": [2, "two"]}, strict=True)
    ... except ValidationError as error:
    ...     first_wrong(error)
    Wrong(place='gpus.1', reason='Input should be a valid integer', value='two', kind='int_type')
    """
    first = error.errors()[0]
    # A wrong key is named itself, and of a union only the field.
    place = ".".join(part for part in map(str, first["loc"]) if "[" not in part)
    reason = REASONS.get(first["type"], first["msg"].removeprefix("Value error, "))
    return Wrong(place, reason, first["input"], first["type"])


def check_numbers(given: object, read: object, where: object, place: str = "") -> None:
    """Raise `UserError` where true or false was given and a number was read: pydantic takes them for 1 and 0.

    `where`: the file or section; `place`: names and positions in it, as in `first_wrong`.
    """
    if isinstance(given, bool):
        if isinstance(read, int | float) and not isinstance(read, bool):
            raise UserError(f"{where}: {place} = {str(given).lower()}: this must be a number")
    elif isinstance(given, Mapping) and read is not None:
        for name, value in given.items():
            inner = read.get(name) if isinstance(read, Mapping) else getattr(read, str(name), None)
            check_numbers(value, inner, where, f"{place}.{name}" if place else str(name))
    elif isinstance(given, list) and isinstance(read, list | tuple):
        for position, pair in enumerate(zip(given, read, strict=False)):
            check_numbers(*pair, where, f"{place}.{position}")


def read_model(path: Path, model: type[Model]) -> Model:
    """The JSON in a file that the user named, as this model; raise UserError that names the wrong place."""
    from pydantic import ValidationError

    text = read_text(path)
    content = json_in(text, path)
    try:
        read = model.model_validate_json(text)  # its errors name JSON's objects and arrays
    except ValidationError as error:
        wrong = first_wrong(error)
        raise UserError(f"{path}: {wrong.place or 'file'}: {wrong.reason}") from error
    check_numbers(content, read, path)
    return read
