"""Loads a decoder, its tokenizer and its stop tokens from a directory, and builds the engine."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isobatch.deployments.config import MOST_INSIDE
from isobatch.deployments.decoding.anatomy import DecoderAnatomy, DecoderShape, anatomy_of, shape_of
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.grammars import Grammars
from isobatch.deployments.decoding.network import CutDecoder, DecoderRamps
from isobatch.deployments.decoding.pages import PagePool, pages_for
from isobatch.deployments.decoding.ramp_rules import DecoderRules, generation_defaults
from isobatch.deployments.decoding.scheduler import DecodingLimits, Scheduler
from isobatch.deployments.decoding.sequences import Splits, TextRequest
from isobatch.deployments.folders import checkpoint_json, hash_of
from isobatch.deployments.models.checkpoint import check_index, read_config
from isobatch.deployments.models.loading import one_line_errors, quietly, resolve_device, resolve_dtype
from isobatch.profiles.errors import UserError, read_model
from isobatch.profiles.promise import RULES

HALVES = ("float16", "bfloat16")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # in /proc/cpuinfo, of x86 and of ARM


def decoder_shape(folder: Path) -> DecoderShape:
    return shape_of(read_config(folder))


def language_of(folder: Path) -> str:
    """The meaning of a network's tokens, as a hash of its tokenizer and two properties of its config."""
    shape, names = decoder_shape(folder), ("tokenizer.*", "spiece.model", "vocab.*", "merges.txt")
    files = sorted(path for name in names for path in folder.glob(name))
    return f"{hash_of(files)} {shape.vocabulary} {shape.start}"


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:  # with cleaned-up spaces, characters before the end of a text would change with those after them
        return AutoTokenizer.from_pretrained(folder, clean_up_tokenization_spaces=False, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:  # some tokenizers need another package
        raise UserError(f"{folder}: its tokenizer cannot be read: {str(error).strip().splitlines()[0]}") from error


def load_decoder(folder: Path, device: str = "cpu", dtype: str = "float32") -> Any:
    """The model of Hugging Face, ready to run."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    target, precision = resolve_device(device), resolve_dtype(dtype)
    with quietly(), one_line_errors(folder):
        check_index(folder)
        kind = AutoModelForSeq2SeqLM if read_config(folder).is_encoder_decoder else AutoModelForCausalLM
        model, report = kind.from_pretrained(folder, dtype=precision, use_safetensors=True, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):  # they would be random
        raise UserError(f"{folder}: is not a whole decoder: its weights lack {', '.join(missing[:3])}")
    return model.to(target).eval()


def engine_of(model: Any, rules: DecoderRules, config: DecoderConfig, grammars: Grammars | None = None) -> Engine:
    """An engine whose network is cut at the ramps, with as many pages as the memory for KV holds."""
    anatomy = anatomy_of(model)
    num_blocks = anatomy.shape.num_blocks
    splits, limits = splits_and_limits(config, rules, num_blocks)
    position_bytes = num_blocks * kv_bytes(anatomy)
    page_bytes, pages = position_bytes * config.page_tokens, config.pages(position_bytes)
    context = context_of(anatomy.shape, config, anatomy.weights.dtype.itemsize)
    needed = pages_for(context, config.page_tokens)
    if anatomy.shape.start is not None:
        needed *= 2  # the KV of the source, too
    if needed > pages:
        raise UserError(
            f"kv_megabytes = {config.kv_megabytes}: one text of {context} tokens needs "
            f"{-(-needed * page_bytes // 2**20)}; give more, or set max_context"
        )
    network = CutDecoder(anatomy, DecoderRamps(rules), splits, pages, config.page_tokens, grammars)
    return Engine(Scheduler(splits, limits, PagePool(pages)), network, time.perf_counter)


def engine_for(
    model: Any, rules: DecoderRules, texts: Sequence[TextRequest], residents: int, exits: str = "recompute"
) -> Engine:
    """An engine without limits on waiting texts and their times, with memory for the longest `residents` of these."""
    limits = {"max_residents": residents, "max_waiting": MOST_INSIDE, "ttft_ms": 1e12, "tpot_ms": 1e12}
    config = DecoderConfig.model_validate({"model": "", "exits": exits, **limits})
    anatomy, page = anatomy_of(model), config.page_tokens
    needs = sorted(  # each also needs room for its next page
        pages_for(len(text.prompt) + text.max_tokens + page, page) + pages_for(len(text.source), page)
        for text in texts
    )  # fmt: skip
    needed_bytes = sum(needs[-residents:]) * page * anatomy.shape.num_blocks * kv_bytes(anatomy)
    return engine_of(model, rules, config.model_copy(update={"kv_megabytes": -(-needed_bytes // 2**20)}))


def context_of(shape: DecoderShape, config: DecoderConfig, number_bytes: int) -> int:
    """The most tokens of a text, if each number of its KV has this many bytes."""
    position_bytes = 2 * shape.num_blocks * shape.kv_width * number_bytes
    return shape.context(config.context(shape.reads, position_bytes, shape.start is not None))


def splits_and_limits(config: DecoderConfig, rules: DecoderRules, num_blocks: int) -> tuple[Splits, DecodingLimits]:
    """The splits of a replica's network, and the limits of its scheduler."""
    rules = rules if config.cuts is None else rules.at(config.cuts)
    splits = config.splits([ramp.block + 1 for ramp in rules.ramps], num_blocks)
    share = rules.project.deep_share if splits.project and rules.project else rules.deep_share
    return splits, config.limits(share)


def kv_bytes(anatomy: DecoderAnatomy) -> int:
    """The bytes of the keys and values of one position in one block."""
    return 2 * anatomy.shape.kv_width * anatomy.weights.dtype.itemsize


def stop_tokens(folder: Path) -> frozenset[int]:
    """The tokens that end a text, by the checkpoint."""
    source = generation_defaults(folder) or read_config(folder)  # an older checkpoint has no file of its own for them
    tokens = source.eos_token_id
    return frozenset([tokens] if isinstance(tokens, int) else tokens or ())


def grammars_of(folder: Path, words: Any) -> Grammars:
    return Grammars(words, decoder_shape(folder).vocabulary, stop_tokens(folder))


def in_its_precision(config: DecoderConfig) -> DecoderConfig:
    """The configuration with the usual precision, unless the user or the plan names one."""
    if "dtype" in config.model_fields_set:
        return config
    return config.model_copy(update={"dtype": usual_dtype(config.folder, config.device)})


def usual_dtype(folder: Path, device: str) -> str:
    """The precision of a decoder if the user names none.

    It is the precision of its ramps; without ramps, that of its checkpoint if the device is quick in it, else float32.
    """
    config = checkpoint_json(folder)
    if (folder / RULES).exists():
        return read_model(folder / RULES, DecoderRules).dtype
    stored = str(config.get("dtype") or config.get("torch_dtype"))
    about = Path("/proc/cpuinfo")
    multiplies_bfloat16 = about.exists() and not BFLOAT16_FLAGS.isdisjoint(about.read_text().split())
    quick = HALVES if device != "cpu" else ("bfloat16",) if multiplies_bfloat16 else ()
    return stored if stored in quick else "float32"
