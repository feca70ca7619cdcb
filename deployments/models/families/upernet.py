"""UperNet over ConvNeXt, ResNet or Swin: a head that reads each region's last map, of ConvNeXt and Swin a norm of it.

Swin's blocks make tokens, the others' make maps. A downsampling step belongs to the first block after it.
"""

from copy import deepcopy
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family
from isobatch.deployments.models.families.vision import residual_layers
from isobatch.deployments.models.regions import Bridge, Maps, RegionEnd, Regions, as_map, pixel_anatomy, pixel_task
from isobatch.profiles.errors import UserError

RESNET, SWIN = "resnet", "swin"
BACKBONES = ("convnext", "convnextv2", RESNET, SWIN)


def regions_of(config: Any) -> Regions:
    inner = config.backbone_config
    if inner.model_type not in BACKBONES or list(inner.out_features) != list(inner.stage_names[1:]):
        listed = f"{inner.model_type} with out_features {', '.join(inner.out_features)}"
        raise UserError(f"upernet over {listed} is not known; known are: {', '.join(BACKBONES)} with all stages")
    height, width = config.image_size
    first = (8 if inner.downsample_in_first_stage else 4) if inner.model_type == RESNET else inner.patch_size
    shrunk = list(accumulate([first, *[2] * (len(inner.depths) - 1)], lambda whole, step: whole * step))
    padded = [(-(-height // each), -(-width // each)) for each in shrunk]  # Swin and ResNet pad maps
    if inner.model_type == SWIN:
        channels = [inner.embed_dim * 2**region for region in range(len(inner.depths))]
        return Regions(channels, padded, inner.depths, as_tokens=True)
    sides = padded if inner.model_type == RESNET else [(height // each, width // each) for each in shrunk]
    return Regions(inner.hidden_sizes, sides, inner.depths)


class _Head(nn.Module):
    """The norms of the maps, and UperNet's head. Its logits are as large as the first map: nothing enlarges them."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        none = nn.ModuleDict({name: nn.Identity() for name in network.backbone.out_features})  # ResNet has none
        self.norms, self.decode = getattr(network.backbone, "hidden_states_norms", none), network.decode_head
        self._channels_last = network.config.backbone_config.model_type == SWIN

    def forward(self, maps: Maps) -> Tensor:
        logits: Tensor = self.decode([self._normed(*each) for each in zip(self.norms.values(), maps, strict=True)])
        return logits

    def _normed(self, norm: nn.Module, each: Tensor) -> Tensor:
        normed: Tensor = norm(each.movedim(1, 3)).movedim(3, 1).contiguous() if self._channels_last else norm(each)
        return normed


class _SwinBlock(nn.Module):
    """A layer of Swin. It reads and writes tokens, but maps at the beginning and the end of a region."""

    def __init__(self, stages: Any, regions: Regions, region: int, place: int) -> None:
        super().__init__()
        self.layer, self._sides = stages[region].blocks[place], regions.sides[region]
        self.smaller = stages[region - 1].downsample if region and place == 0 else None
        self._larger_sides, self._ends = regions.sides[region - 1], place == len(stages[region].blocks) - 1

    def forward(self, before: Tensor) -> Tensor:
        if self.smaller is not None:
            before = self.smaller(before.flatten(2).transpose(1, 2), self._larger_sides)
        tokens: Tensor = self.layer(before, self._sides, always_partition=True)[0]
        return as_map(tokens, self._sides) if self._ends else tokens


def _block(backbone: Any, regions: Regions, region: int, place: int) -> nn.Module:
    if regions.as_tokens:
        return _SwinBlock(backbone.swin.encoder.layers, regions, region, place)
    return residual_layers(backbone.encoder.stages[region])[place]


def upernet(model: Any) -> Anatomy:
    """A layer is a block."""
    backbone, regions = model.backbone, regions_of(model.config)

    def embed(arrays: Any) -> Tensor:
        pixels = arrays["pixel_values"]
        if regions.as_tokens:
            tokens: Tensor = backbone.swin.embeddings(pixels)[0]
            return tokens
        embedded: Tensor = (backbone.embedder if hasattr(backbone, "embedder") else backbone.embeddings)(pixels)
        return embedded

    bridge = partial(_bridge, model, regions)
    return pixel_anatomy(regions, embed, partial(_block, backbone, regions), _Head(model), bridge, pixel_task(regions))


def _bridge(model: Any, regions: Regions, block: int) -> nn.Module:
    config = deepcopy(model.config)
    config.backbone_config.depths, config.use_auxiliary_head = [1] * len(regions.depths), False
    short = type(model)(config)
    short.load_state_dict(model.state_dict(), strict=False)
    region, _ = regions.places[block]
    inside = regions.as_tokens and not regions.is_whole(block)
    end = RegionEnd(nn.Identity(), regions.sides[region]) if inside else nn.Identity()
    later = range(region + 1, len(regions.depths))
    stages = nn.ModuleList(_block(short.backbone, regions, each, 0) for each in later)
    return Bridge(regions, block, end, stages, _Head(short))


FAMILIES = (Family(("upernet",), "image", upernet, True, lambda config: pixel_task(regions_of(config))),)
