"""Ramps for a decoder: where its head may be read early, how sure it has to be there, and what that costs.

The full network writes on from prompts. One pass over what it wrote shows what its head would have said after every
block: with `recompute`, a ramp never sees anything else, as long as tokens are those of the full network.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deployments.decoding.anatomy import DecoderAnatomy, anatomy_of, shape_of
from deployments.decoding.config import DecoderConfig
from deployments.decoding.engine import Engine
from deployments.decoding.engine_setup import engine_of
from deployments.decoding.ramp_rules import DecoderRamp, DecoderRules, ProjectedTexts, TextLengths
from deployments.decoding.rhythm import DeepRhythm, best_cut, rhythm
from deployments.decoding.sampling import at_least_float32
from deployments.decoding.sequences import TextRequest
from profiles.errors import UserError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
LEAST_PROMPTS = 20
AT_ONCE = 32
MEASURED = 16  # launches
LENGTHS = 200  # texts whose lengths are kept, for plans


@dataclass(frozen=True)
class DecoderOptions:
    """`allowed_loss`: of the tokens, those that may be others than the full network's. `max_tokens`: for a prompt.
    `calibrate`: of the prompts; thresholds come from these, figures from the others."""

    allowed_loss: float = 0.005
    max_tokens: int = 64
    calibrate: float = 0.5


@dataclass(frozen=True)
class Readings:
    """What the head says after every block but the last: blocks x tokens."""

    sure: Floats  # the probability of its most probable token
    agrees: Flags  # that this is the full network's token


@dataclass(frozen=True)
class DecoderReport:
    """What exits cost and bring, on prompts that no threshold was chosen from."""

    rules: DecoderRules
    rhythm: DeepRhythm
    num_blocks: int
    tokens: int


def ramps_for(
    model: Any, prompts: Sequence[Sequence[int]], stop: frozenset[int], options: DecoderOptions
) -> DecoderReport:
    """The rules of the ramp that brings most, at no more than the allowed loss."""
    if len(prompts) < LEAST_PROMPTS:
        raise UserError(f"{len(prompts)} prompts: at least {LEAST_PROMPTS} are needed")
    shape = shape_of(model.config)
    requests = [shape.request(prompt, options.max_tokens, stop) for prompt in prompts]
    full = texts(model, DecoderRules(), requests)
    cut = round(options.calibrate * len(requests))
    seen = readings(model, requests[:cut], full[:cut])
    thresholds = [
        threshold(seen.sure[block], seen.agrees[block], options.allowed_loss) for block in range(len(seen.sure))
    ]
    survival = [float((seen.sure[block] < each).mean()) for block, each in enumerate(thresholds)]
    depth = len(thresholds) + 1
    fixed = fixed_share(model, prompts[0])
    place, found = best_cut([((block + 1) / depth, p) for block, p in enumerate(survival)], fixed, fill=1.0)
    unseen = readings(model, requests[cut:], full[cut:])
    ramp = _measured(place, thresholds[place], unseen)
    others = [_measured(block, each, unseen) for block, each in enumerate(thresholds) if block != place]
    lengths = TextLengths(prompts=_tokens(prompts), outputs=_tokens(full))
    rules = DecoderRules(ramps=(ramp,), others=tuple(others), lengths=lengths, deep_share=round(found.share, 3))
    exits = texts(model, rules, requests[cut:])
    same = float(np.mean([written == other for written, other in zip(exits, full[cut:], strict=True)]))
    leaves = unseen.sure[place] >= ramp.threshold
    agreement = float((unseen.agrees[place] | ~leaves).mean())
    project = projected(model, rules, requests[cut:], full[cut:], fixed)
    rules = rules.model_copy(update={"agreement": agreement, "same_texts": same, "project": project})
    return DecoderReport(rules, found, depth, len(leaves))


def projected(
    model: Any, rules: DecoderRules, requests: Sequence[TextRequest], full: Sequence[Sequence[int]], fixed: float
) -> ProjectedTexts:
    """What becomes of texts whose KV is projected: only writing them freely shows it, as each token changes the next.

    Where the deep part runs is the rhythm for as many as go on, and `fixed` is what a launch costs beside its rows.
    """
    (ramp,) = rules.ramps
    num_blocks = shape_of(model.config).num_blocks
    found = _engine(model, rules, exits="project").write_with_depths(requests)
    depths = [depth for _, each in found for depth in each]
    survival = sum(depth > ramp.block for depth in depths) / len(depths)
    fill = _projection_share(anatomy_of(model), ramp.block + 1)
    best = rhythm((ramp.block + 1) / num_blocks, survival, fixed, fill)
    return ProjectedTexts(
        survival=survival,
        same_tokens=sum(map(_same_until, (tokens for tokens, _ in found), full)) / sum(map(len, full)),
        same_texts=float(np.mean([tokens == other for (tokens, _), other in zip(found, full, strict=True)])),
        deep_share=max(0.01, round(best.share, 3)),
        gain=best.gain,
    )


def _same_until(written: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens there are before the first that differs.

    >>> _same_until([1, 2, 3], [1, 2, 4, 5])
    2
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(written, other, strict=False)))


def _projection_share(anatomy: DecoderAnatomy, block: int) -> float:
    """What a row costs that only leaves its KV, of one that runs through a block: by the weights that it meets."""
    weights = sum(each.numel() for each in anatomy.blocks[block].parameters() if each.dim() > 1)
    return 2 * anatomy.shape.kv_width * anatomy.weights.shape[1] / weights


def threshold(sure: Floats, agrees: Flags, allowed_loss: float) -> float:
    """The lowest at which those who leave cost no more than the allowed loss, of all tokens.

    >>> threshold(np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, True, False, True]), 0.0)
    0.8
    """
    order = np.argsort(-sure, kind="stable")
    lost = np.cumsum(~agrees[order]) / len(sure)
    fits = np.flatnonzero(lost <= allowed_loss)
    # Tokens that are as sure as each other leave together.
    ends = [place for place in fits if place + 1 == len(sure) or sure[order[place + 1]] < sure[order[place]]]
    return float(sure[order[ends[-1]]]) if ends else 1.01


def _tokens(texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """How long the first of these are."""
    return tuple(len(text) for text in texts[:LENGTHS])


def _measured(block: int, value: float, seen: Readings) -> DecoderRamp:
    leaves = seen.sure[block] >= value
    agrees = seen.agrees[block]
    return DecoderRamp(
        block=block,
        threshold=value,
        survival=float(1.0 - leaves.mean()),
        agreement=float(agrees.mean()),
        exit_agreement=float(agrees[leaves].mean()) if leaves.any() else None,
    )


def texts(model: Any, rules: DecoderRules, requests: Sequence[TextRequest]) -> list[list[int]]:
    """What is written, in full batches."""
    return _engine(model, rules).write_all(requests)


def _engine(model: Any, rules: DecoderRules, exits: str = "recompute") -> Engine:
    """An engine in which any number may wait for ever."""
    told = {"exits": exits, "max_residents": AT_ONCE, "max_waiting": 10**9, "ttft_ms": 1e12, "tpot_ms": 1e12}
    return engine_of(model, rules, DecoderConfig.model_validate({"model": "", **told}))


@torch.inference_mode()
def readings(model: Any, requests: Sequence[TextRequest], written: Sequence[Sequence[int]]) -> Readings:
    """What the head says early wherever the full network has written a token."""
    sure, agrees = [], []
    anatomy = anatomy_of(model)
    for asked, tokens in zip(requests, written, strict=True):
        states = _states(anatomy, asked, tokens)
        said = [at_least_float32(anatomy.head(each[len(asked.prompt) - 1 :])) for each in states]
        full = torch.tensor(tokens, device=states[0].device)
        sure.append(np.stack([logits.softmax(dim=1).amax(dim=1).double().cpu().numpy() for logits in said]))
        agrees.append(np.stack([(logits.argmax(dim=1) == full).cpu().numpy() for logits in said]))
    return Readings(np.concatenate(sure, axis=1), np.concatenate(agrees, axis=1))


def _states(anatomy: DecoderAnatomy, asked: TextRequest, tokens: Sequence[int]) -> list[torch.Tensor]:
    """The states after every block but the last."""
    with states_after(anatomy.blocks[:-1]) as found:
        anatomy.whole(asked, [*asked.prompt, *tokens[:-1]])
    return [states[0] for states in found]


@contextmanager
def states_after(blocks: Iterable[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """What comes out of these blocks, texts x positions x width, while the model runs."""
    found: list[torch.Tensor] = []

    def find(_: object, __: object, out: Any) -> None:
        found.append(out[0] if isinstance(out, tuple) else out)

    hooks = [block.register_forward_hook(find) for block in blocks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def fixed_share(model: Any, prompt: Sequence[int], clock: Callable[[], float] = time.process_time) -> float:
    """What a launch costs beside its rows, in units of what a full one costs for them, on this device."""
    alone_s, together_s = (min(_launch_s(model, prompt, count, clock) for _ in range(3)) for count in (1, AT_ONCE))
    row_s = max(together_s - alone_s, 1e-9) / (AT_ONCE - 1)
    return max(alone_s - row_s, 0.0) / (AT_ONCE * row_s)


def _launch_s(model: Any, prompt: Sequence[int], count: int, clock: Callable[[], float]) -> float:
    """What one launch takes through the whole network that writes a token of so many sequences."""
    shape, engine = shape_of(model.config), _engine(model, DecoderRules())
    moments_s = [clock()]
    for tokens in (1, MEASURED + 1):  # the first also reads the prompts
        engine.write_all([shape.request(prompt, tokens)] * count)
        moments_s.append(clock())
    first_s, all_s = (later - earlier for earlier, later in pairwise(moments_s))
    return max(0.0, all_s - first_s) / MEASURED
