"""Keys and values (KV) in pages, and the attention that reads them, instead of Hugging Face's own."""

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

NAME = "isobatch_paged"  # of this attention, where Hugging Face registers it

Ints = NDArray[np.int64]


def replace_attention(model: Any) -> None:
    """Let the model's blocks take a `PagedView` as their mask. A call of the whole model works as before."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


@dataclass(frozen=True)
class PieceBand:
    """Pieces of a launch that attention computes together, padded to the same number of rows and the same context.

    `read` has the places of their KV for each block. `mask` says which positions each row attends to, once for each
    query head that shares keys, or what is added to its scores. `real_rows` has the indices of the rows that are not
    padding, or is None if there is no padding. Rows of one piece follow each other.
    """

    count: int
    rows: int
    read: Tensor
    mask: Tensor
    real_rows: Tensor | None

    @property
    def size(self) -> int:
        """The number of rows that are not padding."""
        return self.count * self.rows if self.real_rows is None else len(self.real_rows)

    def biased(self, by_distance: Tensor) -> "PieceBand":
        """The same band, whose scores get a bias by the distance between positions."""
        own = self.mask.sum(dim=-1, keepdim=True) - 1  # the position of the row itself
        distance = own - torch.arange(self.mask.shape[-1], device=self.mask.device)
        bias = by_distance[:, distance[:, 0].clamp(0, by_distance.shape[1] - 1)].transpose(0, 1)
        return replace(self, mask=bias.masked_fill(~self.mask, -torch.inf))


class PagedView:
    """What the blocks of one launch are given: the position of each row, the place of its KV, and the KV that it reads
    of its own text (`bands`) and of its source (`sources`)."""

    def __init__(
        self,
        kv: "PagedKv",
        first: int,
        positions: Tensor,
        write: Tensor,
        bands: list[PieceBand],
        sources: list[PieceBand],
    ) -> None:
        self.kv, self.positions = kv, positions
        self._first, self._write, self._bands, self._sources = first, write, bands, sources

    def add_bias(self, by_distance: Tensor) -> None:
        """Let attention add a bias by the distance between positions: heads x distances."""
        self._bands = [band.biased(by_distance) for band in self._bands]

    def attend(self, block: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Write keys and values, and attend. Inputs are rows x heads x width, the result is rows x (heads * width)."""
        place = block - self._first
        self.kv.keys.index_copy_(0, self._write[place], key.flatten(1))
        self.kv.values.index_copy_(0, self._write[place], value.flatten(1))
        return self._attend(self._bands, place, query, key.shape[1], scaling)

    def attend_source(self, block: int, query: Tensor, scaling: float) -> Tensor:
        """Attend to the sources. Each query head has keys of its own."""
        return self._attend(self._sources, block - self._first, query, query.shape[1], scaling)

    def _attend(self, bands: list[PieceBand], place: int, query: Tensor, heads: int, scaling: float) -> Tensor:
        keys, values = self.kv.keys, self.kv.values
        outputs = []
        for band, rows in zip(bands, torch.split(query, [band.size for band in bands]), strict=True):
            read = band.read[place]
            context = keys.index_select(0, read), values.index_select(0, read)
            outputs.append(_attend_together(rows, *context, heads, band, scaling))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_together(
    query: Tensor, keys: Tensor, values: Tensor, heads: int, band: PieceBand, scaling: float
) -> Tensor:
    all_heads, width = query.shape[1:]
    padded = query
    if band.real_rows is not None:
        padded = query.new_zeros(band.count * band.rows, all_heads, width).index_copy_(0, band.real_rows, query)
    shared = all_heads // heads  # query heads that read the same keys: they are rows of one head
    rows = padded.view(band.count, band.rows, heads, shared, width).permute(0, 2, 3, 1, 4)
    attended = functional.scaled_dot_product_attention(
        rows.reshape(band.count, heads, shared * band.rows, width),
        keys.view(band.count, -1, heads, width).transpose(1, 2),
        values.view(band.count, -1, heads, width).transpose(1, 2),
        attn_mask=band.mask,
        scale=scaling,
    )
    by_row = attended.view(band.count, heads, shared, band.rows, width).permute(0, 3, 1, 2, 4)
    flat = by_row.reshape(band.count * band.rows, all_heads * width)
    return flat if band.real_rows is None else flat[band.real_rows]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Called by Hugging Face's layers. Query, key and value are 1 x heads x rows x width."""
    if not isinstance(attention_mask, PagedView):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return attended
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    return attention_mask.attend(module.layer_idx, rows[0], rows[1], rows[2], scaling).unsqueeze(0), None


@dataclass(frozen=True)
class Projection:
    """The positions of projected rows in a launch, and the places of their KV: blocks x rows."""

    kv: "PagedKv"
    first: int
    positions: Tensor
    places: Tensor

    def write(self, block: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values: rows x width."""
        places = self.places[block - self.first]
        self.kv.keys.index_copy_(0, places, key)
        self.kv.values.index_copy_(0, places, value)


class PagedKv:
    """The memory for the KV of one replica: pages, each for any block and any sequence.

    `width`: of the keys of one position. `shared`: query heads that read the same keys. KV has the type of `weights`
    and is on the same device.
    """

    def __init__(self, width: int, shared: int, weights: Tensor, pages: int, page_tokens: int) -> None:
        self._page_tokens, self._shared, self.device = page_tokens, shared, weights.device
        # Masked values are multiplied by 0, so they must be numbers from the start: 0 * nan is nan.
        self.keys = torch.zeros(pages * page_tokens, width, dtype=weights.dtype, device=weights.device)
        self.values = torch.zeros_like(self.keys)

    def view(self, launch: DecodingLaunch, blocks: range) -> PagedView:
        """The places that the running rows of a launch write and read. Pieces of one size follow each other."""
        running = (piece for piece in launch.pieces if piece.running)
        groups = [list(pieces) for _, pieces in groupby(running, key=by_size)]
        positions, places, bands = zip(*(self._band(pieces, blocks) for pieces in groups), strict=True)
        sources = [
            self._source(pieces, blocks, band)
            for pieces, band in zip(groups, bands, strict=True)
            if pieces[0].sequence.request.source
        ]
        rows, write = self._tensor(np.concatenate(positions)).unsqueeze(0), np.concatenate(places, axis=-1)
        return PagedView(self, blocks.start, rows, self._tensor(write), list(bands), sources)

    def projection(self, launch: DecodingLaunch, blocks: range) -> Projection:
        """The positions of the projected rows, and the places of their KV."""
        positions, places = [], []
        for piece in launch.pieces:
            if piece.projected:
                rows = piece.start + np.array(piece.projected)
                positions.append(rows)
                places.append(self._places([piece.sequence.table], blocks, int(rows[-1]) + 1)[:, 0, rows])
        at = self._tensor(np.concatenate(positions)).unsqueeze(0)
        return Projection(self, blocks.start, at, self._tensor(np.concatenate(places, axis=1)))

    def source_places(self, pieces: Listed[Piece]) -> Tensor:
        """The places of the KV of sources, one source after the other: blocks x positions."""
        places = []
        for piece in pieces:
            table = piece.sequence.source_table
            places.append(self._places([table], range(len(table.pages)), len(piece.sequence.request.source))[:, 0])
        return self._tensor(np.concatenate(places, axis=1))

    def _band(self, pieces: list[Piece], blocks: range) -> tuple[Ints, Ints, PieceBand]:
        """The positions of the rows, the places where each block writes them, and the band that they read."""
        rows, context = max(piece.running for piece in pieces), max(piece.start + piece.rows for piece in pieces)
        read = self._places([piece.sequence.table for piece in pieces], blocks, context)
        last_seen = np.zeros((len(pieces), rows), np.int64)  # the last position that a row attends to; 0 for padding
        for index, piece in enumerate(pieces):
            own = np.arange(piece.start, piece.start + piece.rows)
            last_seen[index, : piece.running] = np.delete(own, piece.projected) if piece.projected else own
        counts = np.array([piece.running for piece in pieces])
        owner, place = np.nonzero(np.arange(rows) < counts[:, None])  # of each row: its piece, and its index there
        positions = last_seen[owner, place]
        mask = np.arange(context) <= last_seen[:, None, :, None]
        band = PieceBand(
            len(pieces),
            rows,
            self._tensor(read.reshape(len(blocks), -1)),
            self._tensor(np.tile(mask, (1, 1, self._shared, 1))),
            self._tensor(owner * rows + place) if len(owner) < len(pieces) * rows else None,
        )
        return positions, read[:, owner, positions], band

    def _source(self, pieces: list[Piece], blocks: range, band: PieceBand) -> PieceBand:
        """The band by which the rows of another band read all of their sources."""
        lengths = np.array([len(piece.sequence.request.source) for piece in pieces])
        longest = int(lengths.max())
        read = self._places([piece.sequence.source_table for piece in pieces], blocks, longest)
        mask = np.arange(longest) < lengths[:, None, None, None]
        return replace(band, read=self._tensor(read.reshape(len(blocks), -1)), mask=self._tensor(mask))

    def _places(self, tables: list[PageTable], blocks: range, context: int) -> Ints:
        """The places of KV up to the longest context: blocks x tables x positions. A mask hides unused ones."""
        count = pages_for(context, self._page_tokens)
        pages = np.zeros((len(blocks), len(tables), count), np.int64)
        for index, table in enumerate(tables):
            own = table.pages[blocks.start : blocks.stop, :count]
            pages[:, index, : own.shape[1]] = own
        within = pages[..., None] * self._page_tokens + np.arange(self._page_tokens)
        return within.reshape(len(blocks), len(tables), -1)[:, :, :context]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
