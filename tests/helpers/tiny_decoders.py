"""Small random decoders in float64, the plain way to decode with exits, and engines to compare with it."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch

from isobatch.deployments.decoding.anatomy import anatomy_of
from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.grammars import Grammars
from isobatch.deployments.decoding.network import CutDecoder, DecoderRamps, Draw, adjust, at_least_float32, choose
from isobatch.deployments.decoding.pages import PagePool
from isobatch.deployments.decoding.ramp_rules import DecoderRamp, DecoderRules
from isobatch.deployments.decoding.scheduler import DecodingLimits, Scheduler
from isobatch.deployments.decoding.sequences import Splits, TextRequest

Thresholds = dict[int, float]
Written = tuple[Sequence[int], Sequence[int]]  # tokens, and their depths
VOCABULARY = 23
BLOCKS = 4


@cache
def decoder(family: str = "llama", seed: int = 0, tied: bool = False, kv_heads: int = 2, **config_fields: Any) -> Any:
    """A causal language model of four blocks with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": BLOCKS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 6, "max_position_embeddings": 256}
    none = dict.fromkeys(("sliding_window", "bos_token_id", "eos_token_id", "pad_token_id"))
    others = {"tie_word_embeddings": tied, "initializer_range": 0.6, "use_sliding_window": False}
    fields = {**sizes, **heads, **none, **others, **config_fields}
    config = AutoConfig.for_model(family, **{name: list(v) if type(v) is tuple else v for name, v in fields.items()})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).double().eval()


@cache
def t5(family: str = "t5", seed: int = 0, gated: bool = False, tied: bool = False) -> Any:
    """An encoder of two blocks and a decoder of four, with random weights."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    sizes = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 6, "d_ff": 32, "num_heads": 4, "num_layers": 2}
    places = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "n_positions": 64}
    others = {"num_decoder_layers": BLOCKS, "tie_word_embeddings": tied, "decoder_start_token_id": 0}
    proj = "gated-gelu" if gated else "relu"
    config = AutoConfig.for_model(family, **sizes, **places, **others, feed_forward_proj=proj)
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float64).double().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "layer_norm" not in name:
                weights.normal_(std=0.6)
        if not tied:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def ramps_of(thresholds: dict[int, float]) -> DecoderRamps:
    """Ramps after these blocks, at which a token leaves whose probability is above the threshold."""
    ramps = tuple(DecoderRamp(block=block, threshold=each) for block, each in sorted(thresholds.items()))
    return DecoderRamps(DecoderRules(ramps=ramps))


@torch.inference_mode()
def plainly(
    model: Any, request: TextRequest, thresholds: Thresholds | Callable[[int], Thresholds], project: bool = False,
    allowed: Callable[[tuple[int, ...]], set[int]] | None = None, claimed: Written = ((), ()),
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Tokens and depths of one sequence: the whole network on the whole prefix for every token, and no cache.

    `thresholds` may be others for each token, by its number. `project`: a position whose token left stays in that state
    in all blocks behind, which make KV of it. `allowed`: the tokens that may come after others. `claimed`: the answer
    as it may be. One run on it stands for the runs on all its prefixes, as no position sees a later one; from the
    first token (with `project`, or depth) that is another, each token has a run of its own.
    """
    written: list[tuple[int, int]] = []
    run_on = list(zip(*claimed, strict=True))
    read = model.encoder(torch.tensor([request.source])) if request.source else None
    seen = None
    while len(written) < request.max_tokens and not (written and written[-1][0] in request.stop):
        count = len(written)
        if seen is None:
            left = {len(request.prompt) + place - 1: depth for place, (_, depth) in enumerate(run_on) if place}
            prefix = torch.tensor([[*request.prompt, *(token for token, _ in run_on)]])
            seen = _seen(model, read, prefix, left if project else {})
        now = thresholds(count) if callable(thresholds) else thresholds
        made = _next(model, request, seen, now, [token for token, _ in written], allowed)
        if count < len(run_on) and run_on[count][: 1 + project] != made[: 1 + project]:
            run_on, seen = written.copy(), None
            continue
        written.append(made)
        if count >= len(run_on):
            run_on, seen = written.copy(), None
    return [token for token, _ in written], [depth for _, depth in written]


def _next(
    model: Any, request: TextRequest, seen: tuple[list[torch.Tensor], torch.Tensor], thresholds: Thresholds,
    tokens: list[int], allowed: Callable[[tuple[int, ...]], set[int]] | None,
) -> tuple[int, int]:  # fmt: skip
    """The token after these, and its depth."""

    def changed(logits: torch.Tensor) -> torch.Tensor:
        adjust(logits, draw)
        if allowed:
            others = set(range(logits.shape[1])) - allowed(tuple(tokens))
            logits[:, sorted(others)] = -torch.inf
        return logits

    states, last = seen
    end = len(request.prompt) + len(tokens)
    draw = [Draw.at(request, end, [*request.prompt, *tokens])]
    for block, threshold in sorted(thresholds.items()):
        logits = changed(at_least_float32(_head(model, states[block][:, end - 1])))
        if logits.softmax(dim=1).max() >= threshold:
            return int(choose(logits, draw)), block
    return int(choose(changed(last[:, end - 1].clone()), draw)), BLOCKS - 1


@torch.inference_mode()
def plain_logprobs(model: Any, request: TextRequest, tokens: Sequence[int], depths: Sequence[int]) -> list[list[float]]:
    """The log probabilities of all tokens at the place of each of these, read after the block where it was known."""
    read = model.encoder(torch.tensor([request.source])) if request.source else None
    states, last = _seen(model, read, torch.tensor([[*request.prompt, *tokens]]), {})
    result = []
    for place, depth in enumerate(depths, len(request.prompt) - 1):
        logits = last if depth == BLOCKS - 1 else at_least_float32(_head(model, states[depth]))
        result.append(logits[0, place].log_softmax(dim=0).tolist())
    return result


def _seen(model: Any, read: Any, prefix: torch.Tensor, left: dict[int, int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The states of all positions after each block, and the logits after the last. Positions that `left` after a block
    go through those behind it as they are."""
    result: list[torch.Tensor] = []

    def find(_: object, told: Any, out: Any) -> Any:
        states = (out[0] if isinstance(out, tuple) else out).clone()
        gone = [position for position, block in left.items() if block < len(result)]
        states[:, gone] = told[0][:, gone]
        result.append(states)
        return (states, *out[1:]) if isinstance(out, tuple) else states

    blocks = model.decoder.block if read else model.model.layers
    hooks = [block.register_forward_hook(find) for block in blocks]
    try:
        answer = model(encoder_outputs=read, decoder_input_ids=prefix) if read else model(prefix)
    finally:
        for hook in hooks:
            hook.remove()
    return result, answer.logits


def _head(model: Any, states: torch.Tensor) -> torch.Tensor:
    """What the model itself does after its last block."""
    if not model.config.is_encoder_decoder:
        logits: torch.Tensor = model.lm_head(model.model.norm(states))
        cap = getattr(model.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap
    normed = model.decoder.final_layer_norm(states)
    if getattr(model.config, "scale_decoder_outputs", False):
        normed = normed * model.config.d_model**-0.5
    return cast(torch.Tensor, model.lm_head(normed))


class Clock:
    """Moves on a little whenever it is asked, so that launches take time."""

    def __init__(self, step_s: float = 0.001) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def engine(
    model: Any, thresholds: dict[int, float], verified: bool = False, pages: int = 400, max_pending: int = 4,
    limits: DecodingLimits | None = None, project: bool = False, grammars: Grammars | None = None,
) -> Engine:  # fmt: skip
    """An engine that is cut at its ramps."""
    ends = (*(block + 1 for block in sorted(thresholds)), BLOCKS)
    splits = Splits(ends, verified, max_pending, project)
    limits = limits or DecodingLimits(page_tokens=4, ttft_s=1e9, tpot_s=1e9)
    scheduler = Scheduler(splits, limits, PagePool(pages))
    network = CutDecoder(anatomy_of(model), ramps_of(thresholds), splits, pages, limits.page_tokens, grammars)
    return Engine(scheduler, network, Clock())


def written_by(running: Engine, asked: Sequence[TextRequest]) -> dict[int, tuple[list[int], list[int]]]:
    """Tokens and depths of sequences that all come at once, by their place."""
    names = [running.open(each) for each in asked]
    result: dict[Any, tuple[list[int], list[int]]] = {name: ([], []) for name in names}
    while (written := running.step()) is not None:
        for each in written:
            result[each.name][0].extend(each.tokens)
            result[each.name][1].extend(each.depths)
    return {place: result[name] for place, name in enumerate(names)}
