"""The windows that were seen, in one file that survives a crash: append-only JSON lines, bounded, no server.

One process writes. A line counts only when it is whole, so a write that was cut short loses its own window and no
other. When the file holds twice as many windows as are wanted, the older half is dropped by writing a new file beside
it and renaming that: at every moment there is one good file.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from profiles.windows import Window

KEEP = 720  # a day of two-minute windows


class History:
    """
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     History(Path(folder) / "exits.jsonl").append(Window(0.0, 120.0, 10, (6, 4)))
    ...     History(Path(folder) / "exits.jsonl").windows
    (Window(start_s=0.0, duration_s=120.0, arrived=10, left=(6, 4)),)
    """

    def __init__(self, path: Path, keep: int = KEEP) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep} must be 1 or more")
        self._path, self._keep = path, keep
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        read = [_window(line) for line in lines if line]
        self._windows = [window for window in read if window]
        self.damaged = len(read) - len(self._windows)  # lines that were cut short or are not windows
        self._lines = len(read)
        self._ends_whole = not lines[-1]

    @property
    def windows(self) -> tuple[Window, ...]:
        """The latest ones, oldest first."""
        return tuple(self._windows[-self._keep :])

    def append(self, window: Window) -> None:
        """Keep a window; when this returns it is on disk."""
        self._windows.append(window)
        if self._lines + 1 >= 2 * self._keep:
            self._rewrite()
            return
        created = not self._path.exists()
        with self._path.open("ab") as file:
            _write(file, _line(window) if self._ends_whole else b"\n" + _line(window))
        if created:
            _sync_folder(self._path.parent)
        self._lines += 1
        self._ends_whole = True

    def _rewrite(self) -> None:
        self._windows = self._windows[-self._keep :]
        beside = self._path.with_suffix(self._path.suffix + ".part")
        with beside.open("wb") as file:
            _write(file, b"".join(_line(window) for window in self._windows))
        beside.replace(self._path)
        _sync_folder(self._path.parent)
        self._lines = len(self._windows)
        self._ends_whole = True


def _line(window: Window) -> bytes:
    return json.dumps(asdict(window), separators=(",", ":")).encode() + b"\n"


def _write(file: Any, content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """A new name is on disk only when its folder is."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _window(line: bytes) -> Window | None:
    try:
        fields = json.loads(line)
        return Window(**{**fields, "left": tuple(fields["left"])})
    except (ValueError, TypeError, KeyError):
        return None
