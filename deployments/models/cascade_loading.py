"""From the directory of a cascade to a network that can be cut; and one function for directories of either kind."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from deployments.exits import memory_width
from deployments.models.cascade import Cascade, Level
from deployments.models.checkpoint import check_level, label_names, locate
from deployments.models.encode import Encoder, TextEncoder
from deployments.models.levels import CASCADE, is_cascade, read_levels
from deployments.models.loading import load, one_line_errors, quietly, read_encoder, resolve_device, resolve_dtype
from deployments.models.ramps import WEIGHTS, ExitRules, Ramps, ramps_of, read_rules
from deployments.models.torch_model import TorchModel
from profiles.errors import UserError
from profiles.promise import RULES


def load_served(checkpoint: str | Path, device: str = "cpu", dtype: str = "float32") -> TorchModel | Cascade:
    """A network from a local directory or a hub id, or the cascade that `isobatch cascade` has written."""
    folder = locate(checkpoint)
    return load_cascade(folder, device, dtype) if is_cascade(folder) else load(folder, device, dtype)


def load_cascade(folder: Path, device: str = "cpu", dtype: str = "float32") -> Cascade:
    """The cascade in this directory. Its levels are loaded when they are first used."""
    levels, rules = read_levels(folder), read_rules(folder / RULES)
    ramps = Ramps(rules)
    _check_rules(folder, ramps, levels.edges)
    places = [folder / level.folder for level in levels.levels]
    for place in places:
        check_level(locate(place))
    labels = label_names(places[-1])
    encoders = _encoders(places)
    each = [
        Level(
            start,
            start + level.blocks,
            level.weight,
            encoder,
            order_of(label_names(place), labels, place),
            place,
            partial(
                _load_level, place, rules_of_level(rules, start, start + level.blocks), level.blocks, device, dtype
            ),
        )
        for level, start, place, encoder in zip(levels.levels, levels.starts, places, encoders, strict=False)
    ]
    return Cascade(each, ramps, labels, resolve_device(device), resolve_dtype(dtype))


def rules_of_level(rules: ExitRules, start: int, stop: int) -> ExitRules:
    """The rules of one level, by its own numbers: the ramp at its end is its head."""
    own = tuple(
        rule.model_copy(update={"block": rule.block - start}) for rule in rules.ramps if start <= rule.block < stop - 1
    )
    at_end = next((rule.temperature for rule in rules.ramps if rule.block == stop - 1), rules.head_temperature)
    return rules.model_copy(update={"ramps": own, "head_temperature": at_end})


def order_of(own: Sequence[str], wanted: Sequence[str], place: Path) -> tuple[int, ...]:
    """A level's number for each label of the cascade. Labels are the same if their names are, but for capitals.

    >>> order_of(["Good", "bad"], ["bad", "good"], Path("small"))
    (1, 0)
    """
    numbers = {name.casefold(): number for number, name in enumerate(own)}
    if len(numbers) != len(own) or set(numbers) != {name.casefold() for name in wanted}:
        raise UserError(
            f"{place}: its labels are {_listed(own)}, those of the last level {_listed(wanted)}: "
            "a cascade answers with one set of names; rename them under id2label in its config.json"
        )
    return tuple(numbers[name.casefold()] for name in wanted)


def check_policy(ramps: Ramps, told_in: Path | str) -> None:
    if memory_width(ramps.policy, num_labels=2):
        raise UserError(
            f"{told_in}: policy {ramps.rules.policy} remembers earlier ramps, which other levels do not have: "
            "a cascade needs entropy, confidence, margin, or one of your own that remembers nothing"
        )


def _check_rules(folder: Path, ramps: Ramps, edges: Sequence[int]) -> None:
    check_policy(ramps, folder / RULES)
    for edge in edges:
        if edge - 1 not in ramps.blocks:
            raise UserError(f"{folder / RULES}: has no ramp after block {edge - 1}, where a level of {CASCADE} ends")


def _load_level(folder: Path, rules: ExitRules, blocks: int, device: str, dtype: str) -> TorchModel:
    model = load(folder, device, dtype)
    if model.num_blocks != blocks:
        raise UserError(f"{folder}: has {model.num_blocks} blocks, {CASCADE} says {blocks}")
    if not rules.ramps:
        return model.with_ramps(Ramps(rules))
    found = ramps_of(rules, folder.parent / RULES, folder / WEIGHTS, model.anatomy.pooled_widths, model.num_labels)
    for head in found.heads.values():
        head.to(model.device)
    return model.with_ramps(found)


def _encoders(places: Sequence[Path]) -> list[Encoder]:
    """One a level; levels that would read the same get the same object, so that nothing is encoded twice."""
    found: list[Encoder] = []
    for place in places:
        with quietly(), one_line_errors(place):
            encoder = read_encoder(place)
        if found and (encoder.longest is None) != (found[0].longest is None):
            raise UserError(f"{place}: a cascade cannot read texts at one level and images at another")
        found.append(next((other for other in found if _alike(encoder, other)), encoder))
    return found


def _alike(one: Encoder, other: Encoder) -> bool:
    if not (isinstance(one, TextEncoder) and isinstance(other, TextEncoder)):
        return False
    known = [each.tokenizer for each in (one, other) if hasattr(each.tokenizer, "backend_tokenizer")]
    if one.types != other.types:
        return False
    read = [(tokenizer.model_input_names, tokenizer.backend_tokenizer.to_str()) for tokenizer in known]
    return len(known) == 2 and one.longest == other.longest and read[0] == read[1]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
