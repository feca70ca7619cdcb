"""Directories that are written completely or not at all, the cache, and the hashes of a checkpoint's files."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from isobatch.profiles.errors import UserError, naming_target, read_json
from isobatch.profiles.promise import RULES

_ANSWER_FILES = (
    "*.safetensors", "exits.json", "config.json", "cascade.json", "level-*/*.safetensors", "level-*/config.json",
)  # fmt: skip
_RAMP_WEIGHTS = ("ramps.safetensors", "cascade.json")  # of a cascade: how its levels are weighted
STALE_S = 24 * 3600.0  # no process still writes to a draft older than this
# The files in a prepared model's folder that say how it is served.
PLAN, PROFILE = "plan.json", "profile.json"
STEPS = "up.json"  # the inputs of each step of `isobatch up`
DECODER_CLASSES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # the ends of the names of their classes


def cache_directory() -> Path:
    """The folder for files that can be made again: on Linux ~/.cache/isobatch, or isobatch under XDG_CACHE_HOME."""
    try:
        folder = user_cache_path("isobatch", appauthor=False)
    except RuntimeError as error:
        problem = "this user has no home, in which there could be a cache"
        raise UserError(f"{problem}: XDG_CACHE_HOME=DIR names a place") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".try-", dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"the cache {folder} cannot be written: {error.strerror}: XDG_CACHE_HOME=DIR names another place"
        ) from error
    return folder


def check_replaceable(folder: Path) -> None:
    """Raise UserError if a folder cannot be renamed, as `replacing` does: a mounted one, or one that holds the current
    folder."""
    if os.path.ismount(folder.resolve()) or Path.cwd().is_relative_to(folder.resolve()):
        raise UserError(f"{folder}: is mounted or holds the current folder, so it cannot be replaced: name one in it")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a directory to write to. Without an error, it then becomes `target` and replaces what was there.

    Replacing takes two renames. If the machine stops between them there is no `target`, but both directories lie beside
    it, complete, under the hidden names `.NAME.*` and `.NAME.*.old`.
    """
    given, target = target, target.resolve()  # a link stays one
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    draft.chmod(0o755)
    try:
        with naming_target(draft, given):
            yield draft
        old = draft.with_name(draft.name + ".old")
        if target.exists():
            target.rename(old)
        draft.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def locked(target: Path, refusal: str = "") -> Iterator[None]:
    """Let one process at a time make `target`; the others wait, or are refused with this sentence. A lock ends with the
    process that holds it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(target.with_name(f".{target.name}.lock")).acquire(timeout=0 if refusal else -1)
    except Timeout:
        raise UserError(refusal) from None
    with held:
        yield


def weights_of(folder: Path) -> str:
    """A short hash of a checkpoint's weights, without its ramps; "": it has no weights in Hugging Face's format.

    The hash does not depend on the folder's name, nor on whether the checkpoint was prepared.
    """
    return hash_of(sorted([*folder.glob("model*.safetensors"), *folder.glob("level-*/model*.safetensors")]))


def ramps_of(folder: Path) -> str:
    """A short hash of what decides at which ramps a checkpoint's inputs leave, also if it has no ramps."""
    content = checkpoint_json(folder, RULES)
    rules = {name: content.get(name) for name in ("policy", "ramps", "head_temperature", "most_unsure")}
    weights = hash_of([path for name in _RAMP_WEIGHTS if (path := folder / name).is_file()])
    return sha256(f"{weights} {json.dumps(rules)}".encode()).hexdigest()[:16]


def content_of(folder: Path) -> str:
    """A short hash of all files of a checkpoint that its answers depend on: weights, ramps, rules; "": it has none.

    A cascade has a folder of them for each level.
    """
    return hash_of(sorted(path for name in _ANSWER_FILES for path in folder.glob(name)))


def hash_of(files: Sequence[Path]) -> str:
    """A short hash of the contents of files; "": there are none."""
    digest = sha256()
    for path in files:
        with path.open("rb") as file:
            file_digest(file, lambda: digest)
    return digest.hexdigest()[:16] if files else ""


def files_of_data(data: Path) -> list[Path]:
    """The files that hold the rows of a file of inputs, or of a directory that `datasets` has saved.

    Files named cache-* hold what was computed from these rows.
    """
    if not data.is_dir():
        return [data]
    tables = sorted(data.glob("*.arrow")) or sorted(data.glob("*.parquet"))
    return [path for path in tables if not path.name.startswith("cache-")]


def hash_of_data(data: Path) -> str:
    """A short hash of the rows of a file or directory of inputs; "": there are none, or they can be read only once."""
    return hash_of([path for path in files_of_data(data) if path.is_file()])


def checkpoint_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """The content of one of a checkpoint's JSON files, which is read without loading the network; empty without it."""
    path = folder / name
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a JSON object, got {type(content).__name__}")
    return content


def is_decoder(folder: Path) -> bool:
    """Whether a directory holds a decoder."""
    names = checkpoint_json(folder).get("architectures")
    return isinstance(names, list) and any(str(name).endswith(DECODER_CLASSES) for name in names)


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def make_room(cache: Path, needed_bytes: int, limit_bytes: int) -> None:
    """Remove the least recently used entries until the new one fits, and the drafts that killed processes left."""
    entries = sorted((path for path in cache.glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for draft in [path for path in entries if path.name.startswith(".")]:
        entries.remove(draft)
        if time.time() - draft.stat().st_mtime > STALE_S:
            shutil.rmtree(draft, ignore_errors=True)
    sizes = {path: size_bytes(path) for path in entries}
    for path in entries:
        if needed_bytes + sum(sizes.values()) <= limit_bytes:
            return
        shutil.rmtree(path, ignore_errors=True)
        del sizes[path]
