"""The limits of a request's body, for all protocols: its size and its time.

The sizes that a request claims are checked before any memory of that size is allocated.
"""

import asyncio
import gc
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
from starlette.types import Receive

from deployments.front.answers import RefusedError, shown

# The time to read a body. A slower client would only hold the connection.
READ_WITHIN_S = 30.0
ENCODINGS = {b"", b"identity", b"gzip", b"deflate"}
# Dimensions of a tensor.
MOST_DIMENSIONS = 8
# Characters of a name or an id.
LONGEST_NAME = 1024
# Names in a list of a request, such as its outputs.
MOST_NAMED = 64
_TOO_SLOW = "the body is too slow"  # marks the cancellation by our own alarm
_SHOWN_BYTES = 20  # of a wrong body, in the error
# Digits of a size. No real size has more, and Python refuses to read numbers with thousands of digits.
_LONGEST_NUMBER = 18
# The `wbits` of zlib that detect both formats.
_GZIP_OR_ZLIB = zlib.MAX_WBITS + 32


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


async def body_of(headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int) -> bytes:
    """The whole body, decompressed. Raises 413 as soon as its compressed or decompressed size is too large."""
    encoding = headers.get(b"content-encoding", b"").strip().lower()
    if encoding not in ENCODINGS:
        name = shown(encoding.decode("latin-1"))
        raise RefusedError(415, f"Content-Encoding is {name}: a body may be uncompressed, gzip or deflate")
    if (size := size_of(headers)) > max_bytes:
        raise RefusedError(413, f"the body has {size} bytes: {max_bytes} are allowed")
    body = await _read_in_time(receive, max_bytes)
    return _decompressed(body, max_bytes) if encoding in (b"gzip", b"deflate") else body


async def _read_in_time(receive: Receive, max_bytes: int) -> bytes:
    """Like `asyncio.timeout`, which would add a twentieth to the processor time of every request."""
    task = asyncio.current_task()
    assert task, "This is a bug: bodies are read by tasks."
    alarm = asyncio.get_running_loop().call_later(READ_WITHIN_S, task.cancel, _TOO_SLOW)
    try:
        return await _read(receive, max_bytes)
    except asyncio.CancelledError as cancelled:
        if cancelled.args != (_TOO_SLOW,):
            raise
        task.uncancel()
        raise RefusedError(408, f"the body did not arrive within {READ_WITHIN_S:.0f} seconds") from None
    finally:
        alarm.cancel()


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(400, "the connection closed before the whole body had arrived")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise RefusedError(413, f"the body has more than the {max_bytes} bytes that are allowed")
        if not message.get("more_body"):
            return bytes(body)


def _decompressed(body: bytes, max_bytes: int) -> bytes:
    """Decompress at most `max_bytes`, however large the content of a small body is."""
    unpacking = zlib.decompressobj(_GZIP_OR_ZLIB)
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


def json_in(body: bytes) -> object:
    """
    >>> json_in(b'{"inputs": "a text"}')
    {'inputs': 'a text'}
    """
    gc.disable()  # millions of lists would start the collector again and again: ten times the cost of decoding
    try:
        return _decode(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}{_near(body, str(error))}") from error
    finally:
        gc.enable()


def _near(body: bytes, sentence: str) -> str:
    """The text at the byte that the decoder's sentence names.

    >>> _near(b'{"inputs": NaN}', "invalid character (byte 11)")
    ", before 'NaN}'"
    """
    match = re.search(r"\(byte (\d+)\)", sentence)
    return f", before {shown(body[int(match[1]) :][:_SHOWN_BYTES].decode('latin-1'))}" if match else ""


_decode = msgspec.json.Decoder().decode  # accepts no NaN and no Infinity, and needs a quarter of json's time
