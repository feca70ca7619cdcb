"""Networks that were trained with exits: their heads become ramps as they are.

The heads of DeeBERT, PABEE and ElasticBERT are found by their names in the checkpoint; for other networks, a file has
the names (`OwnExits`). The rest of the checkpoint gets the names of Hugging Face's own class, which then reads it.

A head that reads the first token, or the mean over all tokens or places, is a special case of a ramp: the weights of
other tokens, places and units are 0.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from isobatch.deployments.folders import checkpoint_json
from isobatch.deployments.models import checkpoint
from isobatch.deployments.models.ramps import RampKind, make_head
from isobatch.profiles.errors import UserError
from isobatch.profiles.promise import FilePart

WEIGHTS = "model.safetensors"
Read = TypeVar("Read")
# Names of classifiers after blocks: DeeBERT's, and those of PABEE and ElasticBERT.
_CLASSIFIERS = (r"((?:\w+\.)+highway\.(\d+)\.)classifier\.weight", r"()classifiers\.(\d+)\.weight")
# Names of the layer with a tanh before a classifier, in the order in which they are tried.
_DENSE = ("{own}pooler.dense", "{base}.encoder.pooler.{block}.dense", "{base}.pooler.dense", "{base}.pooler")
_SHARED = r"\w+\.pooler(\.dense)?"  # the layer of all exits in PABEE, and of the head
Weights = Mapping[str, Tensor]


class OwnExit(FilePart):
    """One exit of a network: a linear layer, or two with a tanh between them."""

    classifier: str = Field(description="The name of the linear layer that gives the logits.")
    dense: str | None = Field(
        None, description="The name of the linear layer before it, whose output goes through tanh."
    )
    reads: Literal["first", "mean"] = Field(
        "first",
        description="What it reads of a block's output: the first token, or the mean. Of convolutions: the mean.",
    )


class OwnExits(FilePart):
    """The exits of a network, by the block that they stand after, and other names for the rest of its weights."""

    exits: dict[int, OwnExit] = Field(min_length=1, description="By the number of the block before them, from 0.")
    rename: dict[str, str] = Field(
        default_factory=dict, description="What names begin with, and with what they begin in Hugging Face's class."
    )
    model_type: str | None = Field(None, description="The family whose class reads the rest; none: config.json's.")

    @property
    def kind(self) -> RampKind:
        return "pooler" if any(each.dense for each in self.exits.values()) else "light"

    def called(self, name: str) -> str:
        """
        >>> OwnExits(exits={0: OwnExit(classifier="a")}, rename={"net.": "bert."}).called("net.encoder.weight")
        'bert.encoder.weight'
        """
        beginning = max((each for each in self.rename if name.startswith(each)), key=len, default="")
        return self.rename.get(beginning, "") + name.removeprefix(beginning)

    def keeps(self, name: str) -> bool:
        """Whether a weight stays in the checkpoint: it belongs to no exit, or to the head, too."""
        layer = name.rpartition(".")[0]
        of_exits = {layer for each in self.exits.values() for layer in (each.classifier, each.dense)}
        return layer not in of_exits or f"{layer}." in self.rename or bool(re.fullmatch(_SHARED, layer))


def names_in(folder: Path) -> OwnExits:
    """The exits of a checkpoint, by the names of its weights."""
    names, base_type = set(_opened(folder, lambda file, name: None)), checkpoint_json(folder).get("model_type")
    matches = [match for each in _CLASSIFIERS for match in (re.fullmatch(each, name) for name in names) if match]
    base = next((name.partition(".")[0] for name in names if ".encoder." in name), "")
    exits = dict[int, OwnExit]()
    for match in matches:
        own, block = match[1], int(match[2])
        tried = (each.format(own=own, base=base, block=block) for each in _DENSE if own or "{own}" not in each)
        dense = next((name for name in tried if f"{name}.weight" in names), None)
        exits[block] = OwnExit(classifier=match[0].removesuffix(".weight"), dense=dense)
    if not exits:
        raise UserError(
            f"{folder}: has no exits with the names of DeeBERT, PABEE or ElasticBERT: --exit-names FILE says the names"
        )
    rename, last = {}, exits[max(exits)]
    kind = "bert" if base == "elasticbert" else base_type
    if base == "elasticbert":
        rename["elasticbert."] = "bert."
    if "classifier.weight" not in names:  # the last exit is the head
        rename[f"{last.classifier}."] = "classifier."
        if last.dense and ".encoder." in last.dense:
            rename[f"{last.dense}."] = f"{kind}.pooler.dense."
    elif kind == "roberta":  # DeeBERT's has BERT's head
        rename |= {"roberta.pooler.dense.": "classifier.dense.", "classifier.": "classifier.out_proj."}
    return OwnExits(exits=exits, rename=rename, model_type=kind if base == "elasticbert" else None)


def without_exits(source: Path, own: OwnExits, to: Path) -> Weights:
    """Write the checkpoint that Hugging Face's own class reads, and return the weights of the exits."""
    weights = _opened(source, lambda file, name: file.get_tensor(name))
    checkpoint.copy(source, to)
    for path in to.glob("*.safetensors*"):
        path.unlink()
    kept = {own.called(name): tensor.contiguous() for name, tensor in weights.items() if own.keeps(name)}
    save_file(kept, to / WEIGHTS, {"format": "pt"})
    config = checkpoint_json(source)
    config.pop("architectures", None)  # a class that is not Hugging Face's
    if own.model_type:
        config["model_type"] = own.model_type
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return weights


def heads_of(own: OwnExits, weights: Weights, widths: Sequence[int], num_labels: int) -> dict[int, nn.Module]:
    """The exits as ramps of a network whose blocks are pooled to these widths. One after the last block is its head."""
    if own.kind == "pooler" and (bare := [block for block, each in own.exits.items() if not each.dense]):
        raise UserError(f"the exit after block {min(bare)} has no dense layer, but others have one: all must be alike")
    if beyond := [block for block in own.exits if not 0 <= block < len(widths)]:
        raise UserError(f"no exit can stand after block {max(beyond)}: the blocks are numbered 0 to {len(widths) - 1}")
    return {
        block: _head(f"the exit after block {block}", each, weights, widths[block], num_labels)
        for block, each in sorted(own.exits.items())
        if block < len(widths) - 1
    }


@torch.no_grad()
def _head(where: str, own: OwnExit, weights: Weights, width: int, num_labels: int) -> nn.Module:
    layers = [_layer(where, weights, name) for name in (own.dense, own.classifier) if name]
    head = make_head("pooler" if own.dense else "light", width, num_labels)
    parts = [part for part in head.modules() if isinstance(part, nn.Linear)]
    read = layers[0][0].shape[1]
    if read not in (width, width / 2):
        raise UserError(f"{where} reads {read} numbers, but {width} are known of a block's output, or {width // 2}")
    if len(layers[-1][1]) != num_labels:
        raise UserError(f"{where} gives {len(layers[-1][1])} logits, but the network has {num_labels} labels")
    for part, (weight, bias) in zip(parts, layers, strict=True):
        rows, columns = weight.shape
        if rows > part.out_features or columns > part.in_features:
            raise UserError(f"{where} has a layer of {rows} x {columns}, and a ramp's is {part.weight.shape}")
        first = part.in_features - columns if part is parts[0] and own.reads == "mean" else 0
        part.weight.zero_()
        part.bias.zero_()
        part.weight[:rows, first : first + columns] = weight.float()
        part.bias[:rows] = bias.float()
    return head.eval().requires_grad_(False)


def _layer(where: str, weights: Weights, name: str) -> tuple[Tensor, Tensor]:
    weight = weights.get(f"{name}.weight")
    if weight is None or weight.ndim != 2:
        problem = "there is no such weight" if weight is None else f"it has the shape {tuple(weight.shape)}"
        raise UserError(f"{where}: {name}.weight must be that of a linear layer, but {problem}")
    return weight, weights.get(f"{name}.bias", torch.zeros(len(weight)))


def _opened(folder: Path, read: Callable[[Any, str], Read]) -> dict[str, Read]:
    """What `read` reads of each weight, by its name: it gets the open file and the name."""
    by_name = dict[str, Read]()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                by_name |= {name: read(file, name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from error
    return by_name
