"""The format of a connection: a message, then the bytes of the arrays that it describes.

Messages are msgspec structs, in MessagePack behind their length. Their types are checked as they are read, and nothing
is unpickled, so that a malicious message cannot run code. To encode and decode an order takes a third of the time
that it took as JSON (docs/transfers.md).
"""

import struct
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deployments.transport.packed import Packed

LENGTH = struct.Struct("<I")
LONGEST = 2**22  # bytes of a message, without those of the arrays that follow

_encoder = msgspec.msgpack.Encoder()


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all parts of a message: the type's name travels first, then the fields in their order."""


class ArrayForm(msgspec.Struct, frozen=True, array_like=True):
    """An array without its content."""

    dtype: str
    shape: tuple[int, ...]


class PackedForm(Message, frozen=True):
    """A packed batch without the content of its arrays."""

    cursor: int
    arrays: dict[str, ArrayForm]
    memory: ArrayForm
    lengths: ArrayForm | None
    bfloat16: frozenset[str]


def frame(message: object) -> bytes:
    """A message as it travels.

    >>> frame([1, "b"])
    b'\\x04\\x00\\x00\\x00\\x92\\x01\\xa1b'
    """
    content = _encoder.encode(message)
    return LENGTH.pack(len(content)) + content


def form_of(array: NDArray[Any]) -> ArrayForm:
    return ArrayForm(array.dtype.str, array.shape)


def form_of_packed(packed: Packed) -> PackedForm:
    return PackedForm(
        packed.cursor,
        {name: form_of(array) for name, array in packed.arrays.items()},
        form_of(packed.memory),
        None if packed.lengths is None else form_of(packed.lengths),
        packed.bfloat16,
    )


def unfilled(form: ArrayForm) -> NDArray[Any]:
    return np.empty(form.shape, np.dtype(form.dtype))


def unfilled_packed(form: PackedForm) -> Packed:
    """Arrays of the right sizes, whose content is received later, into their `buffers`."""
    return Packed(
        form.cursor,
        {name: unfilled(each) for name, each in form.arrays.items()},
        unfilled(form.memory),
        None if form.lengths is None else unfilled(form.lengths),
        form.bfloat16,
    )


def buffers(parts: Iterable[object]) -> Iterator[memoryview]:
    """The bytes of all arrays of the parts that travel along, in the order of their forms."""
    return chain.from_iterable(_buffers(part) for part in parts if isinstance(part, Packed))


def _buffers(packed: Packed) -> Iterator[memoryview]:
    lengths = () if packed.lengths is None else (packed.lengths,)
    for array in (*packed.arrays.values(), packed.memory, *lengths):
        yield from bytes_of(array)


def bytes_of(array: NDArray[Any]) -> Iterator[memoryview]:
    """One buffer, or none where the array is empty."""
    if array.nbytes:
        yield np.ascontiguousarray(array).data.cast("B")
