"""BEiT: a vision transformer whose attention has a bias for the relative positions of patches.

A head that labels pixels reads the tokens after four of its layers: at each of these a region ends. Layers after the
last one are never run.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from isobatch.deployments.map_tasks import PixelClassification
from isobatch.deployments.models.anatomy import Anatomy, Family, transformer
from isobatch.deployments.models.regions import Bridge, Maps, RegionEnd, Regions, as_map, pixel_anatomy

ENLARGED = 4  # times as high and wide as the patches is the map that the head gives
TokenStep = Callable[[Tensor], Tensor]


def patches_in(config: Any) -> tuple[int, int]:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return height // config.patch_size, width // config.patch_size


def regions_of(config: Any) -> Regions:
    """The maps for the head, as one column of all tokens: the next layer also needs the token of the whole picture.

    `out_indices` count from 1, the tokens before the first layer.
    """
    (height, width), depths = patches_in(config), [last - first for first, last in pairwise((1, *config.out_indices))]
    count = len(depths)
    return Regions([config.hidden_size] * count, [(height * width + 1, 1)] * count, depths, as_tokens=True)


def task_of(config: Any) -> PixelClassification:
    height, width = patches_in(config)
    return PixelClassification((ENLARGED * height, ENLARGED * width))


class _Head(nn.Module):
    """The neck, which makes maps of four sizes, and the head after it."""

    def __init__(self, neck: nn.Module, decode: nn.Module, patches: tuple[int, int]) -> None:
        super().__init__()
        self.neck, self.decode, self._patches = neck, decode, patches

    def forward(self, maps: Maps) -> Tensor:
        of_patches = [each[:, :, 1:].reshape(*each.shape[:2], *self._patches) for each in maps]
        logits: Tensor = self.decode(self.neck(of_patches))
        return logits


class _Stage(nn.Module):
    """The first layer of a region of a bridge, from one map to the next."""

    def __init__(self, layer: nn.Module, regions: Regions, step: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self._sides, self._step = layer, regions.sides[0], step

    def forward(self, before: Tensor) -> Tensor:
        return as_map(self._step(self.layer, _tokens(before)), self._sides)


def _tokens(before: Tensor) -> Tensor:
    return before.flatten(2).transpose(1, 2) if before.ndim == 4 else before


def beit(model: Any) -> Anatomy:
    base, (height, width) = model.base_model, patches_in(model.config)
    resolution = height * model.config.patch_size, width * model.config.patch_size

    def step(layer: nn.Module, hidden: Tensor) -> Tensor:
        shared = base.shared_position_bias and base.shared_position_bias((height, width), dim_size=hidden.shape[1])
        after: Tensor = layer(hidden, shared, resolution=resolution)
        return after

    def embed(arrays: Any) -> Tensor:
        tokens: Tensor = base.embeddings(arrays["pixel_values"])
        return tokens

    if hasattr(model, "decode_head"):
        return _pixel_anatomy(model, embed, step)
    blocks = [lambda hidden, _, layer=layer: step(layer, hidden) for layer in base.layers]
    return transformer(model, embed, blocks, lambda hidden: model.classifier(base.pooler(base.layernorm(hidden))))


def _pixel_anatomy(model: Any, embed: Any, step: Callable[[nn.Module, Tensor], Tensor]) -> Anatomy:
    regions, layers, config = regions_of(model.config), model.base_model.layers, model.config
    firsts = [block for block, (_, place) in enumerate(regions.places) if place == 0]

    def block_of(region: int, place: int) -> TokenStep:
        layer, ends = layers[firsts[region] + place], place + 1 == regions.depths[region]

        def run(before: Tensor) -> Tensor:
            tokens = step(layer, _tokens(before))
            return as_map(tokens, regions.sides[region]) if ends else tokens

        return run

    def copied(module: nn.Module) -> nn.Module:
        copy = type(module)(config)
        copy.load_state_dict(module.state_dict())
        return copy

    def bridge(block: int) -> nn.Module:
        region, _ = regions.places[block]
        end = nn.Identity() if regions.is_whole(block) else RegionEnd(nn.Identity(), regions.sides[region])
        stages = nn.ModuleList(_Stage(copied(layers[first]), regions, step) for first in firsts[region + 1 :])
        return Bridge(regions, block, end, stages, _Head(copied(model.fpn), copied(model.decode_head), patches))

    patches = patches_in(config)
    return pixel_anatomy(
        regions, embed, block_of, _Head(model.fpn, model.decode_head, patches), bridge, task_of(config)
    )


FAMILIES = (Family(("beit",), "image", beit, map_task=task_of),)
