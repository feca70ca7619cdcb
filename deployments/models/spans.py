"""Where the texts of a packed batch lie, and how attention sees them: the only place where texts are padded.

All other parts of a network look at one token at a time, so they get tokens without padding. Attention needs texts side
by side. For attention alone, texts are padded in a few bands of similar length, so that short texts are not padded to
the length of a long one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from isobatch.deployments.transport.device_copies import to_device

Integers = NDArray[np.int64]

MAX_BANDS = 4  # more bands than this save hardly any padding
# The cost of attention, in pairs of tokens: each padded token costs one pair per token of its row, and these for being
# gathered.
PAIRS_PER_TOKEN = 16
PAIRS_PER_BAND = 512  # the fixed cost of one band, for its own kernel calls
MIN_STEP = 16  # smallest step between numbers of rows that are compiled: the rows of a tile of AMX
# Names of tensors. In every layout `positions` has a row for each token; the other two stand before a band's number.
POSITIONS = "positions"
PLACES = "places"
PRESENT = "present"

# Makes attention's mask, in the hidden state's dtype, from the visible keys (texts x heads x queries x keys).
MaskOf = Callable[[Tensor, torch.dtype], Tensor]


class RecordingShape(NamedTuple):
    """The size of a recording's buffers: inputs; for texts also all tokens together and tokens of the longest text."""

    inputs: int
    tokens: int | None = None
    longest: int | None = None


@dataclass(frozen=True)
class Band:
    """Texts side by side: one row a text, padded to the longest of them."""

    places: Tensor  # the place of each token in the batch; padding repeats a text's first token
    present: Tensor  # False for padding
    mask: Tensor | None = None  # the same as attention takes it; None: there is no padding


@dataclass(frozen=True)
class Spans:
    """The texts of a packed batch. All tensors lie on the device that computes."""

    count: int
    positions: Tensor  # the position of each token in its text
    starts: Tensor  # the place of each text's first token
    bands: tuple[Band, ...] = ()  # none: all texts are equally long, so attention needs no padding
    back: Tensor | None = None  # the place of each token in the rows of all bands, laid one after another
    order: Tensor | None = None  # the place of each text in all bands; None: there is one band, in the batch's order
    edges: Tensor | None = None  # where texts begin and end, for a fused kernel; None: there is no such kernel
    longest: int = 0  # the longest text of a recording or for a fused kernel; 0: these spans are for neither
    spare: int = 0  # unused rows after the last token

    def masked(self, mask_of: MaskOf, dtype: torch.dtype) -> "Spans":
        """The same spans with masks for attention, which are made once for all blocks."""
        if not self.bands:
            return replace(self)  # the copy has no cached `padded`, which each recording must compute itself
        masks = (mask_of(band.present.unsqueeze(1).unsqueeze(1), dtype) for band in self.bands)
        bands = (Band(band.places, band.present, mask) for band, mask in zip(self.bands, masks, strict=True))
        return replace(self, bands=tuple(bands))

    def tensors(self) -> dict[str, Tensor]:
        named = {POSITIONS: self.positions, "starts": self.starts}
        named |= {name: tensor for name in ("back", "order", "edges") if (tensor := getattr(self, name)) is not None}
        for number, band in enumerate(self.bands):
            named |= {f"{PLACES}{number}": band.places, f"{PRESENT}{number}": band.present}
        return named

    def with_tensors(self, named: Mapping[str, Tensor]) -> "Spans":
        """The same spans with other tensors, of the same shapes."""
        return replace(Spans.of(named), count=self.count, longest=self.longest)

    @staticmethod
    def of(named: Mapping[str, Tensor]) -> "Spans":
        """Spans from their tensors by name: the inverse of `tensors`."""
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

    @cached_property
    def padded(self) -> "Spans":
        """The same spans with bands, where attention needs them. For a fused kernel the host sends none, since few
        networks need bands beside it: the device makes one band from the edges of texts. Missing texts consist of the
        first token."""
        if self.bands or self.edges is None:
            return self
        device, rows = self.positions.device, len(self.starts)
        columns = torch.arange(self.longest, device=device)
        present = columns < self.edges.diff().clamp(min=1).unsqueeze(1)
        band = Band(self.starts.unsqueeze(1) + columns * present, present, present.unsqueeze(1).unsqueeze(1))
        tokens = torch.arange(len(self.positions), device=device, dtype=self.edges.dtype)
        owners = torch.searchsorted(self.edges[1:], tokens, right=True).clamp(max=rows - 1)
        return replace(self, bands=(band,), back=owners * self.longest + self.positions)

    @property
    def shape(self) -> RecordingShape:
        """The shape of the recording that these spans were made for."""
        return RecordingShape(len(self.starts), len(self.positions), self.longest)

    def trimmed(self, tokens: int) -> "Spans":
        """The same spans without unused rows, if they were made for a recording."""
        return replace(
            self,
            positions=self.positions[:tokens],
            starts=self.starts[: self.count],
            bands=tuple(Band(each.places[: self.count], each.present[: self.count]) for each in self.bands),
            back=None if self.back is None else self.back[:tokens],
            edges=None if self.edges is None else self.edges[: self.count + 1],
        )

    def mean(self, hidden: Tensor) -> Tensor:
        """The mean of each text's tokens. Only graphs, exported and recorded, pad for it as they do for attention."""
        if self.edges is not None:
            sums = torch.segment_reduce(hidden.float(), "sum", offsets=self.edges, axis=0, unsafe=True)
            return (sums / self.edges.diff().clamp(min=1).unsqueeze(-1)).to(hidden.dtype)
        if not self.bands:
            return torch.unflatten(hidden, 0, (self.count, -1)).mean(dim=1)
        if not (self.longest or torch.onnx.is_in_onnx_export()):
            return embedding_bag(torch.arange(len(hidden), device=hidden.device), hidden, self.starts, mode="mean")
        means = []
        for band in self.bands:
            weights = band.present.to(hidden.dtype).unsqueeze(-1)
            means.append((hidden[band.places] * weights).sum(dim=1) / weights.sum(dim=1))
        return means[0] if self.order is None else torch.cat(means)[self.order]

    def last(self, hidden: Tensor) -> Tensor:
        """The last token of each text."""
        if self.edges is not None:
            return hidden.index_select(0, self.edges[1:] - 1)
        if not self.bands:
            return torch.unflatten(hidden, 0, (self.count, -1))[:, -1]
        ends = [each.places.gather(1, each.present.sum(dim=1, keepdim=True) - 1).squeeze(1) for each in self.bands]
        return hidden[ends[0] if self.order is None else torch.cat(ends)[self.order]]


def is_of_spans(name: str) -> bool:
    """Whether this is the name of a tensor of `Spans`.

    >>> [is_of_spans(name) for name in ("starts", "places0", "hidden", "input_ids")]
    [True, True, False, False]
    """
    return name in (POSITIONS, "starts", "back", "order", "edges") or name.startswith((PLACES, PRESENT))


def spans_of(lengths: Integers, device: torch.device, fused: bool = False, spare: int = 0) -> Spans:
    """Spans for torch. `fused`: there is a kernel that needs no bands."""
    if fused:
        return in_shape(lengths, device, RecordingShape(len(lengths), int(lengths.sum()), int(lengths.max())), fused)
    if (lengths == lengths[0]).all():
        length, tokens = lengths[0], len(lengths) * lengths[0]
        positions, starts = np.arange(tokens + spare) % length, np.arange(0, tokens, length)
        all_positions, all_starts = to_device((positions, starts), device)
        return Spans(len(lengths), all_positions, all_starts, spare=spare)
    return _in_these_bands(lengths, similar_lengths(lengths, MAX_BANDS), device, spare)


def compiles_shapes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the first launch with each number of rows is slow, as oneDNN compiles products in half precision."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)


def rows_for(tokens: int) -> int:
    """The number of rows for this number of tokens, where each number of rows is compiled: at most 1/32 or 15 more.

    >>> [rows_for(tokens) for tokens in (1, 13, 400, 403, 520, 5000)]
    [16, 16, 400, 416, 528, 5120]
    """
    step = max(MIN_STEP, 1 << (tokens.bit_length() - 6 if tokens >= 64 else 0))
    return -(-tokens // step) * step


def in_bands(lengths: Integers, device: torch.device, count: int) -> Spans:
    """Spans with exactly `count` bands, as an exported graph has a fixed number of them. Some may be empty."""
    bands = similar_lengths(lengths, count)
    return _in_these_bands(lengths, [*bands, *(np.empty(0, np.int64) for _ in range(count - len(bands)))], device)


def example(device: torch.device, count: int) -> tuple[Spans, int]:
    """Two short texts in each of `count` bands, and their number of tokens: an example without special cases."""
    lengths = np.repeat(np.arange(2, 2 + count), 2)
    bands = np.arange(2 * count).reshape(count, 2)
    return _in_these_bands(lengths, list(bands), device), int(lengths.sum())


def in_shape(lengths: Integers, device: torch.device, shape: RecordingShape, fused: bool) -> Spans:
    """Spans in a recording's shape: in one band, or without any for a fused kernel. Missing texts consist of the first
    token alone."""
    count, tokens = len(lengths), int(lengths.sum())
    assert shape.tokens is not None, "This is a bug: a recording of texts has a number of tokens."
    assert shape.longest is not None, "This is a bug: a recording of texts has a longest text."
    missing = np.zeros(shape.inputs - count, np.int64)
    starts, positions = np.append(_starts(lengths), missing), np.zeros(shape.tokens, np.int64)
    positions[:tokens] = _positions(lengths)
    if fused:
        edges = np.concatenate([[0], np.cumsum(lengths), missing + tokens]).astype(np.int32)
        all_positions, all_starts, all_edges = to_device((positions, starts, edges), device)
        return Spans(count, all_positions, all_starts, edges=all_edges, longest=shape.longest)
    columns, back = np.arange(shape.longest), np.zeros(shape.tokens, np.int64)
    present = columns < np.append(lengths, missing + 1)[:, None]
    back[:tokens] = np.flatnonzero(present[:count])
    arrays = (positions, starts, back, starts[:, None] + columns * present, present)
    all_positions, all_starts, all_back, all_places, all_present = to_device(arrays, device)
    band = Band(all_places, all_present)
    return Spans(count, all_positions, all_starts, (band,), all_back, longest=shape.longest)


def similar_lengths(lengths: Integers, most: int) -> list[Integers]:
    """The texts of each band: at most `most` bands of similar length, by which attention takes the least time.

    >>> [band.tolist() for band in similar_lengths(np.array([40, 8, 41, 9, 8]), most=4)]
    [[1, 4, 3], [0, 2]]
    >>> [band.tolist() for band in similar_lengths(np.array([9, 8, 9]), most=4)]
    [[0, 1, 2]]
    """
    all_texts = np.arange(len(lengths))
    if most == 1 or len(lengths) * _pairs(lengths.max()) <= _pairs(lengths).sum() + PAIRS_PER_BAND:
        return [all_texts]  # a second band costs more than it saves
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order]
    changes = (ascending[1:] != ascending[:-1]).nonzero()[0] + 1
    ends = np.concatenate(([0], changes, [len(order)]))  # of equally long texts, which one band holds
    cuts = ends[_cuts(_pairs(ascending[ends[1:] - 1]), ends, most)]
    return [all_texts] if len(cuts) == 2 else [order[a:b] for a, b in pairwise(cuts)]


def _pairs(lengths: Integers) -> Integers:
    pairs: Integers = lengths * (lengths + PAIRS_PER_TOKEN)
    return pairs


def _cuts(pairs: Integers, ends: Integers, most: int) -> list[int]:
    """Where bands of ascending lengths begin and end, by dynamic programming over the last band's first length.

    `pairs` are those of a text of each length, and `ends` the numbers of texts up to each length, from 0.
    """
    count = len(pairs)
    cost = (ends[:, None] - ends) * np.append(0, pairs)[:, None] + float(PAIRS_PER_BAND)  # by end, then by first length
    cost[ends >= ends[:, None]] = np.inf  # a band holds at least one length
    least, firsts = cost[:, 0], [np.zeros(count + 1, np.int64)]
    for _ in range(most - 1):
        with_one_more = least + cost
        first = with_one_more.argmin(axis=1)
        shorter = with_one_more[np.arange(count + 1), first]
        better = shorter < least
        if not better.any():
            break
        firsts.append(np.where(better, first, -1))  # -1: one more band does not help
        least = np.minimum(shorter, least)
    cuts, level = [count], len(firsts) - 1
    while cuts[0] > 0:
        while firsts[level][cuts[0]] < 0:
            level -= 1
        cuts.insert(0, int(firsts[level][cuts[0]]))
        level = max(level - 1, 0)
    return cuts


def _in_these_bands(lengths: Integers, bands: Sequence[Integers], device: torch.device, spare: int = 0) -> Spans:
    """Spans of texts in these bands. All bands are made at once, as one row of places that is cut at the end."""
    count, starts = len(lengths), _starts(lengths)
    text_starts, text_lengths, members = starts, lengths, bands
    if any(len(band) == 0 for band in bands):
        # Attention needs at least one row: an empty band gets one text without tokens, whose output is not used.
        members = [band if len(band) else np.array([count]) for band in bands]
        text_starts, text_lengths = np.append(starts, 0), np.append(lengths, 0)
    texts, sizes = np.concatenate(members), np.array([len(band) for band in members])
    row_lengths = text_lengths[texts]
    longest = np.maximum(np.maximum.reduceat(row_lengths, np.cumsum(sizes) - sizes), 1)
    widths = np.repeat(longest, sizes)
    columns = _positions(widths)
    present = columns < np.repeat(row_lengths, widths)
    places = np.repeat(text_starts[texts], widths) + columns * present
    there = present.nonzero()[0]
    tokens = places[there]
    positions, back, order = (np.zeros(size, np.int64) for size in (len(there) + spare, len(there) + spare, count + 1))
    positions[tokens], back[tokens], order[texts] = columns[there], there, np.arange(len(texts))
    if members is not bands:
        present |= np.repeat(row_lengths == 0, widths)
    cells = [
        each[end - size * width : end].reshape(size, -1)
        for end, size, width in zip(np.cumsum(sizes * longest), sizes, longest, strict=True)
        for each in (places, present)
    ]
    arrays = [positions, starts, back, order[:count], *cells]
    all_positions, all_starts, all_back, places_of_texts, *of_bands = to_device(arrays, device)
    made = tuple(Band(*pair) for pair in zip(of_bands[::2], of_bands[1::2], strict=True))
    in_order = None if len(bands) == 1 else places_of_texts
    return Spans(count, all_positions, all_starts, made, all_back, in_order, spare=spare)


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
