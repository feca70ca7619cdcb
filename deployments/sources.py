"""The place of a model: a directory here, Hugging Face's hub, or a bucket; and its copy on this node.

A model elsewhere is named by a URL: `hf://ORG/NAME`, `s3://BUCKET/FOLDER` or `gs://BUCKET/FOLDER`. With a revision it
is pinned: `hf://ORG/NAME@COMMIT`, or `s3://BUCKET/FOLDER@HASH`, where HASH is made from the hashes of its files. A
pinned URL with `/plan.json` is a file of the model. Each node of a cluster fetches what it needs into its cache.
"""

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from isobatch.deployments.folders import cache_directory, locked, replacing
from isobatch.deployments.named import built_in
from isobatch.deployments.progress import show
from isobatch.profiles.errors import UserError

log = logging.getLogger(__name__)

# Suffixes of a checkpoint's files. Pickles are not among them, as loading a pickle can run code.
SAFE_SUFFIXES = (".json", ".txt", ".safetensors", ".model", ".jinja")
_WANTED = (*SAFE_SUFFIXES, ".npz")  # isobatch's own arrays, too, which hold no objects
SUMS = "SHA256SUMS"  # beside a bucket's files in the cache: their hashes, which `sha256sum -c` also checks
_NAME = re.compile(r"(level-\d+/)?[\w+ -][\w.+ -]*")  # of a file, in the model's folder or in that of a cascade's level
_PINNED = re.compile(r"(hf|s3|gs)://(.+)@([0-9a-f]{16}|[0-9a-f]{40})(?:/([\w.-]+))?")
_BUCKET = re.compile(r"(s3|gs)://(.+)()()")
_HUB = re.compile(r"(?!\.)([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?()")
_HUB_URL = re.compile(f"(hf)://{_HUB.pattern}")
_FORMS = "hf://ORG/NAME[@REVISION], s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///DIRECTORY"
_PART_BYTES = 8 * 2**20  # of one download; several run at once
_AT_ONCE = 8


@dataclass(frozen=True)
class Remote:
    """A model on the hub or in a bucket, or one file of it."""

    scheme: str  # hf, s3 or gs
    place: str  # ORG/NAME on the hub, BUCKET/FOLDER
    revision: str = ""  # "": the present one
    file: str = ""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.place}"

    def __str__(self) -> str:
        return self.url + (f"@{self.revision}" if self.revision else "") + (f"/{self.file}" if self.file else "")


def is_url(text: str) -> bool:
    """
    >>> is_url("s3://bucket/my-bert"), is_url("models/my-bert")
    (True, False)
    """
    return "://" in text


def as_url(model: str) -> str:
    """A hub id as a URL; a URL, a built-in name, or a path stays as it is.

    >>> as_url("me/my-bert@v1"), as_url("./my-bert")
    ('hf://me/my-bert@v1', './my-bert')
    """
    is_path = is_url(model) or Path(model).exists() or built_in(model) or not _HUB.fullmatch(model)
    return model if is_path else f"hf://{model}"


def remote_of(model: str | Path) -> Remote | None:
    """The model that a URL names; None: a directory here.

    >>> remote_of("hf://me/my-bert@v1")
    Remote(scheme='hf', place='me/my-bert', revision='v1', file='')
    >>> remote_of("s3://models/my-bert@0123456789abcdef/plan.json").file
    'plan.json'
    """
    text = str(model)
    if not is_url(text) or text.startswith("file://"):
        return None
    for form in (_PINNED, _BUCKET, _HUB_URL):
        if parts := form.fullmatch(text.rstrip("/")):
            scheme, place, revision, file = parts.groups()
            return Remote(scheme, place.rstrip("/"), revision or "", file or "")
    raise UserError(f"{text}: is not the URL of a model; write {_FORMS}")


def name_of(model: str) -> str:
    """The last part of a model's place.

    >>> name_of("s3://models/my-bert@0123456789abcdef"), name_of("runs/my-bert")
    ('my-bert', 'my-bert')
    """
    return _name(remote.place if (remote := remote_of(as_url(model))) else model)


def _name(place: str) -> str:
    """The name of a directory, also where the path to it ends in `.` or `..`."""
    name = Path(place).name
    return name if name.strip(".") else Path(place).resolve().name


def local(model: str | Path) -> Path:
    """The directory or file on this node. What a URL names is fetched, unless it is here already."""
    if remote := remote_of(model):
        return fetched(replace(remote, file=""))[0] / remote.file
    text = str(model)
    if not text.startswith("file://"):
        return built_in(model) or Path(model)
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise UserError(f"{text}: the directory must be absolute, as in file:///models/my-bert")
    return Path(url2pathname(parts.path))


def pinned(model: str) -> str:
    """The same model with its present revision, as a URL; a directory here stays as it is."""
    if remote := remote_of(as_url(model)):
        return str(replace(remote, revision=fetched(replace(remote, file=""))[1]))
    return str(local(model)) if is_url(model) else model


def title_of(model: str) -> str:
    """A model's name in profiles and plans: its pinned URL, or the name of its directory."""
    place = pinned(model)
    return place if is_url(place) else _name(place)


@cache
def fetched(remote: Remote) -> tuple[Path, str]:
    """The model's directory in this node's cache, and its revision."""
    return _from_hub(remote) if remote.scheme == "hf" else _from_bucket(remote)


def _from_hub(remote: Remote) -> tuple[Path, str]:
    """A directory of Hugging Face's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    patterns, revision = [f"*{suffix}" for suffix in _WANTED], remote.revision or None
    try:
        folder = Path(snapshot_download(remote.place, revision=revision, allow_patterns=patterns))
    except RevisionNotFoundError as error:
        raise UserError(f"{remote.url}: the hub has no revision {remote.revision!r} of it") from error
    except GatedRepoError as error:
        raise UserError(f"{remote.url}: accept its terms on the hub, and set HF_TOKEN to a token of yours") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{remote.place}: no such directory here, and no such model on the hub that you may read (HF_TOKEN)"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{remote.place}: no such directory here, and it cannot be downloaded from the hub by that name: {reason}"
        ) from error
    return folder, folder.name


def _from_bucket(remote: Remote) -> tuple[Path, str]:
    """A directory of isobatch's cache. Of several processes that want it at the same time, one downloads."""
    name, models = Path(remote.place).name, cache_directory() / "models"
    if not _NAME.fullmatch(name) or "/" not in remote.place:
        raise UserError(f"{remote.url}: names no folder of a bucket; write {remote.scheme}://BUCKET/FOLDER")
    if remote.revision:
        for folder in sorted(models.glob("*/*/")):
            if folder.name == name and _revision_in(folder) == remote.revision and _is_whole(folder):
                return folder, remote.revision
    with _one_line_errors(remote):
        files = _Files.of(remote)
        folder = models / files.mark / name
        with locked(folder):
            if not _is_whole(folder):
                with replacing(folder) as draft:
                    files.download(draft)
    revision = _revision_in(folder)
    if remote.revision not in ("", revision):
        raise UserError(
            f"{remote.url}: its checksum differs: {remote.revision} is wanted, and {revision} lies there now: plan and "
            "deploy what lies there, or put back what was there"
        )
    return folder, revision


@dataclass(frozen=True)
class _Files:
    """A model's files in a bucket, and the number of bytes of each."""

    system: Any  # of fsspec
    remote: Remote
    sizes: dict[str, int]
    mark: str  # changes with the files, as far as their names, sizes and tags show

    @classmethod
    def of(cls, remote: Remote) -> "_Files":
        import fsspec

        system = fsspec.filesystem(remote.scheme, use_listings_cache=False, skip_instance_cache=True)
        entries: dict[str, dict[str, Any]] = system.find(remote.place, detail=True)
        names = {path: path.removeprefix(remote.place).lstrip("/") for path in entries}
        if remote.place in entries:
            raise UserError(f"{remote.url}: is a file; give the folder of a model")
        if wrong := next((path for path, name in names.items() if ".." in name.split("/")), None):
            raise UserError(f"{remote.url}: {wrong!r} would be outside of its folder: nothing is fetched")
        sizes, seen = dict[str, int](), []
        for path, name in sorted(names.items()):
            if _NAME.fullmatch(name) and name.endswith(_WANTED):
                entry = entries[path]
                sizes[name] = int(entry["size"])
                seen.append((name, sizes[name], entry.get("ETag") or entry.get("md5Hash") or entry.get("etag")))
        if not sizes:
            raise FileNotFoundError(remote.url)
        return cls(system, remote, sizes, sha256(repr(seen).encode()).hexdigest()[:16])

    def download(self, to: Path) -> None:
        total = sum(self.sizes.values())
        if total > (free := shutil.disk_usage(to).free):
            raise UserError(
                f"{self.remote.url}: has {total / 1e9:.1f} GB, and {to.parents[2]} has room for {free / 1e9:.1f} GB: "
                "XDG_CACHE_HOME=DIR names another place"
            )
        megabytes = show(self._megabytes(to), f"fetching {self.remote.url} (MB)", round(total / 1e6) or 1)
        for _ in megabytes:
            pass
        if _Files.of(self.remote).mark != self.mark:
            raise UserError(f"{self.remote.url}: was changed while it was fetched: start again")
        lines = [f"{_sha256_of(to / name)}  {name}\n" for name in self.sizes]
        (to / SUMS).write_text("".join(lines))

    def _megabytes(self, to: Path) -> Iterator[None]:
        """Write the files, and yield once for each megabyte that has come."""
        done_bytes = shown_mb = 0
        for name, size in self.sizes.items():
            (to / name).parent.mkdir(exist_ok=True)
            with (to / name).open("wb") as file:
                for start in range(0, size, _AT_ONCE * _PART_BYTES):
                    starts = range(start, min(size, start + _AT_ONCE * _PART_BYTES), _PART_BYTES)
                    ends = [min(size, begin + _PART_BYTES) for begin in starts]
                    paths = [f"{self.remote.place}/{name}"] * len(ends)
                    for part in self.system.cat_ranges(paths, list(starts), ends, on_error="raise"):
                        file.write(part)
                        done_bytes += len(part)
                    yield from [None] * (round(done_bytes / 1e6) - shown_mb)
                    shown_mb = round(done_bytes / 1e6)


def _revision_in(folder: Path) -> str:
    sums = folder / SUMS
    return sha256(sums.read_bytes()).hexdigest()[:16] if sums.is_file() else ""


def _is_whole(folder: Path) -> bool:
    """Whether all files of a cached model are as they were fetched."""
    if not (folder / SUMS).is_file():
        return False
    for line in (folder / SUMS).read_text().splitlines():
        expected, _, name = line.partition("  ")
        if not (folder / name).is_file() or _sha256_of(folder / name) != expected:
            log.warning("%s: is not as it was fetched: the model is fetched again", folder / name)
            return False
    return True


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


@contextmanager
def _one_line_errors(remote: Remote) -> Iterator[None]:
    """Raise UserError with one sentence for whatever a store's library raises."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except ImportError as error:
        extra = f"the extra [{remote.scheme}]: pip install 'isobatch[{remote.scheme}]'"
        raise UserError(f"{remote.url}: needs {extra} ({error})") from error
    except FileNotFoundError as error:
        raise UserError(f"{remote.url}: there is no such bucket, or no model in that folder") from error
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{remote.url}: cannot be fetched: {reason}") from error
