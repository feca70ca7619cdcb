"""Derives tables for devices that this machine does not have, from a checkpoint's config and published figures."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from isobatch.deployments.models.checkpoint import label_names, read_config
from isobatch.deployments.models.levels import checkpoints_of, is_cascade, read_levels
from isobatch.profiles.curves import BACKENDS, DTYPES, curve_table
from isobatch.profiles.datasheet import Shape, datasheet_table, encoder, residual
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import LatencyTable, cascade_table, edge_bytes


def shape_of(config: Any, length: int | None, side: int = 224) -> Shape:
    """The kernels of a Hugging Face network: an encoder at `length` tokens, any other network at its image size."""
    name = config.model_type
    try:
        if name == "resnet":
            narrower = 4 if config.layer_type == "bottleneck" else 1
            widths = tuple(size // narrower for size in config.hidden_sizes)
            return residual(
                name, stages=tuple(config.depths), widths=widths, stem=config.embedding_size,
                bottleneck=narrower > 1, side=side, labels=config.num_labels,
            )  # fmt: skip
        if hasattr(config, "depths"):
            raise AttributeError("its stages differ")
        if length is not None:
            return _encoder(config, f"{name}, {length} tokens", length, config.vocab_size)
        patches = (side // config.patch_size) ** 2
        shape = _encoder(config, name, patches + 1, config.patch_size**2 * config.num_channels)
        return replace(shape, length=None)
    except AttributeError as error:
        raise UserError(f"no table can be derived for model type {name!r} ({error}): measure it") from None


def tables(
    config: Any, kinds: Sequence[str], lengths: Sequence[int | None], side: int, ramps: Collection[int]
) -> Iterator[LatencyTable]:
    """One table per kind, length, backend and precision, with the network's ramps."""
    for kind, length in product(kinds, lengths):
        shape = shape_of(config, length, side)
        own_ramps = tuple(kernels if block in ramps else () for block, kernels in enumerate(shape.ramps))
        shape = replace(shape, ramps=own_ramps)
        derived = [datasheet_table(shape, kind, dtype="float32")]
        if kind != "cpu":  # curves are known for GPUs only
            derived = [curve_table(shape, kind, backend=each, dtype=dtype) for each, dtype in product(BACKENDS, DTYPES)]
        for table in derived:
            yield replace(table, repeated_bytes=_repeated(config, table.memory_bytes))


def _repeated(config: Any, memory_bytes: Sequence[int]) -> tuple[int, ...]:
    """Bytes of weights that each block shares with the block before it: ALBERT runs the same layers repeatedly."""
    if config.model_type != "albert":
        return ()
    layers, groups = len(memory_bytes), config.num_hidden_groups
    group = [layer * groups // layers for layer in range(layers)]
    alone = min(memory_bytes)  # without embedding and head
    return tuple(alone if layer and group[layer] == group[layer - 1] else 0 for layer in range(layers))


def checkpoint_tables(
    folder: Path, kinds: Sequence[str], lengths: Sequence[int | None], side: int, ramps: Collection[int]
) -> list[LatencyTable]:
    if not is_cascade(folder):
        return list(tables(read_config(folder), kinds, lengths, side, ramps))
    rules = read_levels(folder)
    parts = [
        list(tables(read_config(place), kinds, lengths, side, {ramp - start for ramp in ramps if ramp < stop - 1}))
        for place, start, stop in zip(checkpoints_of(folder), rules.starts, rules.starts[1:], strict=False)
    ]
    num_labels = len(label_names(folder))
    return [cascade_table(each, edge_bytes(each[0].length, side, num_labels)) for each in zip(*parts, strict=True)]


def _encoder(config: Any, name: str, length: int, vocabulary: int) -> Shape:
    name_of_inner = {"distilbert": "hidden_dim", "gpt2": "n_inner"}.get(config.model_type, "intermediate_size")
    inner = getattr(config, name_of_inner) or 4 * config.hidden_size  # GPT-2 names none
    return encoder(
        name, layers=config.num_hidden_layers, hidden=config.hidden_size, inner=inner, length=length,
        vocabulary=vocabulary, labels=config.num_labels,
    )  # fmt: skip
