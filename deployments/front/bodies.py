"""How much a request may carry: its body is read within limits of size and time, and the sizes that it claims are
checked before anything of that size is made. All protocols use the same limits.
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

READ_WITHIN_S = 30.0  # a body that is not here by then never comes, or so slowly that it only holds the connection
ENCODINGS = {b"", b"identity", b"gzip", b"deflate"}
MOST_DIMENSIONS = 8
LONGEST_NAME = 1024  # characters, of a name or an id
MOST_NAMED = 64  # of what a request names several: outputs
_TOO_SLOW = "the body is too slow"
_NEAR = 20  # bytes of a wrong body that are shown
_LONGEST_NUMBER = 18  # digits: no size has more, and Python refuses to read numbers of thousands
_GZIP_OR_ZLIB = zlib.MAX_WBITS + 32


@dataclass(frozen=True)
class Sizes:
    """What one request may carry."""

    max_inputs: int
    max_bytes: int  # as it comes; no tensor may hold more values than that

    def check_count(self, inputs: int) -> None:
        if not inputs:
            raise RefusedError(422, "'inputs' is empty: give one input or a list of them")
        if inputs > self.max_inputs:
            raise RefusedError(422, f"{inputs} inputs in one request: {self.max_inputs} are allowed")

    def check_shape(self, name: str, shape: Sequence[int]) -> int:
        """How many values a tensor of this shape has; its first dimension counts the inputs."""
        if not 0 < len(shape) <= MOST_DIMENSIONS or min(shape) < 0:
            reason = f"shape {shown(shape)} must be a list of sizes, of {MOST_DIMENSIONS} dimensions at most"
            raise RefusedError(400, f"tensor {shown(name)}: {reason}")
        self.check_count(shape[0])
        if not 0 < (values := prod(shape)) <= self.max_bytes:
            reason = f"shape {shown(shape)} must hold at least one value, and {self.max_bytes} at most"
            raise RefusedError(400, f"tensor {shown(name)}: {reason}")
        return values


async def body_of(headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int) -> bytes:
    """The whole body, decompressed; 413 as soon as it is known to be too large, in either form."""
    encoding = headers.get(b"content-encoding", b"").strip().lower()
    if encoding not in ENCODINGS:
        told = shown(encoding.decode("latin-1"))
        raise RefusedError(415, f"Content-Encoding is {told}: a body may come as it is, as gzip or as deflate")
    told_bytes = number(headers.get(b"content-length", b"0").decode("latin-1"))
    if told_bytes is not None and told_bytes > max_bytes:
        raise RefusedError(413, f"the body has {told_bytes} bytes: {max_bytes} are allowed")
    body = await _read_in_time(receive, max_bytes)
    return _decompressed(body, max_bytes) if encoding in (b"gzip", b"deflate") else body


async def _read_in_time(receive: Receive, max_bytes: int) -> bytes:
    """As `asyncio.timeout` would have it, which every request would pay for with a twentieth of all that it costs."""
    task = asyncio.current_task()
    assert task, "This is a bug: bodies are read by tasks."
    alarm = asyncio.get_running_loop().call_later(READ_WITHIN_S, task.cancel, _TOO_SLOW)
    try:
        return await _read(receive, max_bytes)
    except asyncio.CancelledError as cancelled:
        if cancelled.args != (_TOO_SLOW,):
            raise
        task.uncancel()
        raise RefusedError(408, f"the body was not here after {READ_WITHIN_S:.0f} seconds") from None
    finally:
        alarm.cancel()


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(400, "the connection closed before the whole body was here")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise RefusedError(413, f"the body has more than {max_bytes} bytes, which is what is allowed")
        if not message.get("more_body"):
            return bytes(body)


def _decompressed(body: bytes, max_bytes: int) -> bytes:
    """What is allowed at most is unpacked, whatever a small body claims to hold."""
    unpacking = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        content = unpacking.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise RefusedError(400, f"the body is not what its Content-Encoding says: {error}") from error
    if len(content) > max_bytes:
        raise RefusedError(413, f"the body has more than {max_bytes} bytes decompressed, which is what is allowed")
    if not unpacking.eof or unpacking.unused_data:
        raise RefusedError(400, "the body is not what its Content-Encoding says: it must be one whole compressed piece")
    return content


def size_of(headers: Mapping[bytes, bytes]) -> int:
    """How many bytes the body will have, as far as the headers say."""
    return number(headers.get(b"content-length", b"0").decode("latin-1")) or 0


def number(told: str) -> int | None:
    """What a header counts; None where it counts nothing.

    >>> number("12"), number("1e3"), number("9" * 5000)
    (12, None, None)
    """
    return int(told) if told.isascii() and told.isdigit() and len(told) <= _LONGEST_NUMBER else None


def json_in(body: bytes) -> object:
    """
    >>> json_in(b'{"inputs": "a text"}')
    {'inputs': 'a text'}
    """
    gc.disable()  # millions of lists would start it again and again, which takes ten times as long as to read them
    try:
        return _decode(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}{_near(body, str(error))}") from error
    finally:
        gc.enable()


def _near(body: bytes, sentence: str) -> str:
    """What stands at the byte that the sentence names.

    >>> _near(b'{"inputs": NaN}', "invalid character (byte 11)")
    ", before 'NaN}'"
    """
    found = re.search(r"\(byte (\d+)\)", sentence)
    return f", before {shown(body[int(found[1]) :][:_NEAR].decode('latin-1'))}" if found else ""


_decode = msgspec.json.Decoder().decode  # knows no NaN and no Infinity, and takes a quarter of what json takes
