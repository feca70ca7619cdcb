"""Networks whose head reads the maps of several regions: the values that their blocks pass on, and bridges to a head.

A region is a stage: neighbouring blocks whose maps have one size. Blocks pass on the last map of each region so far, in
one row per input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from isobatch.deployments.map_tasks import PixelClassification
from isobatch.deployments.models.anatomy import Anatomy
from isobatch.deployments.models.spans import Spans

Maps = Sequence[Tensor]
MapStep = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Regions:
    """The maps of all regions: their channels, their heights and widths, and the number of blocks of each region.

    `as_tokens`: until its region ends, a map is a row of tokens.
    """

    channels: Sequence[int]
    sides: Sequence[tuple[int, int]]
    depths: Sequence[int]
    as_tokens: bool = False

    @property
    def places(self) -> list[tuple[int, int]]:
        """The region of each block, and the block's place in it.

        >>> Regions((8, 16), ((4, 4), (2, 2)), (2, 1)).places
        [(0, 0), (0, 1), (1, 0)]
        """
        return [(region, place) for region, depth in enumerate(self.depths) for place in range(depth)]

    def is_whole(self, block: int) -> bool:
        """Whether a block is the last one of its region."""
        return block + 1 in accumulate(self.depths)

    def sizes(self, block: int) -> list[int]:
        """The numbers in each map after a block."""
        region, _ = self.places[block]
        return [self.channels[each] * self.sides[each][0] * self.sides[each][1] for each in range(region + 1)]

    def unpacked(self, rows: Tensor, block: int) -> list[Tensor]:
        """The maps after a block, from one row per input."""
        parts = torch.split(rows, self.sizes(block), dim=1)
        shapes = [(self.channels[each], *self.sides[each]) for each in range(len(parts))]
        maps = [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
        if self.as_tokens and not self.is_whole(block):
            channels, height, width = shapes[-1]
            maps[-1] = parts[-1].reshape(-1, height * width, channels)
        return maps


def pixel_task(regions: Regions) -> PixelClassification:
    """Of a head that gives a map as large as that of the first region."""
    return PixelClassification(regions.sides[0])


def packed(maps: Maps) -> Tensor:
    """One row per input."""
    return torch.cat([each.flatten(1) for each in maps], dim=1)


def as_map(tokens: Tensor, sides: tuple[int, int]) -> Tensor:
    return tokens.reshape(-1, *sides, tokens.shape[2]).permute(0, 3, 1, 2).contiguous()


def by_pixel(logits: Tensor) -> Tensor:
    """A row of logits for each pixel of all inputs, line by line."""
    return logits.permute(0, 2, 3, 1).flatten(0, 2)


class RegionEnd(nn.Module):
    """The end of a region of tokens: its norm, and the tokens as a map."""

    def __init__(self, norm: nn.Module, sides: tuple[int, int]) -> None:
        super().__init__()
        self.norm, self._sides = norm, sides

    def forward(self, tokens: Tensor) -> Tensor:
        return as_map(self.norm(tokens), self._sides)


class Bridge(nn.Module):
    """What stands between a block and a head of its own: the end of the block's region, and a stage of one block for
    each later region."""

    def __init__(self, regions: Regions, block: int, end: nn.Module, stages: nn.ModuleList, head: nn.Module) -> None:
        super().__init__()
        self._regions, self._block = regions, block
        self.end, self.stages, self.head = end, stages, head

    def forward(self, pooled: Tensor) -> Tensor:
        *maps, last = self._regions.unpacked(pooled, self._block)
        maps.append(self.end(last))
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return by_pixel(self.head(maps))


def region_anatomy(
    regions: Regions,
    embed: Callable[[Mapping[str, Tensor]], Tensor],
    block_of: Callable[[int, int], MapStep],
    head: Callable[[Maps], Tensor],
) -> Anatomy:
    """The anatomy of a network with one label for each input. `block_of(region, place)` makes the next map."""

    def block(region: int, place: int) -> Callable[[Maps, Spans | None], Maps]:
        step = block_of(region, place)

        def run(maps: Maps, _: Spans | None) -> Maps:
            # The first block of a region reads the last map of the region before, and that stays.
            return *(maps if place == 0 and region else maps[:-1]), step(maps[-1])

        return run

    def mean(maps: Maps, _: Spans | None) -> Tensor:
        last = maps[-1].float()
        return last.mean(dim=1) if last.ndim == 3 else last.mean(dim=(2, 3))

    return Anatomy(
        embed=lambda arrays: [embed(arrays)],
        blocks=[block(*place) for place in regions.places],
        head=head,
        pool=mean,
        pooled_widths=[regions.channels[region] for region, _ in regions.places],
        unpacked=lambda rows, block: regions.unpacked(rows, block - 1),
        packed=packed,
    )


def pixel_anatomy(
    regions: Regions,
    embed: Callable[[Mapping[str, Tensor]], Tensor],
    block_of: Callable[[int, int], MapStep],
    head: Callable[[Maps], Tensor],
    bridge: Callable[[int], nn.Module],
    task: PixelClassification,
) -> Anatomy:
    """The same with a label for each pixel: `head` gives inputs x labels x height x width."""
    return replace(
        region_anatomy(regions, embed, block_of, lambda maps: by_pixel(head(maps))),
        pool=lambda maps, _: packed(maps).float(),
        pooled_widths=[sum(regions.sizes(block)) for block in range(len(regions.places))],
        task=task,
        bridge=bridge,
    )
