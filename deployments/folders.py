"""Directories that are there whole or not at all, and the cache they are kept in."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STALE_S = 24 * 3600.0


def cache_directory() -> Path:
    """Where isobatch keeps what it can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isobatch"


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Write to the directory given; it becomes `target`, replacing what is there, only when nothing went wrong.

    Replacing takes two renames: a machine that stops between them leaves no `target`, but both directories, whole and
    hidden, beside its place (`.NAME.*` and `.NAME.*.old`).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    draft.chmod(0o755)
    try:
        yield draft
        old = draft.with_name(draft.name + ".old")
        if target.exists():
            target.rename(old)
        draft.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """Only one process at a time makes `target`; the others wait. The lock ends with the process that holds it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def make_room(cache: Path, needed_bytes: int, limit_bytes: int, now_s: float | None = None) -> None:
    """Remove the entries used longest ago until the new one fits, and the drafts that a killed process left."""
    now_s = time.time() if now_s is None else now_s
    entries = sorted((path for path in cache.glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for draft in [path for path in entries if path.name.startswith(".")]:
        entries.remove(draft)
        if now_s - draft.stat().st_mtime > STALE_S:
            shutil.rmtree(draft, ignore_errors=True)
    held = {path: size_bytes(path) for path in entries}
    for path in entries:
        if needed_bytes + sum(held.values()) <= limit_bytes:
            return
        shutil.rmtree(path, ignore_errors=True)
        del held[path]
