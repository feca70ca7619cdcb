"""Small random decoders in float64, the plain way to decode with exits, and engines to compare with it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from deployments.decoding.checkpoint import DecoderRamp, DecoderRules
from deployments.decoding.choosing import Draw, at_least_float32, choose
from deployments.decoding.engine import Engine
from deployments.decoding.network import CutDecoder
from deployments.decoding.pages import PagePool
from deployments.decoding.ramps import DecoderRamps
from deployments.decoding.scheduler import DecodingLimits, Scheduler
from deployments.decoding.sequences import Splits, Wanted

VOCABULARY = 23
BLOCKS = 4


@cache
def decoder(family: str = "llama", seed: int = 0, tied: bool = False, kv_heads: int = 2) -> Any:
    """A causal language model of four blocks with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=6,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.6,
        use_sliding_window=False,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).double().eval()


def ramps_of(model: Any, thresholds: dict[int, float]) -> DecoderRamps:
    """Ramps after these blocks, at which a token leaves whose probability is above the threshold."""
    ramps = tuple(DecoderRamp(block=block, threshold=each) for block, each in sorted(thresholds.items()))
    return DecoderRamps(DecoderRules(ramps=ramps), model.model.norm, model.lm_head)


@torch.inference_mode()
def plainly(model: Any, wanted: Wanted, thresholds: dict[int, float]) -> tuple[list[int], list[int]]:
    """Tokens and depths of one sequence: the whole network on the whole prefix for every token, and no cache."""
    tokens: list[int] = []
    depths: list[int] = []
    while len(tokens) < wanted.max_tokens and not (tokens and tokens[-1] in wanted.stop):
        prefix = torch.tensor([[*wanted.prompt, *tokens]])
        states = _states(model, prefix)
        draw = [Draw(wanted.sampling, prefix.shape[1])]
        for block, threshold in sorted(thresholds.items()):
            logits = at_least_float32(model.lm_head(model.model.norm(states[block])))
            if logits.softmax(dim=1).max() >= threshold:
                depths.append(block)
                break
        else:
            logits = model(prefix).logits[:, -1]
            depths.append(model.config.num_hidden_layers - 1)
        tokens.append(int(choose(logits, draw)))
    return tokens, depths


def _states(model: Any, prefix: torch.Tensor) -> list[torch.Tensor]:
    """The state of the last position after each block."""
    found: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: found.append(out[:, -1])) for layer in model.model.layers]
    try:
        model(prefix)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class Clock:
    """Moves on a little whenever it is asked, so that launches take time."""

    def __init__(self, step_s: float = 0.001) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def engine(
    model: Any,
    thresholds: dict[int, float],
    verified: bool = False,
    pages: int = 400,
    max_pending: int = 4,
    limits: DecodingLimits | None = None,
) -> Engine:
    """An engine that is cut at its ramps."""
    ends = (*(block + 1 for block in sorted(thresholds)), model.config.num_hidden_layers)
    splits = Splits(ends, verified, max_pending)
    limits = limits or DecodingLimits(page_tokens=4, ttft_s=1e9, tpot_s=1e9)
    scheduler = Scheduler(splits, limits, PagePool(pages))
    return Engine(scheduler, CutDecoder(model, ramps_of(model, thresholds), splits, pages, limits.page_tokens), Clock())


def written_by(running: Engine, asked: Sequence[Wanted]) -> dict[int, tuple[list[int], list[int]]]:
    """Tokens and depths of sequences that all come at once, by their place."""
    names = [running.open(each) for each in asked]
    found: dict[Any, tuple[list[int], list[int]]] = {name: ([], []) for name in names}
    while (written := running.step()) is not None:
        for each in written:
            found[each.name][0].extend(each.tokens)
            found[each.name][1].extend(each.depths)
    return {place: found[name] for place, name in enumerate(names)}
