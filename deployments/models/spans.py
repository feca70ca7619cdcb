"""Where the texts of a packed batch lie, and how attention sees them: the only place where texts are padded.

Everything else in a network looks at one token at a time, so it is given tokens and no padding. Attention wants texts
side by side. They are padded for it alone, in a few bands of like length, so that a long text does not stretch the
short ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

MOST_BANDS = 4
# What attention takes, in pairs of tokens that look at each other: a padded token as many as its row is long and some
# for being gathered, and every band some for its own calls.
PAIRS_A_TOKEN, PAIRS_A_BAND = 16, 512
LEAST_STEP = 8  # between numbers of rows that are compiled
POSITIONS = "positions"  # of all tensors, the one that has a row for each token in every layout
PLACES, PRESENT = "places", "present"  # in names of tensors, before the band's number

# From which keys are visible (texts x heads x queries x keys) to what attention is given, in the hidden state's dtype.
MaskOf = Callable[[Tensor, torch.dtype], Tensor]


class Room(NamedTuple):
    """How much fits into a recording's buffers: inputs, and for texts how many tokens together and of the longest."""

    inputs: int
    tokens: int | None = None
    longest: int | None = None


@dataclass(frozen=True)
class Band:
    """Texts side by side: one row a text, padded to the longest of them."""

    places: Tensor  # of each token in the batch; behind a text's end its first token stands again
    present: Tensor  # which of them are real
    mask: Tensor | None = None  # the same for attention; None: all are real


@dataclass(frozen=True)
class Spans:
    """The texts of a packed batch. All tensors lie on the device that computes."""

    count: int
    positions: Tensor  # of each token in its text
    starts: Tensor  # the place of each text's first token
    bands: tuple[Band, ...] = ()  # none: all texts are equally long, and lie as attention wants them
    back: Tensor | None = None  # the place of each token in the rows of all bands, laid one after another
    order: Tensor | None = None  # the place of each text in all bands; None: there is one, in the batch's order
    edges: Tensor | None = None  # where texts begin and end, for a kernel that needs no bands; None: there is none
    longest: int = 0
    spare: int = 0  # rows behind the last token that are nobody's

    def masked(self, mask_of: MaskOf, dtype: torch.dtype) -> "Spans":
        """With the masks that attention wants, made once for all blocks."""
        bands = (replace(band, mask=mask_of(band.present[:, None, None, :], dtype)) for band in self.bands)
        return replace(self, bands=tuple(bands))

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name."""
        named = {POSITIONS: self.positions, "starts": self.starts}
        named |= {name: tensor for name in ("back", "order", "edges") if (tensor := getattr(self, name)) is not None}
        for number, band in enumerate(self.bands):
            named |= {f"{PLACES}{number}": band.places, f"{PRESENT}{number}": band.present}
        return named

    def with_tensors(self, named: Mapping[str, Tensor]) -> "Spans":
        """The same from other memory."""
        return replace(Spans.of(named), count=self.count, longest=self.longest)

    @staticmethod
    def of(named: Mapping[str, Tensor]) -> "Spans":
        """The inverse of `tensors`."""
        count = sum(name.startswith(PLACES) for name in named)
        return Spans(
            len(named["starts"]),
            named[POSITIONS],
            named["starts"],
            tuple(Band(named[f"{PLACES}{number}"], named[f"{PRESENT}{number}"]) for number in range(count)),
            named.get("back"),
            named.get("order"),
            named.get("edges"),
        )

    @property
    def room(self) -> Room:
        """The shape of a recording, of what was laid out for one."""
        return Room(len(self.starts), len(self.positions), self.bands[0].places.shape[1])

    def trimmed(self, tokens: int) -> "Spans":
        """Without the room that is left, of what was laid out for a recording."""
        assert self.back is not None, "This is a bug: what is laid out for a recording has a band."
        return replace(
            self,
            positions=self.positions[:tokens],
            starts=self.starts[: self.count],
            bands=tuple(Band(each.places[: self.count], each.present[: self.count]) for each in self.bands),
            back=self.back[:tokens],
            edges=None if self.edges is None else self.edges[: self.count + 1],
        )

    def mean(self, hidden: Tensor) -> Tensor:
        """The mean of each text's tokens."""
        if not self.bands:
            return torch.unflatten(hidden, 0, (self.count, -1)).mean(dim=1)
        means = []
        for band in self.bands:
            weights = band.present.to(hidden.dtype).unsqueeze(-1)
            means.append((hidden[band.places] * weights).sum(dim=1) / weights.sum(dim=1))
        return means[0] if self.order is None else torch.cat(means)[self.order]


def is_of_spans(name: str) -> bool:
    """Whether a tensor of this name says where texts lie.

    >>> [is_of_spans(name) for name in ("starts", "places0", "hidden", "input_ids")]
    [True, True, False, False]
    """
    return name in (POSITIONS, "starts", "back", "order", "edges") or name.startswith((PLACES, PRESENT))


def spans_of(lengths: Integers, device: torch.device, fused: bool = False, spare: int = 0) -> Spans:
    """As torch wants it. `fused`: there is a kernel that needs no bands."""
    if fused:
        return in_room(lengths, device, Room(len(lengths), int(lengths.sum()), int(lengths.max())), fused)
    if not spare and (lengths == lengths[0]).all():
        return Spans(len(lengths), _there(_positions(lengths), device), _there(_starts(lengths), device))
    return _laid_out(lengths, alike(lengths, MOST_BANDS), device, spare)


def rows_for(tokens: int) -> int:
    """The rows that so many tokens are computed with where each number of rows is compiled: 1/32 or seven more at most.

    >>> [rows_for(tokens) for tokens in (1, 13, 400, 403, 520, 5000)]
    [8, 16, 400, 408, 528, 5120]
    """
    step = max(LEAST_STEP, 1 << (tokens.bit_length() - 6 if tokens >= 64 else 0))
    return -(-tokens // step) * step


def in_bands(lengths: Integers, device: torch.device, count: int) -> Spans:
    """In exactly so many bands, for a graph that knows no other number: some may hold nobody."""
    found = alike(lengths, count)
    return _laid_out(lengths, [*found, *(np.empty(0, np.int64) for _ in range(count - len(found)))], device)


def example(device: torch.device, count: int) -> tuple[Spans, int]:
    """Two short texts in each of so many bands, and how many tokens they have: what no tracer finds special."""
    lengths = np.repeat(np.arange(2, 2 + count), 2)
    bands = np.arange(2 * count).reshape(count, 2)
    return _laid_out(lengths, list(bands), device), int(lengths.sum())


def in_room(lengths: Integers, device: torch.device, room: Room, fused: bool) -> Spans:
    """In one band of a recording's shape. Texts that are not there consist of the first token alone."""
    count, tokens = len(lengths), int(lengths.sum())
    assert room.tokens is not None, "This is a bug: a recording of texts has room for tokens."
    assert room.longest is not None, "This is a bug: a recording of texts has room for the longest."
    nobody = np.zeros(room.inputs - count, np.int64)
    starts = np.append(_starts(lengths), nobody)
    places, present = _side_by_side(starts, np.append(lengths, nobody + 1), room.longest)
    positions, back = np.zeros((2, room.tokens), np.int64)
    positions[:tokens], back[:tokens] = _positions(lengths), np.flatnonzero(present[:count])
    edges = np.concatenate([[0], np.cumsum(lengths), nobody + tokens]).astype(np.int32)
    return Spans(
        count,
        _there(positions, device),
        _there(starts, device),
        (Band(_there(places, device), _there(present, device)),),
        _there(back, device),
        edges=_there(edges, device) if fused else None,
        longest=room.longest,
    )


def alike(lengths: Integers, most: int) -> list[Integers]:
    """Texts of like length together, in at most so many bands, so that attention takes the least time.

    >>> [band.tolist() for band in alike(np.array([40, 8, 41, 9, 8]), most=4)]
    [[1, 4, 3], [0, 2]]
    >>> [band.tolist() for band in alike(np.array([9, 8, 9]), most=4)]
    [[0, 1, 2]]
    """
    everybody = np.arange(len(lengths))
    if most == 1 or len(lengths) * _pairs(lengths.max()) <= _pairs(lengths).sum() + PAIRS_A_BAND:
        return [everybody]  # a second band could not pay
    order = np.argsort(lengths, kind="stable")
    cuts = _cuts(_pairs(lengths[order]), most)
    return [everybody] if len(cuts) == 2 else [order[a:b] for a, b in pairwise(cuts)]


def _pairs(lengths: Integers) -> Integers:
    of_each: Integers = lengths * (lengths + PAIRS_A_TOKEN)
    return of_each


def _cuts(pairs: Integers, most: int) -> list[int]:
    """Where bands of ascending texts begin and end, by dynamic programming over the last band's first text."""
    count = len(pairs)
    ends = np.arange(count + 1)
    cost = (ends[None, :] - ends[:, None]) * np.append(0, pairs)[None, :] + float(PAIRS_A_BAND)
    cost[ends[:, None] >= ends[None, :]] = np.inf  # a band holds somebody
    least, firsts = cost[0], [np.zeros(count + 1, np.int64)]
    for _ in range(most - 1):
        with_one_more = least[:, None] + cost
        first = with_one_more.argmin(axis=0)
        better = with_one_more.min(axis=0) < least
        firsts.append(np.where(better, first, -1))  # -1: as without one more
        least = np.where(better, with_one_more.min(axis=0), least)
    cuts, level = [count], len(firsts) - 1
    while cuts[0] > 0:
        while firsts[level][cuts[0]] < 0:
            level -= 1
        cuts.insert(0, int(firsts[level][cuts[0]]))
        level = max(level - 1, 0)
    return cuts


def _laid_out(lengths: Integers, bands: Sequence[Integers], device: torch.device, spare: int = 0) -> Spans:
    starts = _starts(lengths)
    back, order = np.zeros(lengths.sum() + spare, np.int64), np.empty(len(lengths), np.int64)
    made, tokens, texts = [], 0, 0
    for members in bands:
        places, present = _side_by_side(starts[members], lengths[members], int(lengths[members].max(initial=0)))
        back[places[present]] = tokens + np.flatnonzero(present)
        order[members] = texts + np.arange(len(members))
        if len(members) == 0:  # a row is needed all the same, and nobody reads what becomes of it
            places, present = np.zeros((1, 1), np.int64), np.ones((1, 1), bool)
        made.append(Band(_there(places, device), _there(present, device)))
        tokens, texts = tokens + places.size, texts + len(places)
    return Spans(
        len(lengths),
        _there(np.append(_positions(lengths), np.zeros(spare, np.int64)), device),
        _there(starts, device),
        tuple(made),
        _there(back, device),
        None if len(bands) == 1 else _there(order, device),
        spare=spare,
    )


def _side_by_side(starts: Integers, lengths: Integers, longest: int) -> tuple[Integers, NDArray[np.bool_]]:
    at = np.arange(longest)
    present: NDArray[np.bool_] = at < lengths[:, None]
    return starts[:, None] + np.where(present, at, 0), present


def _starts(lengths: Integers) -> Integers:
    starts: Integers = np.cumsum(lengths) - lengths
    return starts


def _positions(lengths: Integers) -> Integers:
    """
    >>> _positions(np.array([2, 3]))
    array([0, 1, 0, 1, 2])
    """
    positions: Integers = np.arange(lengths.sum()) - np.repeat(_starts(lengths), lengths)
    return positions


def _there(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
