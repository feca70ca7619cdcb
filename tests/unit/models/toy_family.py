"""What it takes to add a family: this file. (The network itself would come from Hugging Face.)"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from isobatch.deployments.models.anatomy import Anatomy, Family


def dissect(model: Any) -> Anatomy:
    return Anatomy(
        embed=lambda arrays: arrays["pixel_values"].flatten(1),
        blocks=[lambda hidden, _, layer=layer: hidden + layer(hidden).tanh() for layer in model.layers],
        head=model.classifier,
        pool=lambda hidden, _: hidden,
        pooled_widths=[model.config.width] * len(model.layers),
    )


FAMILY = Family(("toy",), "image", dissect)


class ToyConfig(PretrainedConfig):
    model_type = "toy"
    width: int = 64
    depth: int = 4
    num_channels: int = 1


class ToyForImageClassification(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.depth))
        self.classifier = nn.Linear(config.width, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        hidden = pixel_values.flatten(1)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return ImageClassifierOutput(logits=self.classifier(hidden))


AutoConfig.register("toy", ToyConfig)
AutoModelForImageClassification.register(ToyConfig, ToyForImageClassification)
