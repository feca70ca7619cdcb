"""UperNet over ConvNeXt: residual layers of convolutions, and a head that reads a norm of each region's last map."""

from copy import deepcopy
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family
from isobatch.deployments.models.regions import Bridge, Maps, MapStep, Regions, pixel_anatomy
from isobatch.profiles.errors import UserError

BACKBONES = ("convnext", "convnextv2")


def regions_of(config: Any) -> Regions:
    inner = config.backbone_config
    if inner.model_type not in BACKBONES or list(inner.out_features) != list(inner.stage_names[1:]):
        listed = f"{inner.model_type} with out_features {', '.join(inner.out_features)}"
        raise UserError(f"upernet over {listed} is not known; known are: {', '.join(BACKBONES)} with all stages")
    height, width = config.image_size
    shrunk = accumulate([inner.patch_size, *[2] * (len(inner.depths) - 1)], lambda whole, step: whole * step)
    return Regions(inner.hidden_sizes, [(height // each, width // each) for each in shrunk], inner.depths)


class _Head(nn.Module):
    """The norms of the maps, and UperNet's head. Its logits are as large as the first map: nothing enlarges them."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.norms, self.decode = network.backbone.hidden_states_norms, network.decode_head

    def forward(self, maps: Maps) -> Tensor:
        logits: Tensor = self.decode([norm(each) for norm, each in zip(self.norms.values(), maps, strict=True)])
        return logits


def upernet(model: Any) -> Anatomy:
    """A layer is a block; the first one of a region includes its downsampling."""
    stages, regions = model.backbone.encoder.stages, regions_of(model.config)

    def block_of(region: int, place: int) -> MapStep:
        stage = stages[region]

        def step(before: Tensor) -> Tensor:
            for each in (*(stage.downsampling_layer if place == 0 else ()), stage.layers[place]):
                before = each(before)
            return before

        return step

    def embed(arrays: Any) -> Tensor:
        embedded: Tensor = model.backbone.embeddings(arrays["pixel_values"])
        return embedded

    return pixel_anatomy(regions, embed, block_of, _Head(model), partial(_bridge, model, regions))


def _bridge(model: Any, regions: Regions, block: int) -> nn.Module:
    config = deepcopy(model.config)
    config.backbone_config.depths, config.use_auxiliary_head = [1] * len(regions.depths), False
    short = type(model)(config)
    short.load_state_dict(model.state_dict(), strict=False)
    region, _ = regions.places[block]
    return Bridge(regions, block, nn.Identity(), short.backbone.encoder.stages[region + 1 :], _Head(short))


FAMILIES = (Family(("upernet",), "image", upernet, True, lambda config: regions_of(config).sides[0]),)
