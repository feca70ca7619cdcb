"""Keys and values (KV) in pages, and attention that reads them, in place of Hugging Face's own."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from deployments.decoding.pages import PageTable, pages_for
from deployments.decoding.scheduler import DecodingLaunch, Piece, by_size

NAME = "isobatch_paged"

Ints = NDArray[np.int64]


def replace_attention(model: Any) -> None:
    """From now on the model's blocks may be given a `PagedView` as their mask. Called whole, it does as before."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


@dataclass(frozen=True)
class Neighbours:
    """Sequences of a launch that attention sees side by side, padded to one number of rows and one context.

    `read` has the places of their KV for each block, `mask` what each row sees, once for each head that shares keys, or
    what is added to what it sees; `back` has their rows among the padded ones, or is None where nothing is padded. Rows
    of neighbours lie one after another.
    """

    count: int
    rows: int
    read: Tensor
    mask: Tensor
    back: Tensor | None

    @property
    def size(self) -> int:
        """Rows that are not padded."""
        return self.count * self.rows if self.back is None else len(self.back)

    def biased(self, by_distance: Tensor) -> "Neighbours":
        """The same, where what is seen counts by how far back it lies."""
        sees = self.mask.sum(dim=-1, keepdim=True) - 1  # the position of the row itself
        distance = sees - torch.arange(self.mask.shape[-1], device=self.mask.device)
        bias = by_distance[:, distance[:, 0].clamp(0, by_distance.shape[1] - 1)].transpose(0, 1)
        return replace(self, mask=bias.masked_fill(~self.mask, -torch.inf))


class PagedView:
    """What the blocks of one launch need to know: where each row stands, where its KV goes, and what it sees of its own
    text (`bands`) and of its source (`sources`)."""

    def __init__(
        self,
        kv: "PagedKv",
        first: int,
        positions: Tensor,
        write: Tensor,
        bands: list[Neighbours],
        sources: list[Neighbours],
    ) -> None:
        self.kv, self.positions = kv, positions
        self._first, self._write, self._bands, self._sources = first, write, bands, sources

    def add_bias(self, by_distance: Tensor) -> None:
        """From now on attention adds a number by how far back a position lies: heads x distances."""
        self._bands = [band.biased(by_distance) for band in self._bands]

    def attend(self, block: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """All are rows x heads x width; what comes out is rows x (heads * width)."""
        place = block - self._first
        self.kv.keys.index_copy_(0, self._write[place], key.flatten(1))
        self.kv.values.index_copy_(0, self._write[place], value.flatten(1))
        return self._seen(self._bands, place, query, key.shape[1], scaling)

    def attend_source(self, block: int, query: Tensor, scaling: float) -> Tensor:
        """What rows see of their sources. Each query head has keys of its own."""
        return self._seen(self._sources, block - self._first, query, query.shape[1], scaling)

    def _seen(self, bands: list[Neighbours], place: int, query: Tensor, heads: int, scaling: float) -> Tensor:
        keys, values = self.kv.keys, self.kv.values
        seen = []
        for band, rows in zip(bands, torch.split(query, [band.size for band in bands]), strict=True):
            read = band.read[place]
            near = keys.index_select(0, read), values.index_select(0, read)
            seen.append(_attended(rows, *near, heads, band, scaling))
        return seen[0] if len(seen) == 1 else torch.cat(seen)


def _attended(query: Tensor, keys: Tensor, values: Tensor, heads: int, band: Neighbours, scaling: float) -> Tensor:
    all_heads, width = query.shape[1:]
    padded = query
    if band.back is not None:
        padded = query.new_zeros(band.count * band.rows, all_heads, width).index_copy_(0, band.back, query)
    shared = all_heads // heads  # query heads that read the same keys: they are rows of one head
    rows = padded.view(band.count, band.rows, heads, shared, width).permute(0, 2, 3, 1, 4)
    seen = functional.scaled_dot_product_attention(
        rows.reshape(band.count, heads, shared * band.rows, width),
        keys.view(band.count, -1, heads, width).transpose(1, 2),
        values.view(band.count, -1, heads, width).transpose(1, 2),
        attn_mask=band.mask,
        scale=scaling,
    )
    back = seen.view(band.count, heads, shared, band.rows, width).permute(0, 3, 1, 2, 4)
    flat = back.reshape(band.count * band.rows, all_heads * width)
    return flat if band.back is None else flat[band.back]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **told: Any
) -> tuple[Tensor, None]:
    """What Hugging Face's layers call: query, key and value are 1 x heads x rows x width."""
    if not isinstance(attention_mask, PagedView):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **told
        )
        return whole
    rows = [each.squeeze(0).transpose(0, 1) for each in (query, key, value)]
    seen = attention_mask.attend(module.layer_idx, rows[0], rows[1], rows[2], scaling)
    return seen.unsqueeze(0), None


@dataclass(frozen=True)
class Projection:
    """Where rows stand that only leave their KV in a launch, and where it goes: blocks x rows."""

    kv: "PagedKv"
    first: int
    positions: Tensor
    places: Tensor

    def write(self, block: int, key: Tensor, value: Tensor) -> None:
        """Both are rows x numbers."""
        places = self.places[block - self.first]
        self.kv.keys.index_copy_(0, places, key)
        self.kv.values.index_copy_(0, places, value)


class PagedKv:
    """The memory for the KV of one replica: pages of any block and any sequence.

    `width`: of the keys of one position. `shared`: query heads that read the same keys. KV is of the type of `weights`
    and lies beside them.
    """

    def __init__(self, width: int, shared: int, weights: Tensor, pages: int, page_tokens: int) -> None:
        self._page_tokens, self._shared, self.device = page_tokens, shared, weights.device
        # What is read only to be masked is multiplied by 0, so it must be a number from the start: 0 * nan is nan.
        self.keys = torch.zeros(pages * page_tokens, width, dtype=weights.dtype, device=weights.device)
        self.values = torch.zeros_like(self.keys)

    def view(self, launch: DecodingLaunch, blocks: range) -> PagedView:
        """Where the rows that run in a launch write and read. The parts of one size follow each other."""
        run = (part for part in launch.pieces if part.running)
        alike = [list(parts) for _, parts in groupby(run, key=by_size)]
        bands = [self._band(parts, blocks) for parts in alike]
        positions, write = (np.concatenate(each, axis=-1) for each in zip(*(band[:2] for band in bands), strict=True))
        own = [band[2] for band in bands]
        sources = [
            self._source(parts, blocks, band)
            for parts, band in zip(alike, own, strict=True)
            if parts[0].sequence.wanted.source
        ]
        return PagedView(self, blocks.start, self._tensor(positions).unsqueeze(0), self._tensor(write), own, sources)

    def projection(self, launch: DecodingLaunch, blocks: range) -> "Projection":
        """Where rows that only leave their KV stand, and where it goes."""
        positions, places = [], []
        for part in launch.pieces:
            if part.projected:
                stand = part.start + np.array(part.projected)
                positions.append(stand)
                places.append(self._places([part.sequence.table], blocks, int(stand[-1]) + 1)[:, 0, stand])
        found = self._tensor(np.concatenate(positions)).unsqueeze(0), self._tensor(np.concatenate(places, axis=1))
        return Projection(self, blocks.start, *found)

    def source_places(self, parts: Listed[Piece]) -> Tensor:
        """Blocks x positions: where the KV of sources goes, one source after the other."""
        places = []
        for part in parts:
            table = part.sequence.source_table
            places.append(self._places([table], range(len(table.pages)), len(part.sequence.wanted.source))[:, 0])
        return self._tensor(np.concatenate(places, axis=1))

    def _band(self, parts: list[Piece], blocks: range) -> tuple[Ints, Ints, Neighbours]:
        """The positions of the rows, where each block writes them, and what they read."""
        rows, context = max(part.running for part in parts), max(part.start + part.rows for part in parts)
        read = self._places([part.sequence.table for part in parts], blocks, context)
        sees = np.zeros((len(parts), rows), np.int64)  # the last position that each row sees; padded rows see the first
        for index, part in enumerate(parts):
            stand = np.arange(part.start, part.start + part.rows)
            sees[index, : part.running] = np.delete(stand, part.projected) if part.projected else stand
        counts = np.array([part.running for part in parts])
        owner, place = np.nonzero(np.arange(rows) < counts[:, None])  # of each row: its sequence, and which it is there
        positions = sees[owner, place]
        mask = np.arange(context) <= sees[:, None, :, None]
        neighbours = Neighbours(
            len(parts),
            rows,
            self._tensor(read.reshape(len(blocks), -1)),
            self._tensor(np.tile(mask, (1, 1, self._shared, 1))),
            self._tensor(owner * rows + place) if len(owner) < len(parts) * rows else None,
        )
        return positions, read[:, owner, positions], neighbours

    def _source(self, parts: list[Piece], blocks: range, band: Neighbours) -> Neighbours:
        """What the rows of a band read of their sources: all of them."""
        lengths = np.array([len(part.sequence.wanted.source) for part in parts])
        longest = int(lengths.max())
        read = self._places([part.sequence.source_table for part in parts], blocks, longest)
        mask = np.arange(longest) < lengths[:, None, None, None]
        return replace(band, read=self._tensor(read.reshape(len(blocks), -1)), mask=self._tensor(mask))

    def _places(self, tables: list[PageTable], blocks: range, context: int) -> Ints:
        """Blocks x tables x positions: where KV lies, up to the longest context. What a shorter one lacks is masked."""
        count = pages_for(context, self._page_tokens)
        pages = np.zeros((len(blocks), len(tables), count), np.int64)
        for index, table in enumerate(tables):
            held = table.pages[blocks.start : blocks.stop, :count]
            pages[:, index, : held.shape[1]] = held
        within = pages[..., None] * self._page_tokens + np.arange(self._page_tokens)
        return within.reshape(len(blocks), len(tables), -1)[:, :, :context]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
