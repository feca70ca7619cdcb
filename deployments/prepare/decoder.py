"""Ramps for a decoder: after which block its head is read early, from which threshold on, and at what loss.

The full network continues prompts. One pass over its texts gives the output of its head after every block. With exits
by `recompute`, a ramp gets exactly these outputs, as long as all tokens are those of the full network.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobatch.deployments.decoding.anatomy import anatomy_of, shape_of
from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.engine_setup import engine_for, kv_bytes, load_decoder, load_tokenizer, stop_tokens
from isobatch.deployments.decoding.network import at_least_float32
from isobatch.deployments.decoding.ramp_rules import DecoderRamp, DecoderRules, ProjectedTexts, TextLengths
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.progress import busy
from isobatch.profiles.errors import UserError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
MIN_PROMPTS = 20  # fewer prompts show too little of a decoder to choose a threshold from
BATCH = 32  # sequences that are written at the same time
MOST_KV = 2**32  # bytes of the keys and values of these sequences, unless one alone has more
MAX_LENGTHS = 200  # texts whose lengths are stored beside the rules, for plans
MOST_LAUNCHES = 12  # of the first part, for one of the deep part
LEAST_SHARE = 0.01  # of the residents


class DeepSchedule(NamedTuple):
    """When the deep part runs: after how many launches of the first part, while this share of the residents waits."""

    launches: int
    share: float
    cost: float  # of the launches of a token, where a launch through all blocks for each token costs 1

    @property
    def deep_share(self) -> float:
        """The share as exits.json has it, which must be above 0."""
        return max(LEAST_SHARE, round(self.share, 3))


def cheapest_schedule(f: float, p: float) -> DeepSchedule:
    """The cheapest schedule where survivors of several launches run deep together, by arithmetic.

    N sequences are resident. The first part of the network takes the share `f` of its time, and a token continues with
    probability `p`. The deep part runs once for every `k` launches of the first: then 1 - (1 - p)^k of the sequences
    wait. Rows cost the same in every schedule, so launches decide.

    >>> best = cheapest_schedule(f=0.25, p=0.3)
    >>> best.launches, round(best.share, 2), round(1 / best.cost, 2)
    (3, 0.66, 1.46)
    """

    def schedule(k: int) -> DeepSchedule:
        waiting = 1.0 - (1.0 - p) ** k
        return DeepSchedule(k, waiting if p else 1.0, (1.0 + (k - 1) * f) * (p / waiting if p else 1.0 / k))

    return min(map(schedule, range(1, MOST_LAUNCHES + 1)), key=lambda each: each.cost)


@dataclass(frozen=True)
class EarlyHeadOutputs:
    """The outputs of the head after every block but the last: blocks x tokens."""

    sure: Floats  # the probability of the most probable token
    agrees: Flags  # whether that token is the full network's


@dataclass(frozen=True)
class DecoderReport:
    """The loss by exits, on prompts that no threshold was chosen from. `left_out`: a sentence about prompts that were
    not used."""

    rules: DecoderRules
    num_blocks: int
    tokens: int
    left_out: str = ""

    def __str__(self) -> str:
        """The loss by a decoder's ramp, and by `exits: project`, which is used only if the user asks for it."""
        (ramp,), project = self.rules.ramps, self.rules.project
        assert project, "This is a bug: projection was not measured."
        leaving, agreement, same = 1 - (ramp.survival or 0), self.rules.agreement or 0, self.rules.same_texts or 0
        return (
            f"a ramp after block {ramp.block} (from 0) of {self.num_blocks}: {leaving:.0%} of the tokens leave there, "
            f"where the head's probability is at least {ramp.threshold:.3f}. Of {self.tokens} tokens after prompts "
            f"that did not choose it, {agreement:.2%} are the full network's; {same:.1%} of the texts are, to the last "
            "token. isobatch profile and isobatch plan say what that is worth. 'exits: project' is not chosen (the KV "
            "of blocks that a token skips is made from the state in which it left). With it, "
            f"{project.same_texts:.1%} of the texts are the full network's, {project.same_tokens:.1%} of the tokens "
            f"before the first other one, and {1 - project.survival:.0%} of the tokens leave. If you accept that, "
            "write it under args: of a Serve file"
        )


def ramp_report(
    source: Path, prompts: list[str], max_tokens: int, dtype: str, loss: float, device: str
) -> DecoderReport:
    """The best ramp of a decoder, chosen with texts that the full network writes after these prompts."""
    model, tokenizer = load_decoder(source, device, dtype), load_tokenizer(source)
    tokens = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    shape = shape_of(model.config)
    context = shape.context(None)
    fitting = [each for each in tokens if 0 < len(each) <= context and max_tokens <= shape.room(len(each), context)]
    room = f"leave room for {max_tokens} tokens (--max-tokens): the model reads {context} in all"
    if len(fitting) < MIN_PROMPTS <= len(tokens):
        raise UserError(f"{len(fitting)} of {len(tokens)} prompts {room}")
    with busy(f"writing on from {len(fitting)} prompts"):
        report = ramps_for(model, fitting, stop_tokens(source), loss, max_tokens)
    left_out = len(tokens) - len(fitting)
    return replace(report, left_out=f"{left_out} of {len(tokens)} prompts are left out: others {room}" * (left_out > 0))


def ramps_for(
    model: Any,
    prompts: Sequence[Sequence[int]],
    stop: frozenset[int],
    allowed_loss: float,
    max_tokens: int,
    calibrate: float = 0.5,
) -> DecoderReport:
    """The rules of the ramp with the largest gain, at no more than the allowed loss: the share of tokens that may
    differ from the full network's.

    `max_tokens`: those written after each prompt. `calibrate`: the share of prompts that thresholds come from; figures
    come from the others.
    """
    different = list(dict.fromkeys(map(tuple, prompts)))  # no copy of a prompt that chooses thresholds may test them
    if len(different) < MIN_PROMPTS:
        raise UserError(f"{len(different)} different prompts: at least {MIN_PROMPTS} are needed")
    shape = shape_of(model.config)
    if shape.num_blocks == 1:
        raise UserError("the network has one block: a ramp stands between two")
    requests = [shape.request(prompt, max_tokens, stop) for prompt in different]
    full = texts(model, DecoderRules(), requests)
    cut = round(calibrate * len(requests))
    calibration = early_head_outputs(model, requests[:cut], full[:cut])
    by_block = zip(calibration.sure, calibration.agrees, strict=True)
    thresholds = [threshold(sure, agrees, allowed_loss) for sure, agrees in by_block]
    survival = [float((calibration.sure[block] < value).mean()) for block, value in enumerate(thresholds)]
    depth = len(thresholds) + 1
    schedules = [cheapest_schedule((block + 1) / depth, p) for block, p in enumerate(survival)]
    best_block = min(range(len(schedules)), key=lambda block: schedules[block].cost)
    test = early_head_outputs(model, requests[cut:], full[cut:])
    others = [_measured(block, value, test) for block, value in enumerate(thresholds)]
    ramp = others.pop(best_block)
    outputs, sampled = dict(zip(different, map(len, full), strict=True)), prompts[:MAX_LENGTHS]
    lengths = TextLengths(prompts=tuple(map(len, sampled)), outputs=tuple(outputs[tuple(prompt)] for prompt in sampled))
    rules = DecoderRules(
        ramps=(ramp,), others=tuple(others), lengths=lengths, deep_share=schedules[best_block].deep_share
    )
    exits = texts(model, rules, requests[cut:])
    same = float(np.mean([written == other for written, other in zip(exits, full[cut:], strict=True)]))
    leaves = test.sure[best_block] >= ramp.threshold
    agreement = float((test.agrees[best_block] | ~leaves).mean())
    project = projected(model, rules, requests[cut:], full[cut:])
    rules = rules.model_copy(update={"agreement": agreement, "same_texts": same, "project": project})
    return DecoderReport(rules, depth, len(leaves))


def projected(
    model: Any, rules: DecoderRules, requests: Sequence[TextRequest], full: Sequence[Sequence[int]]
) -> ProjectedTexts:
    """The texts that come from exits by `project`. They must be written, as each token changes the next ones.

    The deep part runs on the schedule for the share of tokens that continue.
    """
    (ramp,) = rules.ramps
    num_blocks = shape_of(model.config).num_blocks
    written = _engine(model, rules, requests, exits="project").write_with_depths(requests)
    depths = [depth for _, text_depths in written for depth in text_depths]
    survival = sum(depth > ramp.block for depth in depths) / len(depths)
    return ProjectedTexts(
        survival=survival,
        same_tokens=sum(map(_same_until, (tokens for tokens, _ in written), full)) / sum(map(len, full)),
        same_texts=float(np.mean([tokens == other for (tokens, _), other in zip(written, full, strict=True)])),
        deep_share=cheapest_schedule((ramp.block + 1) / num_blocks, survival).deep_share,
    )


def _same_until(written: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens before the first one that differs.

    >>> _same_until([1, 2, 3], [1, 2, 4, 5])
    2
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(written, other, strict=False)))


def threshold(sure: Floats, agrees: Flags, allowed_loss: float) -> float:
    """The lowest threshold at which the tokens that leave cost at most the allowed loss, as a share of all tokens.

    >>> threshold(np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, True, False, True]), 0.0)
    0.8
    """
    order = np.argsort(-sure, kind="stable")
    lost = np.cumsum(~agrees[order]) / len(sure)
    fits = np.flatnonzero(lost <= allowed_loss)
    # Equally sure tokens leave together.
    ends = [place for place in fits if place + 1 == len(sure) or sure[order[place + 1]] < sure[order[place]]]
    return float(sure[order[ends[-1]]]) if ends else 1.01


def _measured(block: int, value: float, outputs: EarlyHeadOutputs) -> DecoderRamp:
    leaves = outputs.sure[block] >= value
    agrees = outputs.agrees[block]
    return DecoderRamp(
        block=block,
        threshold=value,
        survival=float(1.0 - leaves.mean()),
        agreement=float(agrees.mean()),
        exit_agreement=float(agrees[leaves].mean()) if leaves.any() else None,
    )


def texts(model: Any, rules: DecoderRules, requests: Sequence[TextRequest]) -> list[list[int]]:
    """The texts that the network writes under these rules."""
    return _engine(model, rules, requests).write_all(requests)


def _engine(model: Any, rules: DecoderRules, requests: Sequence[TextRequest], exits: str = "recompute") -> Engine:
    """An engine that writes as many texts at once as fit in memory, at most `BATCH`."""
    longest = max(len(each.source) + len(each.prompt) + each.max_tokens for each in requests)
    anatomy = anatomy_of(model)
    text_bytes = longest * anatomy.shape.num_blocks * kv_bytes(anatomy)
    return engine_for(model, rules, requests, max(1, min(BATCH, MOST_KV // text_bytes)), exits)


@torch.inference_mode()
def early_head_outputs(
    model: Any, requests: Sequence[TextRequest], written: Sequence[Sequence[int]]
) -> EarlyHeadOutputs:
    """The outputs of the head after every block but the last, for each token that the full network has written."""
    sure, agrees = [], []
    anatomy = anatomy_of(model)
    for text, tokens in zip(requests, written, strict=True):
        states = anatomy.states(text, [*text.prompt, *tokens[:-1]])
        outputs = [_head_output(anatomy.head(each[0, len(text.prompt) - 1 :]), tokens) for each in states]
        sure.append(np.stack([each for each, _ in outputs]))
        agrees.append(np.stack([each for _, each in outputs]))
    return EarlyHeadOutputs(np.concatenate(sure, axis=1), np.concatenate(agrees, axis=1))


def _head_output(logits: Tensor, tokens: Sequence[int]) -> tuple[Floats, Flags]:
    """Of one block at a time: logits of all blocks would take gigabytes."""
    logits = at_least_float32(logits)
    agrees = logits.argmax(dim=1) == torch.tensor(tokens, device=logits.device)
    return logits.softmax(dim=1).amax(dim=1).double().cpu().numpy(), agrees.cpu().numpy()
