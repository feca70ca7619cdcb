"""The one kind of error that is the user's to mend."""

from pathlib import Path


class UserError(ValueError):
    """Something the user gave cannot be used. The message is one line: the value, and what would work instead.

    The command line prints it without a traceback and exits with 2.
    """


def read_text(path: Path) -> str:
    """What a file that the user named holds."""
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file (UTF-8)") from None
