"""What is sent to a server: the user's own inputs, or made-up ones of the kind that the server says it takes."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from profiles.errors import UserError

MADE_UP = 256  # images, of which larger ones are fewer: together they have at most so many values
MOST_VALUES = 500_000
PATIENCE_S = 10.0
DIGIT = (8, 8)
UNAUTHORIZED, UNAVAILABLE = 401, 503
BYTES = "BYTES"  # as the Open Inference Protocol calls texts
SENTENCES = (
    "It works as it should, and I would buy it again.",
    "Nothing about this was worth the time or the money.",
    "A quiet story, told with care, that stays with you for days.",
    "When does the library open on Sundays?",
    "The delivery was late twice, but the people on the phone were kind and the second parcel was complete.",
    "Shares of the company fell by four percent after it had reported its results.",
    "Not bad.",
    "I do not know what to make of it: the beginning is slow, the middle is confused, and the end is wonderful.",
)


def predicts_at(url: str) -> str:
    """The URL that predicts, where only the server was named.

    >>> predicts_at("http://127.0.0.1:8000"), predicts_at("http://127.0.0.1:8000/v1/ask")
    ('http://127.0.0.1:8000/predict', 'http://127.0.0.1:8000/v1/ask')
    """
    return url.rstrip("/") + "/predict" if urlsplit(url).path in ("", "/") else url


def bodies_of(values: Iterable[Any]) -> list[bytes]:
    """A request for each input."""
    listed = (value.tolist() if hasattr(value, "tolist") else value for value in values)
    return [json.dumps({"inputs": [value]}).encode() for value in listed]


def bodies_in(path: Path) -> list[bytes]:
    """A request for each line."""
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not lines:
        raise UserError(f"{path} is empty: it needs a JSON body per line")
    return lines


@dataclass(frozen=True)
class Takes:
    """What a network takes, by what its server says of it."""

    texts: bool
    shape: tuple[int, ...] = ()  # of an image; -1 is a size that is not said

    @property
    def said(self) -> bool:
        return min(self.shape, default=0) > 0

    @property
    def channels(self) -> int | None:
        """Of an image, 0 where it is not said; None: it takes texts.

        >>> Takes(True).channels, Takes(False, (8, 8)).channels, Takes(False, (8, 8, 3)).channels
        (None, 1, 3)
        >>> Takes(False, (-1, -1)).channels
        0
        """
        if self.texts:
            return None
        return (1 if len(self.shape) == 2 else self.shape[2]) if self.said else 0


def taken_at(url: str, headers: Mapping[str, str]) -> Takes:
    """What the network behind this URL takes."""
    base = url.rpartition("/")[0]
    try:
        name = _asked(f"{base}/readyz", headers)["model"]
        told = _asked(f"{base}/v2/models/{name}", headers)["inputs"][0]
        return Takes(told["datatype"] == BYTES, tuple(map(int, told["shape"][1:])))
    except (OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
            raise UserError(f"nobody answers at {base}: {error.reason}") from error
        if isinstance(error, urllib.error.HTTPError) and error.code == UNAUTHORIZED:
            raise UserError(f"{base} asks for a key: --api-key-variable names the variable that holds it") from error
        if isinstance(error, urllib.error.HTTPError) and error.code == UNAVAILABLE:
            raise UserError(
                f"{base} is not ready (status {UNAVAILABLE}): wait until 'isobatch serve' says so"
            ) from error
        if _decodes(base, headers):
            raise UserError(f"{base} serves a decoder: --prompts FILE has texts written on from") from error
        raise UserError(
            f"{base} does not say whether its network takes texts or images ({_reason(error)}): "
            "--bodies FILE sends requests as they are"
        ) from error
    except HTTPException as error:
        raise UserError(f"what answers at {base} does not speak HTTP/1.1: is that the port of gRPC?") from error


def _decodes(base: str, headers: Mapping[str, str]) -> bool:
    try:
        return "tokens_per_s" in _asked(f"{base}/stats", headers)
    except (OSError, HTTPException, ValueError, TypeError):
        return False


def promised_ms(url: str, headers: Mapping[str, str]) -> float | None:
    """The deadline that the server behind this URL gives its answers; None: it does not say."""
    try:
        return float(_asked(f"{url.rpartition('/')[0]}/stats", headers)["slo_ms"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return None


def made_up(takes: Takes) -> tuple[str, list[bytes]]:
    """What these are, and a request with each: sentences, the demo's digits, or noise of the shape that is asked for.

    Noise is of whole numbers from 0 to 255, which any preprocessor reads. Where exits matter, --data must say more.
    """
    if takes.texts:
        return "made-up sentences", bodies_of(SENTENCES)
    if takes.shape == DIGIT or not takes.said:
        from deployments.demo.digits import demo_inputs

        unsaid = "" if takes.said else " (how large images must be is not said)"
        return f"of the demo's digits{unsaid}", bodies_of(digit.round(1) for digit in demo_inputs(MADE_UP))
    count = min(MADE_UP, -(-MOST_VALUES // prod(takes.shape)))
    images = np.random.default_rng(0).integers(0, 256, (count, *takes.shape))
    return f"made-up ones of {' x '.join(map(str, takes.shape))}", bodies_of(images)


def _asked(url: str, headers: Mapping[str, str]) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=PATIENCE_S) as reply:
        return json.load(reply)


def _reason(error: Exception) -> str:
    return f"status {error.code}" if isinstance(error, urllib.error.HTTPError) else "it answers otherwise"
