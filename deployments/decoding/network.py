"""A decoder of Hugging Face that is cut into splits, with its keys and values (KV) in pages.

All layers are the model's own modules. This package decides where KV lies and which sequences run when.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain, groupby, islice
from math import inf

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from isobatch.deployments.decoding.anatomy import DecoderAnatomy
from isobatch.deployments.decoding.grammars import Grammars
from isobatch.deployments.decoding.paged_attention import PagedKv
from isobatch.deployments.decoding.ramp_rules import DecoderRules
from isobatch.deployments.decoding.scheduler import DecodingLaunch, Piece
from isobatch.deployments.decoding.sequences import (
    UNDEFINED,
    LaunchFailedError,
    Sampling,
    Splits,
    TextRequest,
    TokenLogprobs,
    TokenPrediction,
)
from isobatch.deployments.models.ramps import check_forgets, policy_at
from isobatch.deployments.models.spans import compiles_shapes, rows_for
from isobatch.deployments.transport.device_copies import to_device
from isobatch.profiles.promise import RULES

COLDEST = 1e-6  # logits that are divided by a much lower temperature would overflow
# oneDNN compiles again for each number of rows, which takes milliseconds, so launches have multiples of this many.
# Launches of 32 texts with exits have 20 to 60 rows: in steps of 16 an eighth of them was padding, which takes as long
# as other rows on Zen 4.
ROW_STEP = 4
UNPADDED = 16  # rows up to which launches have no padding: there are few such numbers
MOST_IN_STEPS = 64  # rows; larger launches, which read prompts, have the coarser steps of `rows_for`


@dataclass(frozen=True)
class Draw:
    """How the token at one position of a sequence is chosen. `banned`: tokens that may not be chosen. `given` and
    `written`: the tokens before it, in the prompt and in the text; empty where they do not matter.

    A random number depends only on the seed and on the token's position. So a restarted sequence repeats its tokens,
    and a ramp and the full network choose the same token if their probabilities are similar.
    """

    sampling: Sampling
    place: int
    banned: frozenset[int] = frozenset()
    given: tuple[int, ...] = ()
    written: tuple[int, ...] = ()

    @classmethod
    def at(cls, request: TextRequest, place: int, tokens: Listed[int]) -> "Draw":
        """The draw of the token at this place, after others of the sequence's tokens."""
        before = tuple(tokens[:place]) if request.sampling.looks_back else ()
        first = request.first_written
        return cls(request.sampling, place, request.banned(place), before[:first], before[first:])

    @property
    def repeated(self) -> dict[int, float]:
        """The tokens that would be repeated, with the penalty for it."""
        penalty = self.sampling.repetition
        return {} if penalty == 1.0 else dict.fromkeys(self.given + self.written, penalty)

    @property
    def penalties(self) -> dict[int, float]:
        """By token, what is subtracted from its logit because the text has it already."""
        presence, frequency = self.sampling.presence, self.sampling.frequency
        written = self.written if presence or frequency else ()
        return {token: presence + frequency * times for token, times in Counter(written).items()}

    @property
    def random(self) -> float:
        """A random number from 0 to 1.

        >>> Draw(Sampling(seed=7), 3).random == Draw(Sampling(1.0, seed=7), 3).random
        True
        """
        digest = blake2b(f"{self.sampling.seed} {self.place}".encode(), digest_size=6).digest()
        return int.from_bytes(digest) / 2**48


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in float32 at least: tokens are chosen in this precision, even if the network runs in a lower one."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def adjust(logits: Tensor, draws: Listed[Draw]) -> None:
    """Change logits as requests ask for, in vLLM's order, and give banned tokens no probability."""
    _change(logits, torch.add, [dict(draw.sampling.bias) for draw in draws])
    if any(draw.sampling.looks_back for draw in draws):
        _change(logits, _penalized, [draw.repeated for draw in draws])
        _change(logits, torch.sub, [draw.penalties for draw in draws])
    _change(logits, torch.sub, [dict.fromkeys(draw.banned, inf) for draw in draws])


def _change(logits: Tensor, change: Callable[[Tensor, Tensor], Tensor], values: Listed[Mapping[int, float]]) -> None:
    """Change the logits of some tokens in each row by a value."""
    sizes = list(map(len, values))
    if not (count := sum(sizes)):
        return
    rows = np.repeat(np.arange(len(values)), sizes)  # arrays, as a penalty changes as many tokens as a prompt has
    tokens = np.fromiter(chain.from_iterable(values), np.int64, count)
    by = torch.from_numpy(np.fromiter(chain.from_iterable(each.values() for each in values), np.float64, count))
    *at, amounts = to_device([rows, tokens, by.to(logits.dtype)], logits.device)
    logits[tuple(at)] = change(logits[tuple(at)], amounts)


def _penalized(logits: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


class AskedLogprobs:
    """The log probabilities of the tokens in those rows whose requests ask for them, before logits are adjusted."""

    def __init__(self, logits: Tensor, draws: Listed[Draw], block: int) -> None:
        alternatives = {row: draw.sampling.alternatives for row, draw in enumerate(draws)}
        self._counts = {row: count for row, count in alternatives.items() if count is not None}
        self._block = block
        if self._counts:
            self._places = to_device([list(self._counts)], logits.device)[0]
            self._rows = logits[self._places].log_softmax(dim=1)

    def of(self, tokens: Tensor) -> dict[int, TokenLogprobs]:
        """Those of the chosen tokens, by row."""
        if not self._counts:
            return {}
        own = self._rows.gather(1, tokens[self._places].clamp(min=0).unsqueeze(1))[:, 0].tolist()
        values, best = self._rows.topk(min(max(self._counts.values()), self._rows.shape[1]), dim=1)
        pairs = (zip(*row, strict=True) for row in zip(best.tolist(), values.tolist(), strict=True))
        return {
            row: TokenLogprobs(logprob, tuple(islice(known, count)), self._block)
            for (row, count), logprob, known in zip(self._counts.items(), own, pairs, strict=True)
        }


def choose(logits: Tensor, draws: Listed[Draw]) -> Tensor:
    """A token for each row; `UNDEFINED` where the largest logit is not finite, where NaN counts as the largest."""
    tokens = logits.argmax(dim=1)
    finite = logits.gather(1, tokens.unsqueeze(1))[:, 0].isfinite()
    rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if rows:
        (drawn,) = to_device([rows], logits.device)
        tokens[drawn] = _drawn(logits[drawn], [draws[row] for row in rows])
    return tokens.where(finite, UNDEFINED)


def _drawn(logits: Tensor, draws: Listed[Draw]) -> Tensor:
    """Tokens chosen at random among the `top_k` most probable ones that have the share `top_p` of their probability,
    and each `min_p` of the first one's."""
    vocabulary = logits.shape[1]
    values = [
        (own.temperature, own.top_p, min(own.top_k or vocabulary, vocabulary), own.min_p, each.random)
        for each, own in ((each, each.sampling) for each in draws)
    ]
    (columns,) = to_device([torch.tensor(values, dtype=logits.dtype).T.unsqueeze(-1)], logits.device)
    temperature, top_p, top_k, min_p, random = columns.unbind()
    ordered, tokens = (logits / temperature.clamp(min=COLDEST)).softmax(dim=1).sort(dim=1, descending=True, stable=True)
    ordered.masked_fill_(torch.arange(vocabulary, device=logits.device) >= top_k, 0.0)
    others = ordered.cumsum(dim=1) - ordered >= top_p * ordered.sum(dim=1, keepdim=True)
    others[:, 0] = False  # the most probable token stays even if `top_p` is rounded to 0
    ordered.masked_fill_(others | (ordered < min_p * ordered[:, :1]), 0.0)
    summed = ordered.cumsum(dim=1)
    place = (summed <= random * summed[:, -1:]).sum(dim=1, keepdim=True)
    last = (ordered > 0).sum(dim=1, keepdim=True) - 1  # where the random number is rounded to 1
    return tokens.gather(1, place.minimum(last).clamp(min=0)).squeeze(1)


class DecoderRamps:
    """The ramps of one network: its own head, read early."""

    def __init__(self, rules: DecoderRules) -> None:
        self._policy = policy_at(rules.policy)
        check_forgets(self._policy, RULES, "but each token is another input")
        self._thresholds = {ramp.block: ramp.threshold for ramp in rules.all_ramps}

    def leave(self, block: int, logits: Tensor) -> Tensor:
        """For each row of the logits after a block whether its token leaves there (1 or 0).

        Banned tokens get a finite logit, because a policy that multiplies a probability by its logarithm would else
        multiply 0 by infinity.
        """
        logits = logits.clamp(min=torch.finfo(logits.dtype).min)
        leaves = self._policy(logits, self._thresholds[block], logits.new_empty(len(logits), 0)).leaves
        return leaves.to(torch.long)


class CutDecoder:
    """Runs launches, and keeps the states of positions that are pending before a deeper split."""

    def __init__(
        self, anatomy: DecoderAnatomy, ramps: DecoderRamps, splits: Splits, pages: int, page_tokens: int,
        grammars: Grammars | None,
    ) -> None:  # fmt: skip
        self._anatomy, self._ramps, self._splits, self._grammars = anatomy, ramps, splits, grammars
        shape = anatomy.shape
        self._kv = PagedKv(
            shape.num_blocks, shape.heads, shape.width, anatomy.queries_per_key, anatomy.weights, pages, page_tokens
        )
        self._compiles = compiles_shapes(anatomy.weights.device, anatomy.weights.dtype)
        self._pending: dict[tuple[int, int], list[Tensor]] = {}  # by sequence and split before which they wait

    @torch.inference_mode()
    def run(self, launch: DecodingLaunch) -> list[list[TokenPrediction]]:
        """The predictions of a ramp or the head for each piece; raises `LaunchFailedError` while the device works."""
        try:
            return self._run(launch)
        except Exception as error:
            self._anatomy.weights.flatten()[0].item()  # a lost device raises its error again
            raise LaunchFailedError(error) from error

    def _run(self, launch: DecodingLaunch) -> list[list[TokenPrediction]]:
        split, blocks = launch.split, self._splits.blocks(launch.split)
        self._read_sources(launch)
        states = self._embedded(launch) if split == 0 else self._pending_states(launch)
        rows = self._run_blocks(launch, blocks, states)
        if split < self._splits.last:
            self._keep(launch, rows)
        return self._predictions(launch, rows)

    def _run_blocks(self, launch: DecodingLaunch, blocks: range, states: Tensor) -> Tensor:
        """The states after these blocks. States of projected rows do not change."""
        if not launch.projects:
            return self._through(blocks, states, launch)
        projected = torch.zeros(len(states), dtype=torch.bool)
        firsts = accumulate((piece.rows for piece in launch.pieces), initial=0)
        pieces = zip(firsts, launch.pieces, strict=False)
        projected[[first + row for first, piece in pieces for row in piece.projected]] = True
        left, stay = to_device([rows.nonzero()[:, 0] for rows in (projected, ~projected)], states.device)
        self._anatomy.project(blocks, self._padded(states[left]), self._kv.projection(launch))
        if not len(stay):
            return states
        return states.index_copy(0, stay, self._through(blocks, states[stay], launch))

    def _through(self, blocks: range, states: Tensor, launch: DecodingLaunch) -> Tensor:
        return self._anatomy.through(blocks, self._padded(states), self._kv.view(launch))[: len(states)]

    def _padded(self, states: Tensor) -> Tensor:
        """The states, with further rows where oneDNN compiles for each number of rows: so there are few of them."""
        rows = len(states)
        if not self._compiles or rows <= UNPADDED:
            return states
        spare = -rows % ROW_STEP if rows <= MOST_IN_STEPS else rows_for(rows) - rows
        return functional.pad(states, (0, 0, 0, spare)) if spare else states

    def drop(self, name: int) -> None:
        for split in range(1, len(self._splits.ends)):
            self._pending.pop((name, split), None)

    def spoilt(self, pages: Iterable[int]) -> list[int]:
        return self._kv.spoilt(sorted(set(pages)))

    def recut(self, splits: Splits) -> None:
        """Cut elsewhere. No states are pending, as all sequences restart."""
        self._splits = splits

    def _read_sources(self, launch: DecodingLaunch) -> None:
        """Have the encoder read the sources of new sequences, those of similar length together."""
        new = [piece for piece in launch.pieces if piece.sequence.unread(launch.split)]
        for _, pieces in groupby(sorted(new, key=_source_size), key=_source_size):
            self._anatomy.read(list(pieces), self._kv)

    def _embedded(self, launch: DecodingLaunch) -> Tensor:
        tokens = [
            token for piece in launch.pieces for token in piece.sequence.tokens[piece.start : piece.start + piece.rows]
        ]
        return self._anatomy.embed(*to_device([tokens], self._kv.device))

    def _keep(self, launch: DecodingLaunch, rows: Tensor) -> None:
        for piece, states in zip(
            launch.pieces, torch.split(rows, [piece.rows for piece in launch.pieces]), strict=True
        ):
            # A view would keep the states of the whole launch.
            own = states if piece.rows == len(rows) else states.clone()
            self._pending.setdefault((piece.sequence.name, launch.split + 1), []).append(own)

    def _pending_states(self, launch: DecodingLaunch) -> Tensor:
        taken = []
        for piece in launch.pieces:
            key = piece.sequence.name, launch.split
            chunks = self._pending.pop(key)
            states = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
            if piece.rows < len(states):
                self._pending[key] = [states[piece.rows :]]
            taken.append(states[: piece.rows])
        return torch.cat(taken)

    def _predictions(self, launch: DecodingLaunch, rows: Tensor) -> list[list[TokenPrediction]]:
        ends = list(accumulate(piece.rows for piece in launch.pieces))
        places = [
            place
            for piece, end in zip(launch.pieces, ends, strict=True)
            for place in range(end - piece.num_predictions, end)
        ]
        if not places:
            return [[] for _ in launch.pieces]
        states = rows if len(places) == len(rows) else rows[to_device([places], rows.device)[0]]
        logits, draws = at_least_float32(self._anatomy.head(self._padded(states))[: len(states)]), _draws(launch)
        wanted = AskedLogprobs(logits, draws, self._splits.ends[launch.split] - 1)
        adjust(logits, draws)
        if self._grammars:
            self._grammars.apply(logits, [(draw.sampling, draw.written) for draw in draws])
        tokens = choose(logits, draws)
        on_host = torch.stack((tokens, self._sure(launch.split, logits))).tolist()  # one copy
        logprobs = wanted.of(tokens)
        predictions = (
            TokenPrediction(token, bool(is_sure), logprobs.get(row))
            for row, (token, is_sure) in enumerate(zip(*on_host, strict=True))
        )
        return [list(islice(predictions, piece.num_predictions)) for piece in launch.pieces]

    def _sure(self, split: int, logits: Tensor) -> Tensor:
        """Whether the next token is sure (1 or 0): after the last split, always."""
        if split < self._splits.last:
            return self._ramps.leave(self._splits.ends[split] - 1, logits)
        return torch.ones(len(logits), dtype=torch.long, device=logits.device)


def _source_size(piece: Piece) -> int:
    return piece.size[-1]


def _draws(launch: DecodingLaunch) -> list[Draw]:
    """The draw of each predicted token, which depends on the seed and on the token's position, not on the launch."""
    return [
        Draw.at(piece.sequence.request, position + 1, piece.sequence.tokens)
        for piece in launch.pieces
        for position in range(piece.start + piece.rows - piece.num_predictions, piece.start + piece.rows)
    ]
