"""Text encoders like BERT: token embeddings, identical layers, a head on the first token."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family, call_transformer_layer, pool_tokens
from isobatch.deployments.models.attention import replace_attention


def dissect(model: Any) -> Anatomy:
    replace_attention(model)
    base = model.base_model
    layers = base.transformer.layer if hasattr(base, "transformer") else base.encoder.layer
    return Anatomy(
        embed=embedding(base),
        blocks=[call_transformer_layer(layer) for layer in layers],
        head=_head(model),
        pool=pool_tokens,
        pooled_widths=[2 * model.config.hidden_size] * len(layers),
    )


def embedding(base: Any) -> Callable[[Mapping[str, Tensor]], Tensor]:
    project = getattr(base, "embeddings_project", nn.Identity())  # ELECTRA's embeddings may be narrower
    first = getattr(base.embeddings, "padding_idx", -1) + 1  # RoBERTa's positions begin behind the padding token's id
    has_types = hasattr(base.embeddings, "token_type_embeddings")

    def embed(arrays: Mapping[str, Tensor]) -> Tensor:
        inputs = {**arrays, "position_ids": arrays["position_ids"] + first}
        if has_types and "token_type_ids" not in inputs:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        hidden: Tensor = project(base.embeddings(**{name: tensor.unsqueeze(0) for name, tensor in inputs.items()}))
        return hidden.squeeze(0)

    return embed


def _head(model: Any) -> Callable[[Tensor], Tensor]:
    if getattr(model.base_model, "pooler", None) is not None:  # BERT
        return lambda hidden: model.classifier(model.base_model.pooler(hidden))
    if hasattr(model, "pre_classifier"):  # DistilBERT
        return lambda hidden: model.classifier(model.pre_classifier(hidden[:, 0]).relu())
    return lambda hidden: model.classifier(hidden)  # RoBERTa, ELECTRA: the head picks the first token itself


FAMILY = Family(("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert"), "text", dissect)
