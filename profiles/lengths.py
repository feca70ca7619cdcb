"""The lengths of texts, and latency tables for texts of lengths that were not measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.errors import UserError, read_text
from isobatch.profiles.latency import LatencyTable, Rows, interpolate, widest_interval

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAX_STORED = 100  # of more texts than this, only quantiles are stored
LONGEST = 10**6  # tokens of one text: a larger number is taken for a mistake
WORD = "the"  # a word that is one token to every tokenizer of English
AROUND = 2  # tokens that tokenizers add around a text


@dataclass(frozen=True)
class Lengths:
    """The lengths of texts in tokens, shortest first: all of them, or evenly spaced quantiles.

    >>> Lengths.of([4, 12, 8]), Lengths.of([4, 12, 8]).mean
    (Lengths(tokens=(4, 8, 12)), 8)
    """

    tokens: tuple[int, ...]

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # a misspelt field in a file is an error

    def __post_init__(self) -> None:
        if not self.tokens or not 1 <= self.tokens[0] <= self.tokens[-1] <= LONGEST:
            raise ValueError(f"lengths must be 1 to {LONGEST} tokens, got {self.tokens[:1]} to {self.tokens[-1:]}")
        if list(self.tokens) != sorted(self.tokens):
            raise ValueError("lengths must ascend")

    @classmethod
    def of(cls, lengths: Iterable[int]) -> "Lengths":
        """From the lengths of texts in any order; of many texts only quantiles are stored."""
        ordered = sorted(lengths)
        if len(ordered) <= MAX_STORED:
            return cls(tuple(ordered))
        return cls(tuple(int(each) for each in np.array(ordered)[_even(len(ordered), MAX_STORED)]))

    @cached_property
    def mean(self) -> int:
        """The mean length in whole tokens, which is one input where plans count tokens."""
        return max(1, round(sum(self.tokens) / len(self.tokens)))

    def spread(self, count: int) -> Ints:
        """`count` lengths that represent all of them.

        >>> Lengths((2, 4, 6, 8)).spread(2).tolist()
        [4, 8]
        """
        return np.array(self.tokens)[_even(len(self.tokens), count)]

    def drawn(self, count: int, random: np.random.Generator) -> Ints:
        return random.choice(np.array(self.tokens), count)


def _even(among: int, count: int) -> Ints:
    return np.asarray((np.arange(count) + 0.5) * among / count, np.int64)


def read_lengths(path: Path) -> tuple[int, ...]:
    """Lengths in order, from a file with a number of tokens per line."""
    lengths = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            if not line.strip().isdecimal() or not 1 <= int(line) <= LONGEST:
                must = f"must be a number of tokens, 1 to {LONGEST}"
                raise UserError(f"{path}, line {number}: {line.strip()[:40]!r} {must}")
            lengths.append(int(line))
    if not lengths:
        raise UserError(f"{path} is empty: it needs a number of tokens per line")
    return tuple(lengths)


def text_of(tokens: int) -> str:
    """A text that most tokenizers of English split into this number of tokens, of one word at least.

    >>> text_of(4)
    'the the'
    """
    return " ".join([WORD] * max(1, tokens - AROUND))


def at_length(tables: Sequence[LatencyTable], length: int) -> LatencyTable:
    """The table for texts of a mean `length`, from one device's tables for other lengths.

    The same number of tokens takes the same time in texts of another length, except for attention, whose time grows
    with the length: between the nearest two measured lengths, times are linear in the length.
    """
    known = sorted((table for table in tables if table.length), key=lambda table: table.length or 0)
    if not known:
        return tables[-1]
    shorter = [table for table in known if (table.length or 0) <= length][-1:]
    longer = [table for table in known if (table.length or 0) >= length][:1]
    if shorter and longer and shorter != longer:
        return _between(shorter[0], longer[0], length)
    return rescaled((shorter or longer)[0], length)


def rescaled(table: LatencyTable, length: int) -> LatencyTable:
    """The same times for the same number of tokens, counted in texts of another length."""
    if table.length == length or not table.length:
        return table
    by = table.length / length
    return replace(
        table,
        batch_sizes=tuple(float(f"{size * by:.6g}") for size in table.batch_sizes),
        hidden_bytes=tuple(round(each / by) for each in table.hidden_bytes),
        activation_bytes=tuple(round(each / by) for each in table.activation_bytes),
        length=length,
        source=f"{table.source}; measured at {table.length} tokens, for the same tokens in texts of {length}",
    )


def _between(short: LatencyTable, long: LatencyTable, length: int) -> LatencyTable:
    """Interpolate. Outside the range of one of the tables, its ratio to the other one stays constant.

    Of tables that have no sizes in common, or are of different backends or precisions, the nearer one is taken.
    """
    first, second = short.length or 1, long.length or 1
    shorter, longer = rescaled(short, length), rescaled(long, length)
    share = (length - first) / (second - first)
    low, high = longer.batch_sizes[0], shorter.batch_sizes[-1]
    if low > high or _of_different_code(short, long):
        return shorter if share < 0.5 else longer
    sizes = np.array(sorted({*shorter.batch_sizes, *longer.batch_sizes}), float)

    def mixed(short_rows: Rows, long_rows: Rows) -> Floats:
        of_short = partial(interpolate, np.array(shorter.batch_sizes, float), np.array(short_rows))
        of_long = partial(interpolate, np.array(longer.batch_sizes, float), np.array(long_rows))
        inside = np.clip(sizes, low, high)
        both: Floats = (1 - share) * of_short(inside) + share * of_long(inside)
        few, many = _ratio(of_short(sizes), of_short(inside)), _ratio(of_long(sizes), of_long(inside))
        return np.asarray(both * np.where((sizes < low)[:, None], few, 1) * np.where((sizes > high)[:, None], many, 1))

    p95 = mixed(short.block_p95_s or short.block_s, long.block_p95_s or long.block_s)
    return replace(
        longer,
        batch_sizes=tuple(sizes.tolist()),
        block_s=_rows(mixed(short.block_s, long.block_s)),
        ramp_s=_rows(mixed(short.ramp_s, long.ramp_s)),
        launch_s=(1 - share) * short.launch_s + share * long.launch_s,
        stop_s=(1 - share) * short.each_stop_s + share * long.each_stop_s,
        block_p95_s=_rows(p95) if short.block_p95_s or long.block_p95_s else (),
        interval=widest_interval((shorter, longer), sizes.tolist()),
        source=f"{short.source}; for texts of {length} tokens, between those of {first} and {second}",
    )


def _of_different_code(one: LatencyTable, other: LatencyTable) -> bool:
    pairs = (one.backend, other.backend), (one.dtype, other.dtype)
    return any(first and second and first != second for first, second in pairs)


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.ones_like(above), where=below > 0)


def _rows(values: Floats) -> Rows:
    return tuple(tuple(row) for row in values.tolist())
