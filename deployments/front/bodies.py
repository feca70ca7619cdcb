"""The body of a request, for all protocols: the limits of its size and its time, and what it holds.

The sizes that a request claims are checked before any memory of that size is allocated.
"""

import asyncio
import gc
import re
import time
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.types import Receive

from isobatch.deployments.front.answers import RefusedError, shown
from isobatch.profiles.errors import first_wrong

READ_WITHIN_S = 30.0  # the time to read a body, over HTTP or gRPC: it has a place in the proxy meanwhile
# The limit of bodies that arrive at once is half of the places in the proxy, but at least and at most these numbers.
LEAST_ARRIVING, MOST_ARRIVING = 8, 256
MOST_ARRIVING_BYTES = 256 * 2**20  # of all bodies that arrive at once
JUDGED_AFTER_S = 0.1  # bodies are compared after this time, since a part of a quick body may come late, too
ENCODINGS = {b"gzip", b"x-gzip", b"deflate"}
MOST_DIMENSIONS = 8  # dimensions of a tensor
LONGEST_NAME = 1024  # characters of a name or an id
MOST_NAMED = 64  # names in a list of a request, such as its outputs
_CLOSED = "the connection closed before the whole body had arrived"
_SHOWN_BYTES = 20  # of a wrong body, in the error
# Digits of a size. HAProxy refuses longer ones, and Python refuses to read numbers with thousands of digits.
_LONGEST_NUMBER = 20
# Half of a surrogate pair, which msgspec names in other words
_HALF_A_PAIR = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_FORM = b"multipart/form-data"
_BOUNDARY = re.compile(rb'boundary="?([^";,\s]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'\bname="?([^";\s]*)', re.IGNORECASE)  # .NET sends names without quotes
_FILE = re.compile(rb"\bfilename\*?=|^content-type: *image/", re.IGNORECASE | re.MULTILINE)
FIELDS = ("scores", "top_k", "map", "size")  # of a request beside its inputs; a form may have them beside pictures
_GZIP_OR_ZLIB = zlib.MAX_WBITS + 32  # the `wbits` of zlib that detect both formats
_HEAD = re.compile(rb"[\x1f\x08\x18\x28\x38\x48\x58\x68\x78]")  # the first byte of gzip, and of zlib by its window


@dataclass(frozen=True)
class Sizes:
    """The limits of one request."""

    max_inputs: int
    max_bytes: int  # of the body, and also the number of values in a tensor

    def check_count(self, inputs: int) -> None:
        if not inputs:
            raise RefusedError(422, "'inputs' is empty: give one input or a list of them")
        if inputs > self.max_inputs:
            raise RefusedError(422, f"{inputs} inputs in one request: {self.max_inputs} are allowed")

    def check_shape(self, name: str, shape: Sequence[int]) -> int:
        """The number of values in a tensor of this shape, whose first dimension is the number of inputs."""
        if not 0 < len(shape) <= MOST_DIMENSIONS or min(shape) < 0:
            reason = f"shape {shown(shape)} must be a list of sizes, of {MOST_DIMENSIONS} dimensions at most"
            raise RefusedError(400, f"tensor {shown(name)}: {reason}")
        self.check_count(shape[0])
        if not 0 < (values := prod(shape)) <= self.max_bytes:
            reason = f"shape {shown(shape)} must hold at least one value, and {self.max_bytes} at most"
            raise RefusedError(400, f"tensor {shown(name)}: {reason}")
        return values


class ArrivingBodies:
    """The bodies that arrive now in this process. If they are too many or too large together, the slowest is given up.

    An honest client sends at the speed of its network. So an attacker who sends slowly to hold many places loses them.
    """

    def __init__(self) -> None:
        self.places: Callable[[], int] = lambda: 2 * MOST_ARRIVING  # in the proxy before this process
        self._bodies: set[ArrivingBody] = set()
        self._size = 0  # bytes
        self._looks_again = False

    def grow(self, body: "ArrivingBody", size: int) -> None:
        """Count a part of a body whose end has not come. Only such a body is compared with others.

        The proxy passes a small body on as a whole, so if that is late, this process is the reason.
        """
        self._bodies.add(body)
        body.size += size
        self._size += size
        self._make_room()

    def remove(self, body: "ArrivingBody") -> None:
        if body in self._bodies:
            self._bodies.remove(body)
            self._size -= body.size

    def _make_room(self) -> None:
        now_s, most = time.monotonic(), min(MOST_ARRIVING, max(LEAST_ARRIVING, self.places() // 2))
        while len(self._bodies) > most or (self._size > MOST_ARRIVING_BYTES and len(self._bodies) > 1):
            slowest = min(self._bodies, key=lambda body: body.pace(now_s))
            if (left_s := slowest.begun_s + JUDGED_AFTER_S - now_s) > 0:
                self._look_again(left_s)
                return
            self.remove(slowest)
            slowest.give_up()

    def _look_again(self, after_s: float) -> None:
        if not self._looks_again:
            self._looks_again = True
            asyncio.get_running_loop().call_later(after_s, self._again)

    def _again(self) -> None:
        self._looks_again = False
        self._make_room()


class ArrivingBody:
    """A body that begins to arrive; the code that awaits it runs in its context.

    The context raises 408 if the body takes too long, or is the slowest of too many. `asyncio.timeout` would add a
    twentieth to the processor time of every request.
    """

    def __init__(self, others: ArrivingBodies) -> None:
        self._others, self.begun_s = others, time.monotonic()
        self.size = 0
        self._given_up = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task, "This is a bug: bodies are read by tasks."
        self._task = task
        self._alarm = asyncio.get_running_loop().call_later(READ_WITHIN_S, self.give_up)
        return self

    def pace(self, now_s: float) -> tuple[float, float]:
        """Its bytes per second; of two that are alike, the older one is slower."""
        return self.size / max(now_s - self.begun_s, JUDGED_AFTER_S), self.begun_s

    def give_up(self) -> None:
        self._given_up = True
        self._task.cancel()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._alarm.cancel()
        self._others.remove(self)
        if self._given_up and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            limit = f"within {READ_WITHIN_S:g} seconds"
            raise RefusedError(408, f"the request did not arrive {limit}, or came more slowly than others") from None


ARRIVING = ArrivingBodies()


async def body_of(headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int) -> bytes:
    """The whole body, decompressed. Raises 413 as soon as its compressed or decompressed size is too large."""
    return unpacked(headers, await sent_body(headers, receive, max_bytes), max_bytes)


async def sent_body(headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int) -> bytes:
    """The whole body as it was sent: while it waits to be read, it takes no more memory than its client has sent."""
    encoding = _encoding_in(headers)
    if encoding not in ENCODINGS | {b"", b"identity"}:
        name = shown(encoding.decode("latin-1"))
        raise RefusedError(415, f"Content-Encoding is {name}: a body may be uncompressed, gzip or deflate")
    if (size := size_of(headers)) > max_bytes:
        raise RefusedError(413, f"the body has {size} bytes: {max_bytes} are allowed")
    with ArrivingBody(ARRIVING) as arriving:
        return await _read(receive, max_bytes, arriving)


def _encoding_in(headers: Mapping[bytes, bytes]) -> bytes:
    return headers.get(b"content-encoding", b"").strip().lower()


def is_packed(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the body is compressed."""
    return _encoding_in(headers) in ENCODINGS


def unpacked(headers: Mapping[bytes, bytes], body: bytes, max_bytes: int) -> bytes:
    """A body that was sent with these headers, decompressed."""
    return decompressed(body, max_bytes) if is_packed(headers) else body


async def _read(receive: Receive, max_bytes: int, arriving: ArrivingBody) -> bytes:
    body = bytearray()
    while True:
        try:
            message = await receive()
        except Exception as error:  # Serve's own proxy has given the request up
            raise RefusedError(400, _CLOSED) from error
        if message["type"] == "http.disconnect":
            raise RefusedError(400, _CLOSED)
        part = message.get("body", b"")
        body += part
        if len(body) > max_bytes:
            raise RefusedError(413, f"the body has more than the {max_bytes} bytes that are allowed")
        if not message.get("more_body"):
            return bytes(body)
        ARRIVING.grow(arriving, len(part))


def decompressed(body: bytes, max_bytes: int) -> bytes:
    """Decompress at most `max_bytes`, however large the content of a small body is."""
    unpacking = zlib.decompressobj(_GZIP_OR_ZLIB if _HEAD.match(body) else -zlib.MAX_WBITS)  # raw deflate has no head
    try:
        content = unpacking.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise RefusedError(400, f"the body does not match its Content-Encoding: {error}") from error
    if len(content) > max_bytes:
        raise RefusedError(413, f"the decompressed body has more than the {max_bytes} bytes that are allowed")
    if not unpacking.eof or unpacking.unused_data:
        raise RefusedError(400, "the body does not match its Content-Encoding: it must be a single complete stream")
    return content


def size_of(headers: Mapping[bytes, bytes]) -> int:
    """The number of bytes of the body according to its headers; 0 where they do not tell."""
    return number(headers.get(b"content-length", b"0").decode("latin-1")) or 0


def number(text: str) -> int | None:
    """The number in a header; None if the text is no number.

    >>> number("12"), number("1e3"), number("9" * 5000)
    (12, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER else None


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], content: object, status: int = 400) -> Model:
    """The content of a body as a `model`; raises a `RefusedError` that names the first wrong value."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        wrong = first_wrong(error)
        if wrong.kind == "missing":
            raise RefusedError(status, f"{wrong.place} is missing") from error
        place = f"{wrong.place} = {shown(wrong.value)}: " if wrong.place else "the body: "
        raise RefusedError(status, f"{place}{wrong.reason}") from error


def json_in(body: bytes) -> object:
    """
    >>> json_in(b'{"inputs": "a text"}')
    {'inputs': 'a text'}
    """
    body = body.removeprefix(BOM_UTF8)  # with which some programs begin a file
    if not body:
        raise RefusedError(400, "the body is empty: it must be JSON")
    gc.disable()  # millions of lists would start the collector again and again: ten times the cost of reading them
    try:
        return _decode(body)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if ("truncated" in reason or "surrogate" in reason) and (half := _HALF_A_PAIR.search(body)):
            reason = f"{half[0].decode()} is half of a surrogate pair"
        raise RefusedError(400, f"the body is not JSON: {reason}{_near(body, reason)}") from error
    finally:
        gc.enable()


def _near(body: bytes, sentence: str) -> str:
    """The text at the byte that the reader's sentence names.

    >>> _near(b'{"inputs": NaN}', "invalid character (byte 11)")
    ", before 'NaN}'"
    """
    match = re.search(r"\(byte (\d+)\)", sentence)
    return f", before {shown(body[int(match[1]) :][:_SHOWN_BYTES].decode('latin-1'))}" if match else ""


_decode = msgspec.json.Decoder().decode  # accepts no NaN and no Infinity, and needs a quarter of json's time


def content_of(headers: Mapping[bytes, bytes], body: bytes, sizes: Sizes) -> object:
    """What a request holds: JSON, or pictures as its `inputs`.

    >>> content_of({b"content-type": b"image/png"}, b"...", Sizes(1, 3))
    {'inputs': b'...'}
    """
    kind = headers.get(b"content-type", b"")
    if kind.lower().startswith(b"image/"):
        return {"inputs": body}
    return _form_in(kind, body, sizes) if kind.lower().startswith(_FORM) else json_in(body)


def _form_in(kind: bytes, body: bytes, sizes: Sizes) -> dict[str, object]:
    """The parts of a form: every file is an input, in order."""
    boundary = _BOUNDARY.search(kind)
    if not boundary:
        raise RefusedError(400, "Content-Type is multipart/form-data without a boundary")
    inputs, content, delimiter = list[bytes](), dict[str, object](), b"\r\n--" + boundary[1]
    body, most = b"\r\n" + body, sizes.max_inputs + len(FIELDS)
    if (count := body.count(delimiter) - 1) > most:  # a million parts would take seconds to read
        raise RefusedError(422, f"{count} parts in one form: {most} are allowed")
    first, *parts = body.split(delimiter)
    if not parts or first.strip() or parts[-1][:2] != b"--":
        raise RefusedError(400, "the body is not a complete form: it does not end with its boundary")
    for part in parts[:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if _FILE.search(head):
            inputs.append(value)
        elif name and (field := name[1].decode("latin-1")) in FIELDS:
            content[field] = _value_in(value)
        else:
            raise RefusedError(400, "a part of the form is neither a file nor 'scores', 'top_k', 'map' or 'size'")
    return {"inputs": inputs} | content


def _value_in(value: bytes) -> object:
    """The value of a form's field: JSON, or a text such as `png`.

    >>> _value_in(b"[4, 6]"), _value_in(b"png")
    ([4, 6], 'png')
    """
    try:
        return json_in(value)
    except RefusedError:
        return value.decode("utf-8", "replace")
