"""From the directory of a causal language model to an engine that decodes with it, and to its tokenizer."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deployments.decoding.checkpoint import DecoderRules
from deployments.decoding.config import DecoderConfig
from deployments.decoding.engine import Engine
from deployments.decoding.network import CutDecoder
from deployments.decoding.paged import kv_width
from deployments.decoding.pages import PagePool, pages_for
from deployments.decoding.ramps import DecoderRamps
from deployments.decoding.scheduler import Scheduler
from deployments.decoding.sequences import Splits
from profiles.errors import UserError


def decoder_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: its config.json cannot be read: {str(error).strip().splitlines()[0]}") from error


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: its tokenizer cannot be read: {str(error).strip().splitlines()[0]}") from error


def load_decoder(folder: Path, device: str = "cpu", dtype: str = "float32") -> Any:
    """The model as Hugging Face has it, ready to run."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    return model.to(device).eval()


def engine_of(
    model: Any, rules: DecoderRules, config: DecoderConfig, clock: Callable[[], float] = time.perf_counter
) -> Engine:
    """An engine that is cut at the ramps, with as many pages as the memory for KV holds."""
    num_blocks = model.config.num_hidden_layers
    cuts = () if config.exits == "off" else tuple(ramp.block + 1 for ramp in rules.ramps)
    splits = Splits((*cuts, num_blocks), config.exits == "verified", config.max_pending)
    page_bytes = 2 * kv_width(model.config) * model.dtype.itemsize * config.page_tokens
    pages = config.kv_megabytes * 2**20 // page_bytes
    context = context_of(model.config, config)
    needed = num_blocks * pages_for(context, config.page_tokens)
    if needed > pages:
        raise UserError(
            f"kv_megabytes = {config.kv_megabytes}: one text of {context} tokens needs "
            f"{-(-needed * page_bytes // 2**20)}; give more, or set max_context"
        )
    ramps = DecoderRamps(rules, model.model.norm, model.lm_head)
    network = CutDecoder(model, ramps, splits, pages, config.page_tokens)
    return Engine(Scheduler(splits, config.limits(rules.deep_share), PagePool(pages)), network, clock)


def stop_tokens(folder: Path) -> frozenset[int]:
    """The tokens that end a text, as the checkpoint says."""
    from transformers import GenerationConfig

    try:
        told = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:  # an older checkpoint has no file for it
        told = decoder_config(folder).eos_token_id
    return frozenset([told] if isinstance(told, int) else told or ())


def context_of(network: Any, config: DecoderConfig) -> int:
    """The most tokens of a prompt and its answer together."""
    reads: int = network.max_position_embeddings
    return min(reads, config.max_context or reads)
