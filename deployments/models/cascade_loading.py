"""Loads a cascade from its directory; `load_served` loads a directory of either kind."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from isobatch.deployments.models.cascade import Cascade, Level
from isobatch.deployments.models.checkpoint import check_level, label_names, locate, usual_dtype
from isobatch.deployments.models.encode import Encoder, TextEncoder
from isobatch.deployments.models.levels import CASCADE, is_cascade, read_levels
from isobatch.deployments.models.loading import (
    load,
    one_line_errors,
    quietly,
    read_encoder,
    resolve_device,
    resolve_dtype,
)
from isobatch.deployments.models.ramps import WEIGHTS, ExitRules, Ramps, check_forgets, read_ramps, read_rules
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.errors import UserError
from isobatch.profiles.promise import RULES


def load_served(checkpoint: str | Path, device: str = "cpu", dtype: str | None = None) -> TorchModel | Cascade:
    """A network from a local directory or a hub id, or a cascade from a directory that `isobatch cascade` wrote.

    Without `dtype`, in the usual precision.
    """
    folder = locate(checkpoint)
    dtype = dtype or usual_dtype(folder, resolve_device(device))
    return load_cascade(folder, device, dtype) if is_cascade(folder) else load(folder, device, dtype)


def load_cascade(folder: Path, device: str = "cpu", dtype: str = "float32") -> Cascade:
    """The cascade in this directory. Each level is loaded when it is first used."""
    levels, rules = read_levels(folder), read_rules(folder / RULES)
    ramps = Ramps(rules)
    check_policy(ramps, folder / RULES)
    for edge in levels.edges:
        if edge - 1 not in ramps.blocks:
            raise UserError(f"{folder / RULES}: has no ramp after block {edge - 1}, where a level of {CASCADE} ends")
    folders = [folder / level.folder for level in levels.levels]
    for level_folder in folders:
        check_level(locate(level_folder))
    labels = label_names(folders[-1])
    loaded_levels = []
    for rule, start, path, encoder in zip(levels.levels, levels.starts, folders, _encoders(folders), strict=False):
        stop, order = start + rule.blocks, order_of(label_names(path), labels, path)
        load_level = partial(_load_level, path, rules_of_level(rules, start, stop), rule.blocks, device, dtype)
        loaded_levels.append(Level(start, stop, rule.weight, encoder, order, path, load_level))
    return Cascade(loaded_levels, ramps, labels, resolve_device(device), resolve_dtype(dtype))


def rules_of_level(rules: ExitRules, start: int, stop: int) -> ExitRules:
    """The rules of one level with its own block numbers. The ramp at its end is its head."""
    own = tuple(
        rule.model_copy(update={"block": rule.block - start}) for rule in rules.ramps if start <= rule.block < stop - 1
    )
    at_end = next((rule.temperature for rule in rules.ramps if rule.block == stop - 1), rules.head_temperature)
    return rules.model_copy(update={"ramps": own, "head_temperature": at_end})


def order_of(own: Sequence[str], wanted: Sequence[str], folder: Path) -> tuple[int, ...]:
    """A level's number for each label of the cascade. Labels are matched by name, regardless of capitals.

    >>> order_of(["Good", "bad"], ["bad", "good"], Path("small"))
    (1, 0)
    """
    numbers = {name.casefold(): number for number, name in enumerate(own)}
    if len(numbers) != len(own) or set(numbers) != {name.casefold() for name in wanted}:
        raise UserError(
            f"{folder}: its labels are {_first_of(own)}, those of the last level {_first_of(wanted)}: "
            "a cascade answers with one set of names; rename them under id2label in its config.json"
        )
    return tuple(numbers[name.casefold()] for name in wanted)


def check_policy(ramps: Ramps, source: Path | str) -> None:
    check_forgets(ramps.policy, source, "which other levels of a cascade do not have")


def _load_level(folder: Path, rules: ExitRules, blocks: int, device: str, dtype: str) -> TorchModel:
    model = load(folder, device, dtype)
    if model.num_blocks != blocks:
        raise UserError(f"{folder}: has {model.num_blocks} blocks, {CASCADE} says {blocks}")
    if not rules.ramps:
        return model.with_ramps(Ramps(rules))
    files, widths = (folder.parent / RULES, folder / WEIGHTS), model.anatomy.pooled_widths
    return model.with_ramps(read_ramps(*files, widths, model.num_labels, model.device, rules))


def _encoders(folders: Sequence[Path]) -> list[Encoder]:
    """The encoder of each level. Levels with equal encoders get the same object, so that no text is encoded twice."""
    encoders: list[Encoder] = []
    for folder in folders:
        with quietly(), one_line_errors(folder):
            encoder = read_encoder(folder)
        if encoders and (encoder.longest is None) != (encoders[0].longest is None):
            raise UserError(f"{folder}: a cascade cannot read texts at one level and images at another")
        encoders.append(next((other for other in encoders if _are_equal(encoder, other)), encoder))
    return encoders


def _are_equal(first: Encoder, second: Encoder) -> bool:
    """Whether two encoders surely give the same tokens: only fast tokenizers can be compared."""
    if not (isinstance(first, TextEncoder) and isinstance(second, TextEncoder)):
        return False
    tokenizers = [encoder.tokenizer for encoder in (first, second)]
    if not all(hasattr(tokenizer, "backend_tokenizer") for tokenizer in tokenizers):
        return False
    contents = [(tokenizer.model_input_names, tokenizer.backend_tokenizer.to_str()) for tokenizer in tokenizers]
    settings = [(encoder.types, encoder.longest, encoder.unread) for encoder in (first, second)]
    return settings[0] == settings[1] and contents[0] == contents[1]


def _first_of(names: Sequence[str]) -> str:
    """The first six names, for an error message."""
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
