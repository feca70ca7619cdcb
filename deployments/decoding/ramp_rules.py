"""The files of a decoder that are read before it is loaded: its configs, and exits.json with the rules of its ramps."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from isobatch.deployments.folders import is_decoder as is_decoder
from isobatch.profiles.errors import UserError, read_json, read_model
from isobatch.profiles.promise import RULES, FilePart, in_order

log = logging.getLogger(__name__)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "gemma3_text", "t5", "mt5")
# Frequencies of positions that depend on the length of a text: in a batch, texts of other lengths would change them.
BY_LENGTH = {"longrope", "su", "dynamic"}
KNOWN_ATTENTION = {"full_attention", "sliding_attention"}
# Settings of generation_config.json that are not followed, and the values without effect.
NOT_FOLLOWED = {
    "num_beams": 1, "no_repeat_ngram_size": 0, "min_new_tokens": 0, "min_length": 0, "suppress_tokens": None,
    "begin_suppress_tokens": None, "bad_words_ids": None,
}  # fmt: skip
LEAST_REPETITION = 0.01  # the smallest repetition penalty: logits that are divided by a tiny one overflow


def _listed(value: object) -> object:
    return [value] if isinstance(value, int) else value or []


EndTokens = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_listed)]


class DecoderRamp(FilePart):
    """One ramp in exits.json."""

    block: int = Field(ge=0, description="The ramp stands after this block: the network is cut there.")
    threshold: float = Field(description="In the policy's own unit.")
    survival: float | None = Field(None, ge=0, le=1, description="Measured: the share of tokens that go on after it.")
    agreement: float | None = Field(None, ge=0, le=1, description="Measured: of its tokens, those of the full network.")
    exit_agreement: float | None = Field(None, ge=0, le=1, description="Measured: the same, of tokens that leave here.")


class TextLengths(FilePart):
    """Tokens of the prompts that were used for measuring, and of the full network's text after each."""

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]


class ProjectedTexts(FilePart):
    """The effect of `exits: project` on texts, with the ramps in use."""

    survival: float = Field(ge=0, le=1, description="Measured: the share of tokens that go on.")
    same_tokens: float = Field(ge=0, le=1, description="Of the full network's tokens, those before the first other.")
    same_texts: float = Field(ge=0, le=1, description="Texts that are the full network's, to the last token.")
    deep_share: float = Field(gt=0, le=1, description="Share of the residents that deep splits wait for.")
    gain: float | None = Field(None, description="In older files: what plans now say of the times without exits.")


class DecoderRules(FilePart):
    """exits.json of a decoder: the places of its ramps, how they are used, and what was measured."""

    version: Literal[1] = 1
    kind: Literal["decoder"] = "decoder"
    dtype: Literal["float32", "float16", "bfloat16"] = Field("float32", description="The ramps are for this precision.")
    policy: str = Field(
        "isobatch.deployments.exits:confidence",
        description="The import path of the policy that decides which tokens leave. It must have no memory.",
    )
    ramps: Annotated[tuple[DecoderRamp, ...], AfterValidator(in_order)] = ()
    others: tuple[DecoderRamp, ...] = Field((), description="Ramps that a plan may use in place of these.")
    lengths: TextLengths | None = None
    deep_share: float | None = Field(None, gt=0, le=1, description="Share of the residents that deep splits wait for.")
    agreement: float | None = Field(None, ge=0, le=1, description="Measured: tokens that are the full network's.")
    same_texts: float | None = Field(None, ge=0, le=1, description="Measured: texts that are, to the last token.")
    project: ProjectedTexts | None = Field(None, description="The same with `exits: project`.")
    notes: Mapping[str, str | int | float] = Field(default_factory=dict, description="Where all this came from.")

    @property
    def all_ramps(self) -> tuple[DecoderRamp, ...]:
        """The ramps in use, and those that a plan may use instead."""
        return tuple(sorted((*self.ramps, *self.others), key=lambda ramp: ramp.block))

    def check_projectable(self, cuts: Sequence[int] | None) -> None:
        """Raise UserError unless the loss of `exits: project` was measured with these cuts."""
        measured = [ramp.block + 1 for ramp in self.ramps]
        if self.project is None:
            raise UserError("exits = 'project': exits.json does not have its loss: isobatch prepare measures it")
        if cuts and sorted(cuts) != measured:
            raise UserError(f"exits = 'project': its loss was measured with the cuts {measured} only, not {[*cuts]}")

    def at(self, cuts: Sequence[int]) -> "DecoderRules":
        """The same rules with the ramps before these blocks in use; raise UserError if one has no ramp."""
        known = {ramp.block + 1: ramp for ramp in self.all_ramps}
        if missing := sorted(set(cuts) - known.keys()):
            blocks = ", ".join(map(str, known)) or "no block"
            raise UserError(f"no ramp is known before block {missing[0]}: exits.json has some before {blocks}")
        return self.model_copy(update={"ramps": tuple(known[cut] for cut in sorted(set(cuts)))})


class _DecoderConfig(BaseModel):
    """The fields of config.json that decide whether a decoder can be served."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model_type: str | None = None
    num_hidden_layers: int | None = Field(None, ge=1)
    num_layers: int | None = Field(None, ge=1)
    num_decoder_layers: int | None = Field(None, ge=1)  # where an encoder has another number of them
    quantization_config: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    layer_types: tuple[str, ...] | None = None
    use_bidirectional_attention: bool | str | None = None
    vocab_size: int | None = None
    eos_token_id: EndTokens = ()

    @property
    def num_blocks(self) -> int:
        return self.num_decoder_layers or self.num_layers or self.num_hidden_layers or 0

    @property
    def rope_types(self) -> set[str]:
        ropes = [rope for rope in (self.rope_parameters, self.rope_scaling) if rope]
        inner = [each for rope in ropes for each in rope.values() if isinstance(each, dict)]  # by the layer's type
        return {str(each.get("rope_type", each.get("type"))) for each in (*ropes, *inner)}


class GenerationDefaults(BaseModel):
    """generation_config.json: the values of fields that requests leave out."""

    model_config = ConfigDict(frozen=True)

    do_sample: bool | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    max_new_tokens: int | None = Field(None, ge=1)
    repetition_penalty: float | None = Field(None, ge=LEAST_REPETITION)
    eos_token_id: EndTokens = ()

    @property
    def drawn_at(self) -> float:
        """The temperature; 0: tokens are not drawn, but the most probable ones."""
        if not self.do_sample:
            return 0.0
        return 1.0 if self.temperature is None else self.temperature


def generation_defaults(folder: Path) -> GenerationDefaults | None:
    """The values in generation_config.json; config.json has the tokens that end a text if that file has none."""
    path = folder / "generation_config.json"
    if not path.exists():
        return None
    own = read_model(path, GenerationDefaults)
    ends = own.eos_token_id or read_model(folder / "config.json", _DecoderConfig).eos_token_id
    return own.model_copy(update={"eos_token_id": ends})


def check_if_decoder(folder: Path) -> None:
    """Raise UserError if this is a decoder that cannot be served."""
    if is_decoder(folder):
        check_decoder(folder)


def check_decoder(folder: Path, cuts: Sequence[int] | None = None, project: bool = False) -> None:
    """Raise UserError about a model that cannot be served, or not with these cuts, or not with projection, before
    anything starts."""
    config = read_model(folder / "config.json", _DecoderConfig)
    if config.model_type not in FAMILIES:
        raise UserError(f"{folder}: model_type is {config.model_type}: of decoders, {', '.join(FAMILIES)} are served")
    if config.quantization_config:
        method = config.quantization_config.get("quant_method", "unknown")
        raise UserError(f"{folder}: its weights are quantized ({method}): decoders are served in float32, float16 or "
                        "bfloat16")  # fmt: skip
    if scaled := sorted(config.rope_types & BY_LENGTH):
        raise UserError(
            f"{folder}: rope_type is {scaled[0]}, which depends on a text's length: it is not served in batches"
        )
    if unknown := sorted(set(config.layer_types or ()) - KNOWN_ATTENTION):
        raise UserError(f"{folder}: its attention is {unknown[0]}: {' and '.join(sorted(KNOWN_ATTENTION))} are served")
    if config.use_bidirectional_attention:
        raise UserError(f"{folder}: use_bidirectional_attention is true: such networks are not served")
    _warn_of_other_generation(folder)
    rules = rules_of(folder, config.num_blocks)
    ends = (generation_defaults(folder) or config).eos_token_id
    if config.vocab_size and (last := max(ends, default=0)) >= config.vocab_size:
        raise UserError(f"{folder}: eos_token_id is {last}: the model knows {config.vocab_size} tokens")
    if cuts:
        rules.at(cuts)
    if project:
        rules.check_projectable(cuts)


def _warn_of_other_generation(folder: Path) -> None:
    """Warn of settings by which `generate` of transformers would write other texts."""
    path = folder / "generation_config.json"
    given = read_json(path) if path.exists() else {}
    if others := [name for name, usual in NOT_FOLLOWED.items() if given.get(name) not in (None, usual, [])]:
        log.warning(f"{path}: {', '.join(others)}: not followed, so texts differ from those of generate()")


def rules_of(folder: Path, num_blocks: int) -> DecoderRules:
    """The rules in the directory of a checkpoint; without the file there are no ramps."""
    path = folder / RULES
    rules = read_model(path, DecoderRules) if path.exists() else DecoderRules()
    for ramp in rules.all_ramps:
        if ramp.block >= num_blocks - 1:
            raise UserError(f"{path}: no ramp can stand after block {ramp.block} of {num_blocks} blocks")
    return rules
