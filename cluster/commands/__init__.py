"""One file per command of `isobatch`. Heavy imports stay inside the functions, so that --help is instant."""

import os
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import typer

from isobatch.deployments.named import Dtype as Dtype
from isobatch.profiles.errors import UserError
from isobatch.profiles.losses import Metric as Metric

Number = TypeVar("Number", int, float)

METRICS = (
    "accuracy, agreement with the full network (needs no labels), the recall of any class, macro-F1 or MCC; where an "
    "input has several labels, micro-F1; where its pixels have labels, mean IoU; where it has a score, the absolute "
    "error, or with --queries NDCG@10"
)
INTERRUPTED = 130  # the exit code after Ctrl-C
PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")
KeyVariable = Annotated[str | None, typer.Option(help="Environment variable with the server's API key.")]


def share_cores() -> None:
    """Let threads of torch sleep while they wait for each other. To be called before torch is imported.

    Without this they wait in a loop, so that a command that shares its cores with other programs takes many times
    longer. Alone it takes as long as with it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def key_headers(variable: str | None) -> dict[str, str]:
    """The header with the server's API key, which this environment variable holds; no header without a variable."""
    if variable is None:
        return {}
    if not (key := os.environ.get(variable, "").strip()):  # as the server reads it
        raise UserError(f"--api-key-variable {variable}: that environment variable is not set, or empty")
    return {"X-API-Key": key}


def server_at(url: str) -> str:
    """A server's address, without a slash at its end; raise UserError if it cannot be one.

    >>> server_at("http://127.0.0.1:8000/")
    'http://127.0.0.1:8000'
    """
    with suppress(ValueError):  # of a port or a name that is none
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and (parts.hostname or "").encode("idna") and parts.port != 0:
            return url.rstrip("/")
    raise UserError(f"{url!r} must look like http://HOST:PORT, as 'isobatch serve' prints it")


def above_0(option: str, value: float | None) -> None:
    """Raise UserError if a value is given that is not above 0 and finite.

    >>> above_0("--slo-ms", 5.0)
    """
    if value is not None and not 0 < value < inf:
        raise UserError(f"{option} {value:g} must be above 0" + (", and finite" if value == inf else ""))


def number_text(value: float | None) -> str:
    """A number; below 100 with three significant digits, as rates may be below 1.

    >>> number_text(1234.5), number_text(0.25), number_text(None)
    ('1,234', '0.25', '?')
    """
    if value is None:
        return "?"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def numbers_in(option: str, text: str, number: Callable[[str], Number], what: str) -> list[Number]:
    """The numbers above 0 in an option, with commas between them.

    >>> numbers_in("--tokens", "32, 128", int, "numbers of tokens, as in 32,128")
    [32, 128]
    """
    with suppress(ValueError):
        numbers = [number(part) for part in text.split(",")]
        if all(0 < each < inf for each in numbers):
            return numbers
    raise UserError(f"{option} {text!r} must be {what}")


def check_writable(out: Path, *used: Path | None) -> None:
    """Raise UserError if no file can be written at `out`, or if it is one of the files that the command uses. Commands
    check it before long work.
    """
    if out.is_dir():
        raise UserError(f"cannot write {out}: it is a directory: name a file in it")
    if out.exists() and not out.is_file():  # a device or a pipe, which is not replaced
        return
    for each in used:
        if each and os.path.realpath(out) == os.path.realpath(each):
            raise UserError(f"cannot write {out}: this command uses that file: name another one")
    try:
        with suppress(FileNotFoundError):
            out.stat()  # fails if links lead in a circle
        with TemporaryFile(dir=Path(os.path.realpath(out)).parent):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror}: name a file in a directory that exists and is yours"
        ) from None


def check_not_replaced(out: Path, *read: Path) -> None:
    """Raise UserError if something that is read lies in the directory that is replaced."""
    for each in read:
        beside = each.parent.resolve()  # of a link, which would be lost even if it leads elsewhere
        if out.resolve() in (beside, *beside.parents, *each.resolve().parents):
            raise UserError(f"{each}: lies in --out {out}, which is replaced: move it, or name another directory")


def check_picture(out: Path) -> None:
    """Raise UserError if no picture can be drawn at `out`. Commands check it before long work."""
    if out.suffix.lower() not in PICTURES:
        raise UserError(f"cannot draw {out}: a picture's name ends in {', '.join(PICTURES)}")
    check_writable(out)


def policy_path(policy: str) -> str:
    """The import path of a policy, by its name or by this path itself.

    >>> policy_path("entropy"), policy_path("mine:unsure")
    ('isobatch.deployments.exits:entropy', 'mine:unsure')
    """
    return policy if ":" in policy else f"isobatch.deployments.exits:{policy}"


def share(text: str) -> float:
    """
    >>> share("1%"), share("0.02")
    (0.01, 0.02)
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UserError(f"--max-accuracy-loss {text} is not a share; write it as 1% or 0.01")
    return value
