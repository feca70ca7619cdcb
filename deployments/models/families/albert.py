"""ALBERT: one layer, or a few, run repeatedly. Each run of a layer is a block; blocks share their weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isobatch.deployments.models.anatomy import Anatomy, Family, call_transformer_layer, pool_tokens
from isobatch.deployments.models.attention import replace_attention


def dissect(model: Any) -> Anatomy:
    replace_attention(model)
    base, layers, groups = model.base_model, model.config.num_hidden_layers, model.config.num_hidden_groups
    layer_of_block = [base.encoder.albert_layer_groups[block * groups // layers] for block in range(layers)]

    def embed(arrays: Mapping[str, Tensor]) -> Tensor:
        inputs = {"token_type_ids": torch.zeros_like(arrays["input_ids"]), **arrays}
        embedded = base.embeddings(**{name: tensor.unsqueeze(0) for name, tensor in inputs.items()})
        hidden: Tensor = base.encoder.embedding_hidden_mapping_in(embedded)
        return hidden.squeeze(0)

    return Anatomy(
        embed=embed,
        blocks=[call_transformer_layer(layer) for layer in layer_of_block],
        head=lambda hidden: model.classifier(base.pooler_activation(base.pooler(hidden[:, 0]))),
        pool=pool_tokens,
        pooled_widths=[2 * model.config.hidden_size] * layers,
    )


FAMILY = Family(("albert",), "text", dissect)
