"""Whether what a command will have to say can be written: asked before the work, not after it."""

from pathlib import Path
from tempfile import TemporaryFile

from profiles.errors import UserError


def check_writable(out: Path) -> None:
    """A file can be made where `out` will be."""
    try:
        with TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}: choose a directory that exists with --out") from None
