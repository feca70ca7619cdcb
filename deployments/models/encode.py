"""From what a user sends to what a network reads. On the host, in numpy, with the checkpoint's own preprocessor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from profiles.errors import UserError


@dataclass(frozen=True)
class Encoded:
    arrays: Mapping[str, NDArray[Any]]
    lengths: NDArray[np.int64] | None


class Encoder(Protocol):
    def __call__(self, inputs: Sequence[Any]) -> Encoded: ...


@dataclass(frozen=True)
class TextEncoder:
    """Texts, or pairs of texts, padded on the right to the longest."""

    tokenizer: Any
    longest: int

    def __call__(self, inputs: Sequence[Any]) -> Encoded:
        first, second = zip(*(_text_pair(value) for value in inputs), strict=True)
        tokens = self.tokenizer(
            list(first),
            None if second[0] is None else list(second),
            padding=True,
            truncation=True,
            max_length=self.longest,
            return_tensors="np",
        )
        lengths = tokens["attention_mask"].sum(axis=1).astype(np.int64)
        return Encoded({name: array for name, array in tokens.items() if name != "attention_mask"}, lengths)


@dataclass(frozen=True)
class ImageEncoder:
    """Images as arrays or nested lists, height x width or height x width x channels, in the preprocessor's range."""

    processor: Any
    channels: int
    size: tuple[int, int] | None = None  # the height and width that the network was built for, if it is for one only

    def __call__(self, inputs: Sequence[Any]) -> Encoded:
        images = [self._image(value) for value in inputs]
        # One by one: images of different sizes are no list until each has the network's.
        arrays = [
            self.processor(images=image, return_tensors="np", input_data_format="channels_last")["pixel_values"]
            for image in images
        ]
        self._check_sizes([array.shape[-2:] for array in arrays])
        return Encoded({"pixel_values": np.concatenate(arrays).astype(np.float32, copy=False)}, None)

    def _check_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        wanted = self.size or sizes[0]
        for position, size in enumerate(sizes):
            if size != wanted:
                raise UserError(f"image {position} is {size[0]} x {size[1]}, it must be {wanted[0]} x {wanted[1]}")

    def _image(self, value: Any) -> NDArray[np.float32]:
        try:
            image = np.asarray(value, np.float32)
        except (TypeError, ValueError) as error:
            raise UserError(f"an image must be an array of numbers: {error}") from error
        if image.ndim == 2:
            image = image[:, :, None].repeat(self.channels, axis=2)
        if image.ndim != 3 or image.shape[2] != self.channels:
            raise UserError(f"an image must be height x width or height x width x {self.channels}, got {image.shape}")
        if not np.isfinite(image).all():
            raise UserError("an image must hold finite numbers only")
        return image


def _text_pair(value: Any) -> tuple[str, str | None]:
    match value:
        case str():
            return value, None
        case [str() as first, str() as second]:
            return first, second
    raise UserError(f"a text input must be a string or a pair of strings, got {type(value).__name__}")
