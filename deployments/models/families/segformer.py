"""SegFormer: regions (stages) of transformer layers over ever coarser maps, and a head that reads all of them.

A block is a layer; the first one of a region includes the patches of its region, the last one its norm. What passes
between blocks is the map of each region so far, the last one as tokens while its region is under way.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family
from isobatch.deployments.models.spans import Spans
from isobatch.deployments.tasks import CLASSIFICATION, PixelClassification
from isobatch.profiles.errors import UserError

Maps = tuple[Tensor, ...]


@dataclass(frozen=True)
class Regions:
    """The maps of all regions: their channels, their heights and widths, and the layers of each region."""

    channels: Sequence[int]
    sides: Sequence[tuple[int, int]]
    depths: Sequence[int]

    @classmethod
    def of(cls, config: Any) -> "Regions":
        size = config.image_size
        sides = [(size, size) if isinstance(size, int) else tuple(size)]
        for patch, stride in zip(config.patch_sizes, config.strides, strict=True):
            sides.append(tuple((side + 2 * (patch // 2) - patch) // stride + 1 for side in sides[-1]))
        return cls(config.hidden_sizes, sides[1:], config.depths)

    def place(self, block: int) -> tuple[int, int]:
        """The region of a block, and the block's place in it.

        >>> Regions((8, 16), ((4, 4), (2, 2)), (2, 3)).place(3)
        (1, 1)
        """
        ends = list(accumulate(self.depths))
        region = next(region for region, end in enumerate(ends) if block < end)
        return region, block - ends[region] + self.depths[region]

    def is_whole(self, block: int) -> bool:
        """Whether a block is the last one of its region."""
        region, place = self.place(block)
        return place == self.depths[region] - 1

    def sizes(self, block: int) -> list[int]:
        """The numbers in each map after a block."""
        region, _ = self.place(block)
        return [self.channels[each] * self.sides[each][0] * self.sides[each][1] for each in range(region + 1)]

    def unpacked(self, rows: Tensor, block: int) -> Maps:
        """The maps after a block, from one row per input."""
        *before, last = rows.split(self.sizes(block), dim=1)
        maps = [each.unflatten(1, (self.channels[at], *self.sides[at])) for at, each in enumerate(before)]
        channels, sides = self.channels[len(before)], self.sides[len(before)]
        shape = (channels, *sides) if self.is_whole(block) else (sides[0] * sides[1], channels)
        return *maps, last.unflatten(1, shape)


def packed(maps: Maps) -> Tensor:
    """One row per input."""
    return torch.cat([each.flatten(1) for each in maps], dim=1)


class Bridge(nn.Module):
    """What stands between a block and a head of its own: the first block of each later region."""

    def __init__(self, regions: Regions, block: int, network: Any) -> None:
        """`network`: one with one block in each region, whose modules become the bridge's."""
        super().__init__()
        region, _ = regions.place(block)
        self._regions, self._block, stages = regions, block, network.segformer.stages
        self.norm = nn.Identity() if regions.is_whole(block) else stages[region].layer_norm
        self.stages = stages[region + 1 :]
        self.head = network.decode_head

    def forward(self, pooled: Tensor) -> Tensor:
        *maps, last = self._regions.unpacked(pooled, self._block)
        if not self._regions.is_whole(self._block):
            last = _as_map(self.norm(last), self._regions.sides[len(maps)])
        maps.append(last)
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return _by_pixel(self.head(maps))


def segformer(model: Any) -> Anatomy:
    base, config = model.base_model, model.config
    is_dense = hasattr(model, "decode_head")
    regions = Regions.of(config)

    def bridge(block: int) -> nn.Module:
        small = deepcopy(config)
        small.depths = [1] * len(regions.depths)
        network = type(model)(small)
        network.load_state_dict(model.state_dict(), strict=False)
        return Bridge(regions, block, network)

    def head(maps: Maps) -> Tensor:
        if is_dense:
            return _by_pixel(model.decode_head(maps))
        labels: Tensor = model.classifier(maps[-1].mean(dim=(2, 3)))
        return labels

    def mean(maps: Maps, _: Spans | None) -> Tensor:
        last = maps[-1].float()
        return last.mean(dim=1) if last.ndim == 3 else last.mean(dim=(2, 3))

    places = [regions.place(block) for block in range(sum(regions.depths))]
    widths = [sum(regions.sizes(block)) if is_dense else regions.channels[at] for block, (at, _) in enumerate(places)]
    return Anatomy(
        embed=lambda arrays: (arrays["pixel_values"],),
        blocks=[_block(base.stages[region], place, regions.sides[region], region) for region, place in places],
        head=head,
        pool=(lambda maps, _: packed(maps).float()) if is_dense else mean,
        pooled_widths=widths,
        task=PixelClassification(regions.sides[0]) if is_dense else CLASSIFICATION,
        unpacked=lambda rows, block: regions.unpacked(rows, block - 1),
        packed=packed,
        bridge=bridge if is_dense else None,
    )


def _block(stage: Any, place: int, sides: tuple[int, int], region: int) -> Callable[[Maps, Spans | None], Maps]:
    def run(maps: Maps, _: Spans | None) -> Maps:
        if place == 0:
            before, tokens = maps if region else (), stage.patch_embeddings(maps[-1])[0]
        else:
            *before, tokens = maps
        tokens = stage.blocks[place](tokens, *sides)
        if place < len(stage.blocks) - 1:
            return *before, tokens
        return *before, _as_map(stage.layer_norm(tokens), sides)

    return run


def _as_map(tokens: Tensor, sides: tuple[int, int]) -> Tensor:
    return tokens.unflatten(1, sides).permute(0, 3, 1, 2).contiguous()


def _by_pixel(logits: Tensor) -> Tensor:
    """A row of logits for each pixel of all inputs, line by line."""
    return logits.permute(0, 2, 3, 1).flatten(0, 2)


FAMILIES = (Family(("segformer",), "image", segformer, True, lambda config: Regions.of(config).sides[0]),)
