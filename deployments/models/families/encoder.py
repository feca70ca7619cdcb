"""Text encoders like BERT: token embeddings, identical layers, a head on the first token; also ALBERT, ModernBERT."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.deployments.models.anatomy import Anatomy, Family, call_transformer_layer, first_tokens, transformer
from isobatch.deployments.models.attention import replace_attention
from isobatch.deployments.models.spans import Spans
from isobatch.profiles.errors import UserError


def bert(model: Any) -> Anatomy:
    _check(model.config)
    replace_attention(model)
    base = model.base_model
    layers = base.transformer.layer if hasattr(base, "transformer") else base.encoder.layer
    project = getattr(base, "embeddings_project", nn.Identity())  # ELECTRA's embeddings may be narrower
    blocks = [call_transformer_layer(layer) for layer in layers]
    return transformer(model, embedding(base, project), blocks, _bert_head(model))


def _check(config: Any) -> None:
    """Refuse networks that would not compute what they learned: transformers itself ignores the weights of relative
    positions."""
    if getattr(config, "is_decoder", False):
        raise UserError("a network of this type whose tokens see only earlier ones (is_decoder) is not supported")
    if (kind := getattr(config, "position_embedding_type", None) or "absolute") != "absolute":
        raise UserError(f"position_embedding_type is {kind}: only absolute positions are supported")


def embedding(base: Any, project: nn.Module) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Token embeddings, with the network's own projection after them."""
    padding = getattr(base.embeddings, "padding_idx", None)  # of RoBERTa and MPNet
    has_types = hasattr(base.embeddings, "token_type_embeddings")

    def embed(arrays: Mapping[str, Tensor]) -> Tensor:
        inputs = {**arrays}
        if padding is not None:
            inputs["position_ids"] = _without_padding(inputs["input_ids"], inputs["position_ids"], padding)
        if has_types and "token_type_ids" not in inputs:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        hidden: Tensor = project(base.embeddings(**{name: tensor.unsqueeze(0) for name, tensor in inputs.items()}))
        return hidden.squeeze(0)

    return embed


def _without_padding(ids: Tensor, positions: Tensor, padding: int) -> Tensor:
    """Positions as RoBERTa counts them: they begin after the padding token's id, and leave out padding tokens, which a
    text may hold."""
    is_padding = (ids == padding).long()
    before = is_padding.cumsum(0) - is_padding  # in all texts
    places = (is_padding * 0 + 1).cumsum(0) - 1  # a running sum, as exporters freeze sizes
    return padding + (positions + 1 - before + before[places - positions]) * (1 - is_padding)


def _bert_head(model: Any) -> Callable[[Tensor], Tensor]:
    if getattr(model.base_model, "pooler", None) is not None:  # BERT
        return lambda hidden: model.classifier(model.base_model.pooler(hidden))
    if hasattr(model, "pre_classifier"):  # DistilBERT
        return lambda hidden: model.classifier(model.pre_classifier(hidden[:, 0]).relu())
    return lambda hidden: model.classifier(hidden)  # RoBERTa, ELECTRA: the head picks the first token itself


def albert(model: Any) -> Anatomy:
    """One layer, or a few, run repeatedly. Each run of a layer is a block; blocks share their weights."""
    _check(model.config)
    replace_attention(model)
    base, layers, groups = model.base_model, model.config.num_hidden_layers, model.config.num_hidden_groups
    layer_of_block = [base.encoder.albert_layer_groups[block * groups // layers] for block in range(layers)]
    return transformer(
        model,
        embedding(base, base.encoder.embedding_hidden_mapping_in),
        [call_transformer_layer(layer) for layer in layer_of_block],
        lambda hidden: model.classifier(base.pooler_activation(base.pooler(hidden[:, 0]))),
    )


def modernbert(model: Any) -> Anatomy:
    """Rotary position embeddings, and most layers attend to a window of neighbours only."""
    replace_attention(model)
    base = model.base_model

    def block(layer: Any) -> Callable[[Tensor, Spans | None], Tensor]:
        is_last = layer is base.layers[-1]

        def run(hidden: Tensor, spans: Spans | None) -> Tensor:
            assert spans, "This is a bug: texts have spans."
            row = hidden.unsqueeze(0)
            rotary = base.rotary_emb(row, spans.positions.unsqueeze(0), layer.attention_type)
            after: Tensor = layer(row, attention_mask=spans, position_embeddings=rotary).squeeze(0)
            return base.final_norm(after) if is_last else after

        return run

    return transformer(
        model,
        lambda arrays: base.embeddings(arrays["input_ids"]),
        [block(layer) for layer in base.layers],
        lambda hidden: model.classifier(model.head(hidden[:, 0])),
        _mean if model.config.classifier_pooling == "mean" else first_tokens,
    )


def _mean(hidden: Tensor, spans: Spans) -> Tensor:
    return spans.mean(hidden).unsqueeze(1)


FAMILIES = (
    Family(("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert"), "text", bert),
    Family(("albert",), "text", albert),
    Family(("modernbert",), "text", modernbert),
)
