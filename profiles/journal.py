"""A log in one file that survives a crash: append-only JSON lines of bounded number, without a server.

One process writes. A line counts only if it is complete, so a write that was cut short loses its own line only. When
the file has twice as many lines as it should, a new file without the older half replaces it by renaming, so a good file
always exists. Every line has its schema version.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from isobatch.profiles.errors import UserError

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
T = TypeVar("T")


class Journal(Generic[T]):
    """A log of frozen dataclasses; `read` makes an entry from the output of `asdict`. Without a path it is in memory.

    >>> from tempfile import TemporaryDirectory
    >>> from isobatch.profiles.windows import Window
    >>> with TemporaryDirectory() as folder:
    ...     Journal(Path(folder) / "exits.jsonl", Window.read, keep=9).append(Window(0.0, 120.0, 10, (6, 4)))
    ...     Journal(Path(folder) / "exits.jsonl", Window.read, keep=9).entries
    (Window(start_s=0.0, duration_s=120.0, arrived=10, left=(6, 4), texts=0, full=0, unfinished=()),)
    """

    def __init__(self, path: Path | None, read: Callable[[dict[str, Any]], T], keep: int) -> None:
        self._path, self._read, self._keep = path, read, keep
        lines = path.read_bytes().split(b"\n") if path and path.exists() else [b""]
        parsed = [self._entry(line) for line in lines if line]
        self._entries = [entry for entry in parsed if entry is not None]
        self.damaged = len(parsed) - len(self._entries)  # lines that were cut short or hold no entry
        self._lines = len(parsed)
        self._ends_whole = not lines[-1]
        self._fails = False  # whether the last entry could not be written

    @property
    def entries(self) -> tuple[T, ...]:
        return tuple(self._entries[-self._keep :])

    def append(self, entry: T) -> None:
        """Add an entry; when this returns, it is on disk. While the disk takes nothing, entries are in memory only."""
        self._entries.append(entry)
        try:
            self._keep_on_disk(entry)
        except OSError as error:
            if not self._fails:
                log.warning("%s cannot be written, so a restart loses all later entries: %s", self._path, error)
            self._fails = True
        else:
            self._fails = False

    def _keep_on_disk(self, entry: T) -> None:
        if self._lines + 1 >= 2 * self._keep:
            self._entries = self._entries[-self._keep :]
            self._lines = len(self._entries)
            if self._path:
                self._rewrite(self._path)
            return
        self._lines += 1
        if self._path:
            self._write(self._path, entry)

    def _write(self, path: Path, entry: T) -> None:
        created, line = not path.exists(), _line(entry) if self._ends_whole else b"\n" + _line(entry)
        self._ends_whole = False  # until the whole line is written, since a full disk takes only a part
        with path.open("ab") as file:
            _write(file, line)
        if created:
            _sync_folder(path.parent)
        self._ends_whole = True

    def _rewrite(self, path: Path) -> None:
        beside = path.with_suffix(path.suffix + ".part")
        with beside.open("wb") as file:
            _write(file, b"".join(_line(entry) for entry in self._entries))
        beside.replace(path)
        _sync_folder(path.parent)
        self._ends_whole = True

    def _entry(self, line: bytes) -> T | None:
        try:
            fields = json.loads(line)
            version = fields.pop("v", None)
        except (ValueError, TypeError, AttributeError):
            return None
        if version != SCHEMA_VERSION:
            reason = f"schema version {version!r}, this isobatch reads {SCHEMA_VERSION}"
            raise UserError(f"{self._path} is of {reason}: move it away, or use the isobatch that wrote it")
        try:
            return self._read(fields)
        except (ValueError, TypeError, KeyError):
            return None


def _line(entry: Any) -> bytes:
    return json.dumps({"v": SCHEMA_VERSION, **asdict(entry)}, separators=(",", ":")).encode() + b"\n"


def _write(file: Any, content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Write a folder to disk, without which a new name in it may be lost."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
