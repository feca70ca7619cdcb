"""The one kind of error that the user can mend."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """Something the user gave cannot be used. The message is one line: the value, and what would work instead.

    The command line prints it without a traceback and exits with 2.
    """


def read_text(path: Path) -> str:
    """The text of a file that the user named."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file (UTF-8)") from None


@dataclass(frozen=True)
class Wrong:
    """The first thing that pydantic found wrong in what a user wrote."""

    place: str  # names and positions, from outside in; empty where the whole is wrong
    reason: str
    value: object
    kind: str  # by which pydantic knows it, such as extra_forbidden


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
    place = ".".join(str(part) for part in first["loc"])
    return Wrong(place, first["msg"].removeprefix("Value error, "), first["input"], first["type"])
