"""A batch in the form in which it is sent: numpy arrays in host memory.

torch is imported inside the functions that need it: a replica of a virtual device never calls them, and starts with
half the processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.transport.connection import Message
from isobatch.profiles.model import Array, Batch, Sides, Words

if TYPE_CHECKING:
    import torch

Integers = NDArray[np.int64]
Other = TypeVar("Other")


class Packed(Message, frozen=True, weakref=True):
    """`arrays` have one row per token if the batch has lengths, otherwise one per input."""

    cursor: int
    arrays: Mapping[str, NDArray[Any]]
    memory: NDArray[np.float32]
    lengths: Integers | None = None
    bfloat16: frozenset[str] = frozenset()  # names of arrays that hold the bits of bfloat16
    truncated: frozenset[int] = frozenset()  # positions of texts that were cut; only in batches that a front encoded
    words: tuple[Words | Sides, ...] | None = None  # for words and points; only in batches that a front encoded
    ahead: Packed | None = None  # in a cascade: the same inputs in the form of the next level

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def size_bytes(self) -> int:
        """
        >>> Packed(0, {"hidden": np.zeros((2, 3), np.float16)}, np.zeros((2, 1), np.float32)).size_bytes
        20
        """
        own = sum(array.nbytes for array in self.arrays.values()) + self.memory.nbytes
        return own + (self.ahead.size_bytes if self.ahead else 0)

    @property
    def precision(self) -> object:
        """Equal for parts whose arrays have the same types."""
        types = [array.dtype for array in self.arrays.values()]
        return types, self.bfloat16, self.ahead and self.ahead.precision


@dataclass(frozen=True)
class Packing:
    """A batch whose copies from a GPU to host memory have begun; `result` waits for them."""

    cursor: int
    count: int
    size_bytes: int
    result: Callable[[], Packed]

    def __len__(self) -> int:
        return self.count


def pack(batch: Batch | Packed | Packing) -> Packed:
    begun = begin_packing(batch) if isinstance(batch, Batch) else batch
    return begun if isinstance(begun, Packed) else begun.result()


def begin_packing(batch: Batch) -> Packed | Packing:
    """Pack a batch in host memory; begin to copy one from a GPU, which launches meanwhile."""
    ahead = pack(batch.ahead) if batch.ahead else None
    if all(isinstance(array, np.ndarray) for array in (batch.memory, *batch.arrays.values())):
        encoded = batch.truncated, batch.words
        return Packed(batch.cursor, batch.arrays, batch.memory, batch.lengths, frozenset(), *encoded, ahead)
    import torch

    from isobatch.deployments.transport.device_copies import to_host

    bits = torch.int16  # numpy has no bfloat16: the bits of such arrays are sent
    tensors = {name: torch.as_tensor(array) for name, array in batch.arrays.items()}
    bfloat16 = frozenset(name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16)
    copies = {name: to_host(t.view(bits) if name in bfloat16 else t, beside=True) for name, t in tensors.items()}
    memory, cursor, lengths = to_host(torch.as_tensor(batch.memory), beside=True), batch.cursor, batch.lengths

    def result() -> Packed:  # it keeps no memory of a GPU
        return Packed(cursor, {name: wait() for name, wait in copies.items()}, memory(), lengths, bfloat16, ahead=ahead)

    on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
    return Packing(cursor, len(batch), batch.size_bytes, result) if on_gpu else result()


def joined(parts: Iterable[Packed | Other]) -> Iterator[Packed | Other]:
    """The same parts, with packed neighbours joined, except where devices of two kinds computed in two precisions."""
    for precision, neighbours in groupby(parts, lambda part: part.precision if isinstance(part, Packed) else None):
        alike = list(neighbours)
        yield from alike if precision is None else [join(cast(list[Packed], alike))]


def join(parts: Sequence[Packed]) -> Packed:
    """Join the parts, in order. They have one precision."""
    first = parts[0]
    if len(parts) == 1:
        return msgspec.structs.replace(first, truncated=frozenset(), words=None) if first.words else first
    if len(cursors := {part.cursor for part in parts}) > 1:
        raise ValueError(f"parts must stand before one block, got {sorted(cursors)}")
    arrays = {name: _joined_rows([part.arrays[name] for part in parts]) for name in first.arrays}
    lengths = [part.lengths for part in parts if part.lengths is not None]
    if len(lengths) not in (0, len(parts)):
        raise ValueError("a part with lengths cannot be joined with one that has none")
    memory, ahead = np.concatenate([part.memory for part in parts]), [part.ahead for part in parts if part.ahead]
    return Packed(
        first.cursor,
        arrays,
        memory,
        np.concatenate(lengths) if lengths else None,
        first.bfloat16,
        ahead=join(ahead) if ahead else None,
    )


def _joined_rows(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Join arrays row by row. For broadcast rows numpy would choose column order, which takes 50 times as long.

    >>> ones = np.broadcast_to(np.ones(3), (2, 3))
    >>> _joined_rows([ones, ones]).flags.c_contiguous, np.concatenate([ones, ones]).flags.c_contiguous
    (True, False)
    """
    rows = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=rows)


def unpack(parts: Sequence[Packed]) -> Batch:
    joined = join(parts)
    arrays: dict[str, Array] = dict(joined.arrays)
    if joined.bfloat16:
        import torch

        arrays |= {name: torch.from_numpy(joined.arrays[name]).view(torch.bfloat16) for name in joined.bfloat16}
    ahead = unpack([joined.ahead]) if joined.ahead else None
    return Batch(joined.cursor, arrays, joined.memory, joined.lengths, ahead=ahead)


def unpack_on(device: torch.device, parts: Sequence[Packed]) -> Batch:
    """As `unpack`, on a device, while it computes something else."""
    from isobatch.deployments.transport.device_copies import to_device

    batch = unpack(parts)
    *arrays, memory = to_device([*batch.arrays.values(), batch.memory], device, beside=True)
    return replace(batch, arrays=dict(zip(batch.arrays, arrays, strict=True)), memory=memory)


def take(packed: Packed, rows: Integers) -> Packed:
    if is_all(rows, len(packed)):
        return packed
    lengths = None if packed.lengths is None else packed.lengths[rows]
    where = rows if packed.lengths is None else rows_of(packed.lengths, rows)
    arrays = {name: array[where] for name, array in packed.arrays.items()}
    ahead = take(packed.ahead, rows) if packed.ahead else None
    return Packed(packed.cursor, arrays, packed.memory[rows], lengths, packed.bfloat16, ahead=ahead)


def wanting_best(packed: Packed, number: int, wanted: int) -> Packed:
    """The same inputs, of a request with this number that wants only the highest scores (`exits.BestOf`)."""
    memory = np.tile(np.array([number, wanted, 0], np.float32), (len(packed), 1))
    return msgspec.structs.replace(packed, memory=memory)


def is_all(rows: Integers, count: int) -> bool:
    """Whether these are all rows of `count`, in order, so that nothing need be copied."""
    return len(rows) == count and bool((rows == np.arange(count)).all())


def rows_of(lengths: Integers, inputs: Integers) -> Integers:
    """The rows that hold the tokens of these inputs.

    >>> rows_of(np.array([2, 1, 3]), np.array([2, 0]))
    array([3, 4, 5, 0, 1])
    """
    starts, wanted = (np.cumsum(lengths) - lengths)[inputs], lengths[inputs]
    before = np.cumsum(wanted) - wanted
    rows: Integers = np.arange(wanted.sum()) + np.repeat(starts - before, wanted)
    return rows
