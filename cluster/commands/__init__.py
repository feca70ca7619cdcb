"""One file per command of `isobatch`. Heavy imports stay inside the functions, so that --help is instant."""

import os
from collections.abc import Mapping
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer

from profiles.errors import UserError

Metric = Literal["accuracy", "agreement", "worst-class", "macro-f1", "mcc"]  # profiles/losses.py says what they are
Dtype = Literal["float32", "float16", "bfloat16", "int8"]  # int8 is for CPUs, on ONNX Runtime
METRICS = "accuracy, agreement with the full network (needs no labels), the recall of any class, macro-F1 or MCC"


KeyVariable = Annotated[str | None, typer.Option(help="Environment variable with the server's API key.")]


def key_headers(variable: str | None) -> dict[str, str]:
    """What shows the key that this environment variable holds to a server; nothing where none is asked for."""
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise UserError(f"--api-key-variable {variable}: that environment variable is not set")
    return {"X-API-Key": os.environ[variable]}


def server_at(url: str) -> str:
    """A server's address, without a slash at its end; raise UserError if it cannot be one.

    >>> server_at("http://127.0.0.1:8000/")
    'http://127.0.0.1:8000'
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{url!r} must look like http://HOST:PORT, as 'isobatch serve' prints it")
    return url.rstrip("/")


def above_0(option: str, value: float | None) -> None:
    """Raise UserError if the value of an option is given and makes no sense.

    >>> above_0("--slo-ms", 5.0)
    """
    if value is not None and not 0 < value < inf:
        raise UserError(f"{option} {value:g} must be above 0" + (", and finite" if value == inf else ""))


def check_not_given(given: Mapping[str, tuple[object, object]], instead: str) -> None:
    """Raise UserError if an option for classifiers, by name (value, default), was given for a decoder.

    >>> check_not_given({"--mix": (None, None)}, "it plays no decoder")
    """
    for name, (value, default) in given.items():
        if value != default:
            raise UserError(f"{name} is for classifiers: {instead}")


def check_writable(out: Path) -> None:
    """Raise UserError now, before the work, if no file can be written at `out` after it."""
    try:
        with TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}: choose a directory that exists with --out") from None
