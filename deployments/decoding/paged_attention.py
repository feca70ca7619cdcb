"""Keys and values (KV) in pages, and the attention that reads them."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from isobatch.deployments.decoding.pages import pages_for
from isobatch.deployments.decoding.scheduler import DecodingLaunch, Piece, by_size
from isobatch.deployments.transport.device_copies import to_device

Ints = NDArray[np.int64]
# Rows of queries up to which products are quicker on a processor than fused attention, which works in larger blocks.
FEW_QUERIES = 16
PAGES_AT_ONCE = 16  # pages that are copied at once to be checked: little memory may be left


@dataclass(frozen=True)
class PieceBand:
    """Pieces of a launch that attention computes together, padded to the same number of rows and the same pages.

    `runs` has the places of what is read: of each piece and head, first of all keys, then of all values. `mask` is
    added to scores: once for each row, or for each row of each query head that shares keys. `real_rows` has the indices
    of the rows that are not padding, or is None if there is no padding. Rows of one piece follow each other.
    """

    count: int
    rows: int
    runs: Tensor
    mask: Tensor
    real_rows: Tensor | None

    @property
    def size(self) -> int:
        """The number of rows that are not padding."""
        return self.count * self.rows if self.real_rows is None else len(self.real_rows)

    def biased(self, by_distance: Tensor) -> "PieceBand":
        """The same band, whose scores get a bias by the distance between positions."""
        bias = by_distance[:, self._distances[:, 0].clamp(0, by_distance.shape[1] - 1)].transpose(0, 1)
        return replace(self, mask=bias.masked_fill(self.mask != 0, -torch.inf))

    def within(self, window: int) -> "PieceBand":
        """The same band, whose rows attend to the latest `window` positions, their own included."""
        if self.mask.shape[-1] <= window:
            return self
        return replace(self, mask=self.mask.masked_fill(self._distances >= window, -torch.inf))

    @property
    def _distances(self) -> Tensor:
        """The distance of each row from each position."""
        own = (self.mask == 0).sum(dim=-1, keepdim=True) - 1
        return own - torch.arange(self.mask.shape[-1], device=self.mask.device)


class PagedView:
    """The rows of one launch, as blocks see them: the position of each row, the place of its KV, and the KV to read.

    A row reads KV of its own text (`bands`) and of its source (`sources`). Projected rows read none.
    """

    def __init__(
        self, kv: "PagedKv", positions: Tensor, places: Tensor, bands: Listed[PieceBand], sources: Listed[PieceBand]
    ) -> None:
        self._kv, self.positions, self._places, self._rows = kv, positions.unsqueeze(0), places, len(positions)
        self._bands, self._sources = bands, sources
        self._within: dict[int, Listed[PieceBand]] = {}  # the bands, by the window of their rows

    def add_bias(self, by_distance: Tensor) -> None:
        """Let attention add a bias by the distance between positions: heads x distances."""
        self._bands = [band.biased(by_distance) for band in self._bands]

    def write(self, block: int, kv: Tensor) -> None:
        """Write keys and values: rows x both. Further rows are padding."""
        self._kv.write(block, self._places, kv[: self._rows])

    def attend(
        self, block: int, query: Tensor, kv: Tensor, scaling: float, window: int | None = None, cap: float | None = None
    ) -> Tensor:
        """Write the KV of the rows (rows x keys and values), and attend with their queries (rows x heads x width) to
        all positions, or to a window of the latest ones. The result is rows x (heads * width). `cap`: a tanh keeps
        scores below it."""
        self.write(block, kv)
        if window is None:
            return self._attend(self._bands, block, query, scaling, cap)
        if window not in self._within:
            self._within[window] = [band.within(window) for band in self._bands]
        return self._attend(self._within[window], block, query, scaling, cap)

    def attend_source(self, block: int, query: Tensor) -> Tensor:
        """Attend to what the encoder has read. Networks with one (T5) do not scale their scores."""
        return self._attend(self._sources, block, query, scaling=1.0)

    def _attend(
        self, bands: Listed[PieceBand], block: int, query: Tensor, scaling: float, cap: float | None = None
    ) -> Tensor:
        own = query[: self._rows]
        parts = zip(bands, torch.split(own, [band.size for band in bands]), strict=True)
        done = [_attend_together(rows, self._kv.read(block, band), band, scaling, cap) for band, rows in parts]
        spare = len(query) - len(own)
        padding = [own.new_zeros(spare, done[0].shape[1])] if spare else []
        return done[0] if len(done) == 1 and not padding else torch.cat([*done, *padding])


def _attend_together(query: Tensor, kv: Tensor, band: PieceBand, scaling: float, cap: float | None) -> Tensor:
    """Attend to keys and values: 2 x pieces x heads x positions x width."""
    all_heads, width = query.shape[1:]
    heads = kv.shape[2]
    padded = query
    if band.real_rows is not None:
        padded = query.new_zeros(band.count * band.rows, all_heads, width).index_copy_(0, band.real_rows, query)
    shared = all_heads // heads  # query heads that read the same keys: they are rows of one head
    rows = padded.reshape(band.count, band.rows, heads, shared, width).permute(0, 2, 3, 1, 4)
    attended = _attended(rows.reshape(band.count, heads, shared * band.rows, width), kv, band.mask, scaling, cap)
    by_row = attended.view(band.count, heads, shared, band.rows, width).permute(0, 3, 1, 2, 4)
    flat = by_row.reshape(band.count * band.rows, all_heads * width)
    return flat if band.real_rows is None else flat[band.real_rows]


def _attended(queries: Tensor, kv: Tensor, mask: Tensor, scaling: float, cap: float | None) -> Tensor:
    keys, values = kv
    if cap is None and (queries.device.type != "cpu" or queries.shape[2] > FEW_QUERIES):
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    scores = capped(torch.matmul(queries * scaling, keys.transpose(2, 3)), cap).add_(mask)
    return torch.matmul(scores.softmax(dim=-1), values)


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """The scores, or logits, softly kept below a cap; changes them."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


class PagedKv:
    """The memory for the KV of one replica, in pages for all blocks. In a page, the positions of one head follow each
    other (a *run*), so that what attention reads of several pages is in order.

    `heads` and `width`: those of the keys of one position. `shared`: query heads that read the same keys. KV has the
    type of `weights` and is on the same device.
    """

    def __init__(
        self, num_blocks: int, heads: int, width: int, shared: int, weights: Tensor, pages: int, page_tokens: int
    ) -> None:
        self._page_tokens, self._shared, self._width = page_tokens, shared, width
        self.device, self._dtype = weights.device, weights.dtype
        memory = torch.zeros(num_blocks, pages * 2 * heads, page_tokens, width, dtype=weights.dtype, device=self.device)
        self._by_page = memory.view(num_blocks, pages, -1)
        self._heads, self._by_run = heads, [block.flatten(1) for block in memory]
        self._by_row = [block.flatten(0, 1) for block in memory]

    def write(self, block: int, places: Tensor, kv: Tensor) -> None:
        self._by_row[block].index_copy_(0, places, kv.reshape(len(places), -1))

    def read(self, block: int, band: PieceBand) -> Tensor:
        """The KV of a band: 2 x pieces x heads x positions x width."""
        runs: Tensor = self._by_run[block].index_select(0, band.runs)
        return runs.view(2, band.count, self._heads, -1, self._width)

    def spoilt(self, pages: Listed[int]) -> list[int]:
        """Those of these pages that hold a number that is not finite."""
        (places,) = to_device([pages], self.device)
        finite = list[bool]()
        for some in torch.split(places, PAGES_AT_ONCE):
            finite += self._by_page.index_select(1, some).isfinite().all(dim=2).all(dim=0).tolist()
        return [page for page, is_finite in zip(pages, finite, strict=True) if not is_finite]

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
        return PagedView(self, torch.cat(positions), torch.cat(places), bands, sources)

    def projection(self, launch: DecodingLaunch) -> PagedView:
        """The positions of the projected rows, and the places of their KV."""
        pieces = [piece for piece in launch.pieces if piece.projected]
        positions = [piece.start + np.array(piece.projected) for piece in pieces]
        places = [
            self._places(np.array(piece.sequence.pages), rows) for piece, rows in zip(pieces, positions, strict=True)
        ]
        of_rows, written = to_device([np.concatenate(positions), np.concatenate(places)], self.device)
        return PagedView(self, of_rows, written, (), ())

    def source_places(self, pieces: Listed[Piece]) -> Tensor:
        """The places of the KV of sources, one source after the other."""
        lengths = [(each.sequence.source_pages, len(each.sequence.request.source)) for each in pieces]
        places = [self._places(np.array(pages), np.arange(length)) for pages, length in lengths]
        taken = [page for pages, _ in lengths for page in pages]
        written, cleared = to_device([np.concatenate(places), taken], self.device)
        self._clear(cleared)
        return written

    def _clear(self, pages: Tensor) -> None:
        """Forget the KV of earlier texts in these pages. Attention multiplies masked values by 0, and 0 * nan is nan:
        so nan of another text would spoil this one."""
        if len(pages):
            self._by_page.index_fill_(1, pages, 0.0)

    def _band(self, pieces: list[Piece]) -> tuple[Tensor, Tensor, PieceBand]:
        """The positions of the rows, the places where each block writes them, and the band that they read.

        The host sends pages and positions, in one copy. What is longer, runs and mask, the device makes of these.
        """
        rows, context = max(piece.running for piece in pieces), max(piece.start + piece.rows for piece in pieces)
        pages = _padded([piece.sequence.pages for piece in pieces], pages_for(context, self._page_tokens))
        last_seen = np.zeros((len(pieces), rows), np.int64)  # the last position that a row attends to; 0 for padding
        for index, piece in enumerate(pieces):
            own = np.arange(piece.start, piece.start + piece.rows)
            last_seen[index, : piece.running] = np.delete(own, piece.projected) if piece.projected else own
        counts = np.array([piece.running for piece in pieces])
        owner, place = np.nonzero(np.arange(rows) < counts[:, None])  # of each row: its piece, and its index there
        positions = last_seen[owner, place]
        arrays = [positions, self._places(pages[owner], positions), pages, last_seen, self._taken(pieces)]
        if len(owner) < len(pieces) * rows:
            arrays.append(owner * rows + place)
        own_positions, places, tables, seen, taken, *real_rows = to_device(arrays, self.device)
        self._clear(taken)
        mask = self._mask(seen, pages.shape[1], self._shared if rows > 1 else 1)
        band = PieceBand(len(pieces), rows, self._runs(tables), mask, real_rows[0] if real_rows else None)
        return own_positions, places, band

    def _taken(self, pieces: Listed[Piece]) -> Ints:
        """The pages that no split has written for these texts."""
        begun = ((piece.sequence.pages, pages_for(piece.sequence.filled[0], self._page_tokens)) for piece in pieces)
        return np.array([page for pages, count in begun for page in pages[count:]], np.int64)

    def _source(self, pieces: list[Piece], band: PieceBand) -> PieceBand:
        """The band by which the rows of another band read all of their sources."""
        lengths = np.array([len(piece.sequence.request.source) for piece in pieces])
        count = pages_for(int(lengths.max()), self._page_tokens)
        pages = _padded([piece.sequence.source_pages for piece in pieces], count)
        tables, last_seen = to_device([pages, lengths[:, None] - 1], self.device)
        return replace(band, runs=self._runs(tables), mask=self._mask(last_seen, count))

    def _runs(self, pages: Tensor) -> Tensor:
        """The runs in pages of several pieces."""
        of_page = torch.arange(2 * self._heads, device=self.device).view(2, 1, -1, 1)
        return (pages.unsqueeze(1) * (2 * self._heads) + of_page).flatten()

    def _mask(self, last_seen: Tensor, pages: int, times: int = 1) -> Tensor:
        """The mask that is added to scores, so that each row attends to positions up to the last one that it sees. All
        rows are repeated this many times."""
        hidden = torch.arange(pages * self._page_tokens, device=self.device) > last_seen[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        return mask if times == 1 else mask.repeat(1, 1, times, 1)

    def _places(self, pages: Ints, positions: Ints) -> Ints:
        """The places of all heads at positions of one text, by its pages; or at one position for each row of pages."""
        number, within = np.divmod(positions, self._page_tokens)
        page = pages[number] if pages.ndim == 1 else pages[np.arange(len(pages)), number]
        runs = page[:, None] * 2 * self._heads + np.arange(2 * self._heads)
        return (runs * self._page_tokens + within[:, None]).ravel()


def _padded(tables: Listed[Listed[int]], count: int) -> Ints:
    """The first pages of each table, as rows of one length. A mask hides the padding, which is the text's own page."""
    pages = np.repeat(np.array([[table[0]] for table in tables], np.int64), count, axis=1)
    for row, table in zip(pages, tables, strict=True):
        own = table[:count]
        row[: len(own)] = own
    return pages
