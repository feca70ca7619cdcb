"""A small fully convolutional network that labels every pixel, and exits with bridges (PAME, section 5.1).

The backbone has regions, each of blocks of one shape; between two the picture halves and channels double. The head
reads the last features of all regions. An exit behind a block lacks the features of later regions: its bridge has the
first block of each of them, and it has a head of its own. The backbone is frozen; bridges and heads are trained.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

REGIONS, BLOCKS, WIDTH = 3, 3, 12  # regions, blocks in each, channels of the first
NUM_BLOCKS = REGIONS * BLOCKS


class ResidualBlock(nn.Module):
    """A residual block; the first of a region halves the picture and widens it."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.beside = nn.Conv2d(before, width, 1, stride) if stride > 1 or before != width else nn.Identity()

    def forward(self, state: Tensor) -> Tensor:
        inner = functional.relu(self.norms[0](self.first(state)))
        return functional.relu(self.norms[1](self.second(inner)) + self.beside(state))


class Head(nn.Module):
    """Sums what every region says of every pixel, as FCN does."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.of_regions = nn.ModuleList([nn.Conv2d(_width(region), num_labels, 1) for region in range(REGIONS)])

    def forward(self, features: Sequence[Tensor], size: Sequence[int]) -> Tensor:
        each = [read(state) for read, state in zip(self.of_regions, features, strict=True)]
        grown = [functional.interpolate(logits, list(size), mode="bilinear") for logits in each]
        return torch.stack(grown).sum(dim=0)


class Exit(nn.Module):
    """The bridge behind a block, and a head; both begin as copies of the backbone's."""

    def __init__(self, backbone: "Backbone", block: int) -> None:
        super().__init__()
        self.block, later = block, range(block // BLOCKS + 1, REGIONS)
        self.bridge = nn.ModuleList([_like(backbone.blocks[region * BLOCKS], region) for region in later])
        self.head = Head(backbone.num_labels)
        self.head.load_state_dict(backbone.head.state_dict())

    def forward(self, features: Sequence[Tensor], size: Sequence[int]) -> Tensor:
        """`features` are the last ones of each region so far."""
        known = list(features)
        for block in self.bridge:
            known.append(block(known[-1]))
        logits: Tensor = self.head(known, size)
        return logits


class Backbone(nn.Module):
    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.num_labels = num_labels
        self.blocks = nn.ModuleList([_block(*divmod(block, BLOCKS)) for block in range(NUM_BLOCKS)])
        self.head = Head(num_labels)

    def features(self, pictures: Tensor) -> Iterator[list[Tensor]]:
        """After each block the last features of each region so far."""
        state, known = pictures, list[Tensor]()
        for number, block in enumerate(self.blocks):
            state = block(state)
            known = [*known[: number // BLOCKS], state]
            yield known

    def forward(self, pictures: Tensor) -> Tensor:
        *_, last = self.features(pictures)
        logits: Tensor = self.head(last, pictures.shape[-2:])
        return logits


@dataclass(frozen=True)
class Costs:
    """Multiplications for one picture: of each block, of the head at the end, and of each exit (bridge and head)."""

    blocks: tuple[int, ...]
    head: int
    exits: tuple[int, ...]

    @classmethod
    def of(cls, backbone: Backbone, exits: Sequence[Exit], picture: Tensor) -> "Costs":
        states = list(backbone.features(picture))
        inputs = [picture, *(known[-1] for known in states)]
        blocks = tuple(_multiplied(block, (state,)) for block, state in zip(backbone.blocks, inputs, strict=False))
        size = picture.shape[-2:]
        head = _multiplied(backbone.head, (states[-1], size))
        return cls(blocks, head, tuple(_multiplied(each, (states[each.block], size)) for each in exits))


def _multiplied(module: nn.Module, arguments: tuple[object, ...]) -> int:
    """Multiplications of all convolutions that run, by their outputs."""
    counts, hooks = list[int](), list[Any]()

    def counted(conv: nn.Module, _: object, output: Tensor) -> None:
        assert isinstance(conv, nn.Conv2d)
        counts.append(output[0].numel() * conv.weight[0].numel())

    for each in module.modules():
        if isinstance(each, nn.Conv2d):
            hooks.append(each.register_forward_hook(counted))
    module(*arguments)
    for hook in hooks:
        hook.remove()
    return sum(counts)


def _width(region: int) -> int:
    return WIDTH << region


def _block(region: int, place: int) -> ResidualBlock:
    before = _width(region) if place else (_width(region - 1) if region else 1)
    return ResidualBlock(before, _width(region), stride=1 if place else 2)


def _like(block: nn.Module, region: int) -> ResidualBlock:
    made = _block(region, 0)
    made.load_state_dict(block.state_dict())
    return made
