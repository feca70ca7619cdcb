"""SegFormer: transformer layers over ever coarser maps, and a head that reads the last map of each region."""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family
from isobatch.deployments.models.regions import (
    Bridge,
    MapStep,
    RegionEnd,
    Regions,
    as_map,
    pixel_anatomy,
    pixel_task,
    region_anatomy,
)


def regions_of(config: Any) -> Regions:
    sides: list[Sequence[int]] = [config.image_size]
    for patch, stride in zip(config.patch_sizes, config.strides, strict=True):
        sides.append(tuple((side + 2 * (patch // 2) - patch) // stride + 1 for side in sides[-1]))
    return Regions(config.hidden_sizes, [(height, width) for height, width in sides[1:]], config.depths, as_tokens=True)


def segformer(model: Any) -> Anatomy:
    """A layer is a block; the first one of a region includes the patches of its region, the last one its norm."""
    stages, regions = model.base_model.stages, regions_of(model.config)

    def block_of(region: int, place: int) -> MapStep:
        stage, sides = stages[region], regions.sides[region]

        def step(before: Tensor) -> Tensor:
            tokens = before if place else stage.patch_embeddings(before)[0]
            tokens = stage.blocks[place](tokens, *sides)
            return tokens if place < len(stage.blocks) - 1 else as_map(stage.layer_norm(tokens), sides)

        return step

    embed = itemgetter("pixel_values")
    if not hasattr(model, "decode_head"):
        return region_anatomy(regions, embed, block_of, lambda maps: model.classifier(maps[-1].mean(dim=(2, 3))))
    return pixel_anatomy(
        regions, embed, block_of, model.decode_head, partial(_bridge, model, regions), pixel_task(regions)
    )


def _bridge(model: Any, regions: Regions, block: int) -> nn.Module:
    config = deepcopy(model.config)
    config.depths = [1] * len(regions.depths)
    short = type(model)(config)
    short.load_state_dict(model.state_dict(), strict=False)
    region, _ = regions.places[block]
    stages = short.base_model.stages
    end = nn.Identity() if regions.is_whole(block) else RegionEnd(stages[region].layer_norm, regions.sides[region])
    return Bridge(regions, block, end, stages[region + 1 :], short.decode_head)


FAMILIES = (Family(("segformer",), "image", segformer, True, lambda config: pixel_task(regions_of(config))),)
