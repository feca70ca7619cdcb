"""A network of Hugging Face that decodes, cut into splits, whose keys and values (KV) lie in pages.

All parts are the model's own modules. What is ours is where KV lies, and who runs when.
"""

from collections.abc import Iterator
from itertools import accumulate, groupby, islice

import torch
from torch import Tensor

from deployments.decoding.anatomy import DecoderAnatomy
from deployments.decoding.choosing import Draw, at_least_float32, choose
from deployments.decoding.paged import PagedKv
from deployments.decoding.ramps import DecoderRamps
from deployments.decoding.scheduler import DecodingLaunch, Piece
from deployments.decoding.sequences import Opinion, Splits


class CutDecoder:
    """Runs launches. Of each sequence it keeps the states of positions that are pending before a deeper split."""

    def __init__(
        self, anatomy: DecoderAnatomy, ramps: DecoderRamps, splits: Splits, pages: int, page_tokens: int
    ) -> None:
        self._anatomy, self._ramps, self._splits = anatomy, ramps, splits
        self._kv = PagedKv(anatomy.shape.kv_width, anatomy.queries_per_key, anatomy.weights, pages, page_tokens)
        self._pending: dict[tuple[int, int], list[Tensor]] = {}  # by sequence, and the split that they stand before

    @torch.inference_mode()
    def run(self, launch: DecodingLaunch) -> list[list[Opinion]]:
        """What a ramp or the head says of each part's asked rows."""
        split, blocks = launch.split, self._splits.blocks(launch.split)
        self._read_sources(launch)
        states = self._entering(launch) if split == 0 else self._taken(launch)
        rows = self._through(launch, blocks, states)
        if split < self._splits.last:
            self._keep(launch, rows)
        return self._said(launch, rows)

    def _through(self, launch: DecodingLaunch, blocks: range, states: Tensor) -> Tensor:
        """The states after these blocks; those of rows that only leave their KV stay as they are."""
        if not launch.projects:
            return self._anatomy.through(blocks, states, self._kv.view(launch, blocks))
        leaves = torch.zeros(len(states), dtype=torch.bool)
        leaves[[begin + row for begin, part in _begins(launch) for row in part.projected]] = True
        left, stay = (each.nonzero()[:, 0].to(states.device) for each in (leaves, ~leaves))
        self._anatomy.project(blocks, states[left], self._kv.projection(launch, blocks))
        if not len(stay):
            return states
        through = self._anatomy.through(blocks, states[stay], self._kv.view(launch, blocks))
        return states.index_copy(0, stay, through)

    def drop(self, name: int) -> None:
        """Forget a sequence."""
        for split in range(1, len(self._splits.ends)):
            self._pending.pop((name, split), None)

    def follow(self, splits: Splits) -> None:
        """Be cut in another way: nothing is pending, as all sequences begin again."""
        self._splits = splits

    def _read_sources(self, launch: DecodingLaunch) -> None:
        """Have the encoder read the sources of who begins, those of like length side by side."""
        beginning = [part for part in launch.pieces if part.sequence.unread(launch.split)]
        for _, parts in groupby(sorted(beginning, key=_source_size), key=_source_size):
            self._anatomy.read(list(parts), self._kv)

    def _entering(self, launch: DecodingLaunch) -> Tensor:
        tokens = [
            token for part in launch.pieces for token in part.sequence.tokens[part.start : part.start + part.rows]
        ]
        return self._anatomy.embed(torch.tensor(tokens, device=self._kv.device))

    def _keep(self, launch: DecodingLaunch, rows: Tensor) -> None:
        for part, states in zip(launch.pieces, torch.split(rows, [part.rows for part in launch.pieces]), strict=True):
            self._pending.setdefault((part.sequence.name, launch.split + 1), []).append(states)

    def _taken(self, launch: DecodingLaunch) -> Tensor:
        """The pending states of the launch, which are pending no more."""
        found = []
        for part in launch.pieces:
            place = part.sequence.name, launch.split
            kept = self._pending.pop(place)
            states = kept[0] if len(kept) == 1 else torch.cat(kept)
            if part.rows < len(states):
                self._pending[place] = [states[part.rows :]]
            found.append(states[: part.rows])
        return torch.cat(found)

    def _said(self, launch: DecodingLaunch, rows: Tensor) -> list[list[Opinion]]:
        ends = list(accumulate(part.rows for part in launch.pieces))
        places = [
            place for part, end in zip(launch.pieces, ends, strict=True) for place in range(end - part.asked, end)
        ]
        if not places:
            return [[] for _ in launch.pieces]
        looked_at = rows if len(places) == len(rows) else rows[torch.tensor(places, device=rows.device)]
        logits, sure = self._look(launch.split, looked_at)
        found = torch.stack((choose(logits, _draws(launch)), sure)).tolist()  # the one copy to the host
        opinions = (Opinion(token, bool(is_sure)) for token, is_sure in zip(*found, strict=True))
        return [list(islice(opinions, part.asked)) for part in launch.pieces]

    def _look(self, split: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the next token, and who is sure of it (as 0 or 1): after the last split, everybody."""
        if split < self._splits.last:
            return self._ramps.look(self._splits.ends[split] - 1, states)
        logits = at_least_float32(self._anatomy.head(states))
        return logits, torch.ones(len(logits), dtype=torch.long, device=logits.device)


def _begins(launch: DecodingLaunch) -> Iterator[tuple[int, Piece]]:
    """The parts of a launch, each with the number of its first row."""
    return zip(accumulate((part.rows for part in launch.pieces), initial=0), launch.pieces, strict=False)


def _source_size(part: Piece) -> int:
    return part.size[-1]


def _draws(launch: DecodingLaunch) -> list[Draw]:
    """What each asked row's token is drawn with: it depends on the seed and on the token's place, and on no launch."""
    return [
        Draw(part.sequence.wanted.sampling, position + 1)
        for part in launch.pieces
        for position in range(part.start + part.rows - part.asked, part.start + part.rows)
    ]
