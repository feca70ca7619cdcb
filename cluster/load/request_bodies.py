"""The bodies of requests: the user's own inputs, or made-up ones of the kind that the server accepts."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit

import numpy as np

from isobatch.cluster.client import as_json, json_at, stats_at
from isobatch.profiles.errors import UserError

MADE_UP = 256  # images; fewer if they are large
MOST_VALUES = 500_000  # of all made-up images together
DIGIT = (8, 8)  # the shape of the demo's images
UNAUTHORIZED = 401
UNAVAILABLE = 503
STATISTICS = frozenset(("slo_ms", "tokens_per_s"))  # one of them is in the statistics of every application
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


def predicts_at(url: str, headers: Mapping[str, str]) -> str:
    """The URL for predictions of a server, or of one of its applications (`/reviews`).

    >>> predicts_at("http://127.0.0.1:8000", {})
    'http://127.0.0.1:8000/predict'
    """
    path = urlsplit(url).path
    is_application = path in ("", "/") or (not path.endswith("/predict") and _has_statistics(url, headers))
    return url.rstrip("/") + "/predict" if is_application else url


def _has_statistics(url: str, headers: Mapping[str, str]) -> bool:
    """Whether an application has this address. One that asks for a key counts, so that the error names the key."""
    try:
        stats = json_at(f"{url}/stats", headers)
    except HTTPError as error:
        return error.code == UNAUTHORIZED
    except UserError:
        return False
    return isinstance(stats, dict) and not STATISTICS.isdisjoint(stats)


def bodies_of(values: Iterable[Any]) -> list[bytes]:
    return [json.dumps({"inputs": [as_json(value)]}).encode() for value in values]


def bodies_in(path: Path) -> list[bytes]:
    try:
        content = path.read_bytes().removeprefix(BOM_UTF8)
        lines = [line for each in content.splitlines() if (line := each.strip())]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if not lines:
        raise UserError(f"{path} is empty: it needs a JSON body per line")
    return lines


@dataclass(frozen=True)
class AcceptedInputs:
    """The kind of inputs that a network accepts, according to its server."""

    texts: bool
    shape: tuple[int, ...] = ()  # of an image; -1: the server does not name this size
    model: str = ""  # the name of the network
    parts: bool = False  # the words of a text, or the pixels or points of a picture, get an answer each

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
        name = json_at(f"{base}/readyz", headers)["model"]
        about = json_at(f"{base}/v2/models/{quote(name)}", headers)
        # Of one answer to an input, the probabilities of labels are inputs x labels.
        tensor, parts = about["inputs"][0], any(len(each["shape"]) > 2 for each in about.get("outputs", ()))
        return AcceptedInputs(tensor["datatype"] == BYTES, tuple(map(int, tensor["shape"][1:])), name, parts)
    except UserError:
        raise
    except (HTTPError, ValueError, LookupError, TypeError) as error:
        status = error.code if isinstance(error, HTTPError) else None
        if status == UNAUTHORIZED:
            raise UserError(f"{base} asks for a key: --api-key-variable names the variable that holds it") from error
        if status == UNAVAILABLE:
            raise UserError(f"{base} is not ready (status {status}): wait until 'isobatch serve' says so") from error
        if "tokens_per_s" in stats_at(base, headers):
            raise UserError(f"{base} writes texts: --prompts FILE sends prompts") from error
        reason = f"status {status}" if status else "its answer has another form"
        raise UserError(
            f"{base} does not say whether its network takes texts or images ({reason}): "
            "--bodies FILE sends requests as they are"
        ) from error


def promised_ms(url: str, headers: Mapping[str, str]) -> float | None:
    """The deadline for answers of the server behind this URL; None: it names none."""
    slo_ms = stats_at(url.rpartition("/")[0], headers).get("slo_ms")
    return float(slo_ms) if isinstance(slo_ms, int | float) else None


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
