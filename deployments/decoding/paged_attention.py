"""Keys and values (KV) in pages, and the attention that reads them."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from isobatch.deployments.decoding.pages import pages_for
from isobatch.deployments.decoding.scheduler import DecodingLaunch, Piece, by_size

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PieceBand:
    """Pieces of a launch that attention computes together, padded to the same number of rows and the same pages.

    `pages` has those of each piece, one piece after the other. `mask` is added to scores: once for each row, or for
    each row of each query head that shares keys. `real_rows` has the indices of the rows that are not padding, or is
    None if there is no padding. Rows of one piece follow each other.
    """

    count: int
    rows: int
    pages: Tensor
    mask: Tensor
    real_rows: Tensor | None

    @property
    def size(self) -> int:
        """The number of rows that are not padding."""
        return self.count * self.rows if self.real_rows is None else len(self.real_rows)

    def biased(self, by_distance: Tensor) -> "PieceBand":
        """The same band, whose scores get a bias by the distance between positions."""
        seen = self.mask == 0
        own = seen.sum(dim=-1, keepdim=True) - 1  # the position of the row itself
        distance = own - torch.arange(self.mask.shape[-1], device=self.mask.device)
        bias = by_distance[:, distance[:, 0].clamp(0, by_distance.shape[1] - 1)].transpose(0, 1)
        return replace(self, mask=bias.masked_fill(~seen, -torch.inf))


class PagedView:
    """The rows of one launch, as blocks see them: the position of each row, the place of its KV, and the KV to read.

    A row reads KV of its own text (`bands`) and of its source (`sources`). Projected rows read none.
    """

    def __init__(
        self, kv: "PagedKv", positions: Ints, places: Ints, bands: Listed[PieceBand], sources: Listed[PieceBand]
    ) -> None:
        self._kv, self.positions, self._places = kv, kv.tensor(positions).unsqueeze(0), kv.tensor(places)
        self._bands, self._sources = bands, sources

    def add_bias(self, by_distance: Tensor) -> None:
        """Let attention add a bias by the distance between positions: heads x distances."""
        self._bands = [band.biased(by_distance) for band in self._bands]

    def write(self, block: int, kv: Tensor) -> None:
        """Write keys and values: rows x both."""
        self._kv.write(block, self._places, kv)

    def attend(self, block: int, query: Tensor, kv: Tensor, scaling: float) -> Tensor:
        """Write the KV of the rows (rows x keys and values), and attend with their queries: rows x heads x width. The
        result is rows x (heads * width)."""
        self.write(block, kv)
        return self._attend(self._bands, block, query, scaling)

    def attend_source(self, block: int, query: Tensor, scaling: float) -> Tensor:
        """Attend to the sources."""
        return self._attend(self._sources, block, query, scaling)

    def _attend(self, bands: Listed[PieceBand], block: int, query: Tensor, scaling: float) -> Tensor:
        if len(bands) == 1:
            return _attend_together(query, self._kv.read(block, bands[0].pages), bands[0], scaling)
        parts = zip(bands, torch.split(query, [band.size for band in bands]), strict=True)
        return torch.cat(
            [_attend_together(rows, self._kv.read(block, band.pages), band, scaling) for band, rows in parts]
        )


def _attend_together(query: Tensor, context: Tensor, band: PieceBand, scaling: float) -> Tensor:
    """Attend to `context`: positions x 2 x heads x width, as many positions for each piece."""
    all_heads, width = query.shape[1:]
    heads = context.shape[2]
    padded = query
    if band.real_rows is not None:
        padded = query.new_zeros(band.count * band.rows, all_heads, width).index_copy_(0, band.real_rows, query)
    shared = all_heads // heads  # query heads that read the same keys: they are rows of one head
    rows = padded.reshape(band.count, band.rows, heads, shared, width).permute(0, 2, 3, 1, 4)
    keys, values = context.view(band.count, -1, 2, heads, width).permute(2, 0, 3, 1, 4)
    attended = functional.scaled_dot_product_attention(
        rows.reshape(band.count, heads, shared * band.rows, width), keys, values, attn_mask=band.mask, scale=scaling
    )
    by_row = attended.view(band.count, heads, shared, band.rows, width).permute(0, 3, 1, 2, 4)
    flat = by_row.reshape(band.count * band.rows, all_heads * width)
    return flat if band.real_rows is None else flat[band.real_rows]


class PagedKv:
    """The memory for the KV of one replica, in pages for all blocks.

    `heads` and `width`: those of the keys of one position. `shared`: query heads that read the same keys. KV has the
    type of `weights` and is on the same device.
    """

    def __init__(
        self, num_blocks: int, heads: int, width: int, shared: int, weights: Tensor, pages: int, page_tokens: int
    ) -> None:
        self._page_tokens, self._shared, self.device, self._dtype = page_tokens, shared, weights.device, weights.dtype
        # Masked values are multiplied by 0, so they must be numbers from the start: 0 * nan is nan.
        memory = torch.zeros(
            num_blocks, pages * page_tokens, 2, heads, width, dtype=weights.dtype, device=weights.device
        )
        self._by_page = [block.view(pages, page_tokens, 2, heads, width) for block in memory]
        self._by_position = [block.view(pages * page_tokens, -1) for block in memory]

    def write(self, block: int, places: Tensor, kv: Tensor) -> None:
        self._by_position[block].index_copy_(0, places, kv.reshape(len(kv), -1))

    def read(self, block: int, pages: Tensor) -> Tensor:
        """The KV of these pages: positions x 2 x heads x width."""
        positions: Tensor = self._by_page[block].index_select(0, pages).flatten(0, 1)
        return positions

    def view(self, launch: DecodingLaunch) -> PagedView:
        """The places that the running rows of a launch write and read. Pieces of one size follow each other."""
        running = (piece for piece in launch.pieces if piece.running)
        groups = [list(pieces) for _, pieces in groupby(running, key=by_size)]
        positions, places, bands = zip(*(self._band(pieces) for pieces in groups), strict=True)
        sources = [
            self._source(pieces, band)
            for pieces, band in zip(groups, bands, strict=True)
            if pieces[0].sequence.request.source
        ]
        return PagedView(self, np.concatenate(positions), np.concatenate(places), bands, sources)

    def projection(self, launch: DecodingLaunch) -> PagedView:
        """The positions of the projected rows, and the places of their KV."""
        pieces = [piece for piece in launch.pieces if piece.projected]
        positions = [piece.start + np.array(piece.projected) for piece in pieces]
        places = [
            self._places(np.array(piece.sequence.pages), rows) for piece, rows in zip(pieces, positions, strict=True)
        ]
        return PagedView(self, np.concatenate(positions), np.concatenate(places), (), ())

    def source_places(self, pieces: Listed[Piece]) -> Tensor:
        """The places of the KV of sources, one source after the other."""
        lengths = [(each.sequence.source_pages, len(each.sequence.request.source)) for each in pieces]
        places = [self._places(np.array(pages), np.arange(length)) for pages, length in lengths]
        return self.tensor(np.concatenate(places))

    def _band(self, pieces: list[Piece]) -> tuple[Ints, Ints, PieceBand]:
        """The positions of the rows, the places where each block writes them, and the band that they read."""
        rows, context = max(piece.running for piece in pieces), max(piece.start + piece.rows for piece in pieces)
        pages = _padded([piece.sequence.pages for piece in pieces], pages_for(context, self._page_tokens))
        last_seen = np.zeros((len(pieces), rows), np.int64)  # the last position that a row attends to; 0 for padding
        for index, piece in enumerate(pieces):
            own = np.arange(piece.start, piece.start + piece.rows)
            last_seen[index, : piece.running] = np.delete(own, piece.projected) if piece.projected else own
        counts = np.array([piece.running for piece in pieces])
        owner, place = np.nonzero(np.arange(rows) < counts[:, None])  # of each row: its piece, and its index there
        positions = last_seen[owner, place]
        seen = np.arange(pages.shape[1] * self._page_tokens) <= last_seen[:, None, :, None]
        band = PieceBand(
            len(pieces),
            rows,
            self.tensor(pages.ravel()),
            self._mask(np.tile(seen, (1, 1, self._shared if rows > 1 else 1, 1))),
            self.tensor(owner * rows + place) if len(owner) < len(pieces) * rows else None,
        )
        return positions, self._places(pages[owner], positions), band

    def _source(self, pieces: list[Piece], band: PieceBand) -> PieceBand:
        """The band by which the rows of another band read all of their sources."""
        lengths = np.array([len(piece.sequence.request.source) for piece in pieces])
        count = pages_for(int(lengths.max()), self._page_tokens)
        pages = _padded([piece.sequence.source_pages for piece in pieces], count)
        seen = np.arange(count * self._page_tokens) < lengths[:, None, None, None]
        return replace(band, pages=self.tensor(pages.ravel()), mask=self._mask(seen))

    def _places(self, pages: Ints, positions: Ints) -> Ints:
        """The places of positions of one text, by its pages; or of one position for each row of `pages`."""
        number, within = np.divmod(positions, self._page_tokens)
        page = pages[number] if pages.ndim == 1 else pages[np.arange(len(pages)), number]
        places: Ints = page * self._page_tokens + within
        return places

    def _mask(self, seen: NDArray[np.bool_]) -> Tensor:
        """What is added to scores, so that rows attend to the positions that are seen only."""
        return self.tensor(np.where(seen, np.float32(0), np.float32(-np.inf))).to(self._dtype)

    def tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _padded(tables: Listed[Listed[int]], count: int) -> Ints:
    """The first pages of each table, as rows of one length; a mask hides the padding."""
    pages = np.zeros((len(tables), count), np.int64)
    for row, table in zip(pages, tables, strict=True):
        own = table[:count]
        row[: len(own)] = own
    return pages
