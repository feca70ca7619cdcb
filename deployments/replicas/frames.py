"""Packed batches on a socket: a short description as JSON, then the arrays' own bytes, copied by nobody on the way.

Nothing is unpickled: whatever comes in can be wrong, but it cannot run.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from deployments.replicas.wire import Packed

LENGTH = struct.Struct("<I")
LONGEST = 2**22  # of a description; the arrays' own bytes are not part of it


def frame(content: object) -> bytes:
    """
    >>> frame({"drop": []})
    b'\\x0c\\x00\\x00\\x00{"drop": []}'
    """
    text = json.dumps(content).encode()
    return LENGTH.pack(len(text)) + text


async def read_frame(reader: asyncio.StreamReader) -> Any:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return json.loads(await reader.readexactly(checked(length)))


def describe(packed: Packed) -> dict[str, object]:
    return {
        "cursor": packed.cursor,
        "arrays": {name: form_of(array) for name, array in packed.arrays.items()},
        "memory": form_of(packed.memory),
        "lengths": None if packed.lengths is None else form_of(packed.lengths),
        "bfloat16": sorted(packed.bfloat16),
    }


def buffers(packed: Packed) -> Iterator[memoryview]:
    """The bytes of all arrays, in the order in which they are described."""
    lengths = () if packed.lengths is None else (packed.lengths,)
    for array in (*packed.arrays.values(), packed.memory, *lengths):
        yield from bytes_of(array)


def bytes_of(array: NDArray[Any]) -> Iterator[memoryview]:
    """Nothing of an array that has none."""
    if array.nbytes:
        yield np.ascontiguousarray(array).data.cast("B")


def room_for(description: dict[str, Any]) -> Packed:
    """Arrays that only have to be filled."""
    lengths = description["lengths"]
    return Packed(
        description["cursor"],
        {name: empty(form) for name, form in description["arrays"].items()},
        empty(description["memory"]),
        None if lengths is None else empty(lengths),
        frozenset(description["bfloat16"]),
    )


class Connection:
    """To one peer, for whoever asks: one question at a time."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._place = host, int(port)
        self._loop = asyncio.get_running_loop()
        self.used_s = self._loop.time()
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def open(self) -> Self:
        try:
            await self._loop.sock_connect(self._socket, self._place)
        except BaseException:
            self.close()
            raise
        return self

    async def say(self, content: object) -> None:
        await self._loop.sock_sendall(self._socket, frame(content))

    async def hear(self) -> Any:
        (length,) = LENGTH.unpack(await self._filled(bytearray(LENGTH.size)))
        return json.loads(bytes(await self._filled(bytearray(checked(length)))))

    async def fill(self, packed: Packed) -> Packed:
        for buffer in buffers(packed):
            await self._filled(buffer)
        return packed

    def close(self) -> None:
        self._socket.close()

    async def _filled(self, room: bytearray | memoryview) -> bytearray | memoryview:
        rest = memoryview(room)
        while rest:
            if not (count := await self._loop.sock_recv_into(self._socket, rest)):
                raise EOFError("the connection ended")
            rest = rest[count:]
        return room


def checked(length: int) -> int:
    if not 0 < length <= LONGEST:
        raise ValueError(f"a description of {length} bytes: 1 to {LONGEST} are allowed")
    return length


def form_of(array: NDArray[Any]) -> list[object]:
    return [array.dtype.str, array.shape]


def empty(form: list[Any]) -> NDArray[Any]:
    return np.empty(form[1], np.dtype(form[0]))
