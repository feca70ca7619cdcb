"""A causal language model of Hugging Face, cut into splits, whose keys and values (KV) lie in pages.

All parts are the model's own modules. What is ours is where KV lies, and who runs when.
"""

from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from deployments.decoding.choosing import Draw, at_least_float32, choose
from deployments.decoding.paged import PagedKv, replace_attention
from deployments.decoding.ramps import DecoderRamps
from deployments.decoding.scheduler import DecodingLaunch
from deployments.decoding.sequences import Opinion, Splits


class CutDecoder:
    """Runs launches. Of each sequence it keeps the states of positions that are pending before a deeper split."""

    def __init__(self, model: Any, ramps: DecoderRamps, splits: Splits, pages: int, page_tokens: int) -> None:
        self._body, self._head, self._ramps, self._splits = model.model, model.lm_head, ramps, splits
        replace_attention(model)
        self._kv = PagedKv(model, pages, page_tokens)
        self._pending: dict[tuple[int, int], list[Tensor]] = {}  # by sequence, and the split that they stand before

    @torch.inference_mode()
    def run(self, launch: DecodingLaunch) -> list[list[Opinion]]:
        """What a ramp or the head says of each part's asked rows."""
        split, blocks = launch.split, self._splits.blocks(launch.split)
        view = self._kv.view(launch, blocks)
        states = self._entering(launch) if split == 0 else self._taken(launch)
        turned = self._body.rotary_emb(states, position_ids=view.positions)
        for block in blocks:
            states = self._body.layers[block](states, attention_mask=view, position_embeddings=turned)
        rows = states[0]
        if split < self._splits.last:
            self._keep(launch, rows)
        return self._said(launch, rows)

    def drop(self, name: int) -> None:
        """Forget a sequence."""
        for split in range(1, len(self._splits.ends)):
            self._pending.pop((name, split), None)

    def _entering(self, launch: DecodingLaunch) -> Tensor:
        tokens = [
            token for part in launch.pieces for token in part.sequence.tokens[part.start : part.start + part.rows]
        ]
        states: Tensor = self._body.embed_tokens(torch.tensor([tokens], device=self._kv.device))
        return states

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
        return torch.cat(found).unsqueeze(0)

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
        logits = at_least_float32(self._head(self._body.norm(states)))
        return logits, torch.ones(len(logits), dtype=torch.long, device=logits.device)


def _draws(launch: DecodingLaunch) -> list[Draw]:
    """What each asked row's token is drawn with: it depends on the seed and on the token's place, and on no launch."""
    return [
        Draw(part.sequence.wanted.sampling, position + 1)
        for part in launch.pieces
        for position in range(part.start + part.rows - part.asked, part.start + part.rows)
    ]
