"""One file per command of `isobatch`. Heavy imports stay inside the functions, so that --help is instant."""

from pathlib import Path
from tempfile import TemporaryFile

from profiles.errors import UserError


def above_0(option: str, value: float | None) -> None:
    """Raise UserError if the value of an option is given and makes no sense.

    >>> above_0("--slo-ms", 5.0)
    """
    if value is not None and not value > 0:
        raise UserError(f"{option} {value:g} must be above 0")


def check_writable(out: Path) -> None:
    """Raise UserError now, before the work, if no file can be written at `out` after it."""
    try:
        with TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}: choose a directory that exists with --out") from None
