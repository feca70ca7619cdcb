"""The kernels of well-known networks, for tables by datasheets."""

from dataclasses import replace
from functools import partial

from isobatch.profiles.datasheet import Shape, encoder, residual


def _bert(name: str, layers: int, hidden: int, length: int = 128) -> Shape:
    return encoder(
        f"{name}, {length} tokens", layers=layers, hidden=hidden, inner=4 * hidden, length=length, vocabulary=30522
    )


bert_base = partial(_bert, "bert-base", 12, 768)
bert_large = partial(_bert, "bert-large", 24, 1024)
distilbert = partial(_bert, "distilbert", 6, 768)
resnet50 = partial(residual, "resnet-50", stages=(3, 4, 6, 3))
resnet18 = partial(residual, "resnet-18", stages=(2, 2, 2, 2), bottleneck=False)


def vit_base() -> Shape:
    """ViT-B/16 on 224 x 224: 196 patches and one class token (the patch projection counts as embedding)."""
    shape = encoder("vit-base/16", layers=12, hidden=768, inner=3072, length=197, vocabulary=768, labels=1000)
    return replace(shape, length=None)  # images have one size


# Layers and width of the encoders with published latencies.
ENCODERS = {
    "bert-base": (12, 768),
    "bert-large": (24, 1024),
    "bert-6l-768h": (6, 768),
    "bert-4l-288h": (4, 288),
    "vit-b": (12, 768),
    "vit-l": (24, 1024),
}


def published_shape(name: str, length: int | None) -> Shape:
    """A network with published latencies, at `length` tokens.

    >>> published_shape("bert-6l-768h", 384).length, published_shape("resnet50", None).family
    (384, 'residual')
    """
    if name.startswith("resnet"):
        return {"resnet50": resnet50, "resnet18": resnet18}[name]()
    layers, hidden = ENCODERS[name]
    return encoder(name, layers=layers, hidden=hidden, inner=4 * hidden, length=length or 128)
