"""The bodies of requests: the user's own inputs, or made-up ones of the kind that the server accepts."""

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

from isobatch.profiles.errors import UserError

MADE_UP = 256  # images; fewer if they are large
MOST_VALUES = 500_000  # of all made-up images together
PATIENCE_S = 10.0  # for an answer of the server about itself
DIGIT = (8, 8)  # the shape of the demo's images
UNAUTHORIZED = 401
UNAVAILABLE = 503
BYTES = "BYTES"  # the Open Inference Protocol's name for texts
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
    """The URL for predictions, if only the server was given.

    >>> predicts_at("http://127.0.0.1:8000"), predicts_at("http://127.0.0.1:8000/v1/ask")
    ('http://127.0.0.1:8000/predict', 'http://127.0.0.1:8000/v1/ask')
    """
    return url.rstrip("/") + "/predict" if urlsplit(url).path in ("", "/") else url


def bodies_of(values: Iterable[Any]) -> list[bytes]:
    listed = (value.tolist() if hasattr(value, "tolist") else value for value in values)
    return [json.dumps({"inputs": [value]}).encode() for value in listed]


def bodies_in(path: Path) -> list[bytes]:
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not lines:
        raise UserError(f"{path} is empty: it needs a JSON body per line")
    return lines


@dataclass(frozen=True)
class AcceptedInputs:
    """The kind of inputs that a network accepts, according to its server."""

    texts: bool
    shape: tuple[int, ...] = ()  # of an image; -1: the server does not name this size
    model: str = ""  # the name of the network
    words: bool = False  # the words of a text get a label each

    @property
    def shape_is_known(self) -> bool:
        return min(self.shape, default=0) > 0

    @property
    def channels(self) -> int | None:
        """The channels of an image, 0 if they are not known; None: inputs are texts.

        >>> [AcceptedInputs(False, shape).channels for shape in ((8, 8), (8, 8, 3), (-1, -1))]
        [1, 3, 0]
        """
        if self.texts:
            return None
        return (1 if len(self.shape) == 2 else self.shape[2]) if self.shape_is_known else 0


def accepted_at(url: str, headers: Mapping[str, str]) -> AcceptedInputs:
    """The kind of inputs that the network behind this URL accepts."""
    base = url.rpartition("/")[0]
    try:
        name = _get(f"{base}/readyz", headers)["model"]
        about = _get(f"{base}/v2/models/{name}", headers)
        tensor, words = about["inputs"][0], any(each["name"] == "words" for each in about.get("outputs", ()))
        return AcceptedInputs(tensor["datatype"] == BYTES, tuple(map(int, tensor["shape"][1:])), name, words)
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
            raise UserError(f"{base} serves a decoder: --prompts FILE sends prompts") from error
        raise UserError(
            f"{base} does not say whether its network takes texts or images ({_reason(error)}): "
            "--bodies FILE sends requests as they are"
        ) from error
    except HTTPException as error:
        raise UserError(f"the server at {base} does not speak HTTP/1.1: is that the port of gRPC?") from error


def _decodes(base: str, headers: Mapping[str, str]) -> bool:
    try:
        return "tokens_per_s" in _get(f"{base}/stats", headers)
    except (OSError, HTTPException, ValueError, TypeError):
        return False


def promised_ms(url: str, headers: Mapping[str, str]) -> float | None:
    """The deadline for answers of the server behind this URL; None: it names none."""
    try:
        return float(_get(f"{url.rpartition('/')[0]}/stats", headers)["slo_ms"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return None


def made_up(takes: AcceptedInputs) -> tuple[str, list[bytes]]:
    """A description and the bodies of made-up inputs: sentences, the demo's digits, or noise of the accepted shape.

    Noise consists of whole numbers from 0 to 255, which any preprocessor reads. For realistic exits, --data is needed.
    """
    if takes.texts:
        return "made-up sentences", bodies_of(SENTENCES)
    if takes.shape == DIGIT or not takes.shape_is_known:
        from isobatch.deployments.demo.digits import demo_inputs

        note = "" if takes.shape_is_known else " (the server does not name the size of images)"
        return f"of the demo's digits{note}", bodies_of(digit.round(1) for digit in demo_inputs(MADE_UP))
    count = min(MADE_UP, -(-MOST_VALUES // prod(takes.shape)))
    images = np.random.default_rng(0).integers(0, 256, (count, *takes.shape))
    return f"made-up ones of {' x '.join(map(str, takes.shape))}", bodies_of(images)


def _get(url: str, headers: Mapping[str, str]) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=PATIENCE_S) as reply:
        return json.load(reply)


def _reason(error: Exception) -> str:
    return f"status {error.code}" if isinstance(error, urllib.error.HTTPError) else "its answer has another form"
