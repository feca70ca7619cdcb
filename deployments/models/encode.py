"""From what a user sends to what a network reads. On the host, in numpy, with the checkpoint's own preprocessor."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from profiles.errors import UserError
from profiles.model import Words

MOST_PIXELS = 2**23  # of one image: preprocessors take many times its memory
ASKED = "asked"  # the name of an array that says which tokens are answered
CHARACTERS_A_TOKEN = 64  # of a text, so many are looked at for each token that the network reads at most


@dataclass(frozen=True)
class Encoded:
    arrays: Mapping[str, NDArray[Any]]
    lengths: NDArray[np.int64] | None
    truncated: frozenset[int] = frozenset()  # positions of texts of which the end is missing
    words: tuple[Words, ...] | None = None  # of texts whose words are answered


class Encoder(Protocol):
    """The checkpoint's preprocessor."""

    @property
    def longest(self) -> int | None:
        """The most tokens that the network reads of a text; None: it reads images."""
        ...

    def __call__(self, inputs: Sequence[Any]) -> Encoded: ...


@dataclass(frozen=True)
class TextEncoder:
    """Texts, or pairs of texts, one token after another.

    `types`: the network tells the texts of a pair apart by the types of their tokens. Others may have a tokenizer that
    gives types all the same, as DistilBERT with that of BERT, and do not take them.
    """

    tokenizer: Any
    longest: int
    types: bool = True

    def __call__(self, inputs: Sequence[Any]) -> Encoded:
        return self.encoded(self.tokens(inputs), inputs)

    def tokens(self, inputs: Sequence[Any]) -> Any:
        first, second = zip(*(self._text_pair(value) for value in inputs), strict=True)
        if len({text is None for text in second}) > 1:
            raise UserError("single texts and pairs of texts cannot stand in one request")
        return self.tokenizer(
            list(first),
            None if second[0] is None else list(second),
            truncation=True,
            max_length=self.longest,
            return_attention_mask=False,
            **({} if self.types else {"return_token_type_ids": False}),
        )

    def encoded(self, tokens: Any, inputs: Sequence[Any]) -> Encoded:
        arrays = {name: np.fromiter(chain.from_iterable(rows), np.int64) for name, rows in tokens.items()}
        lengths = np.fromiter(map(len, tokens["input_ids"]), np.int64)
        if not lengths.all():  # the tokenizer puts nothing around a text
            raise UserError(f"text {int(lengths.argmin())} is empty: this network's tokenizer makes no token of it")
        return Encoded(arrays, lengths, self._truncated(inputs, lengths))

    def _truncated(self, inputs: Sequence[Any], lengths: NDArray[np.int64]) -> frozenset[int]:
        """Only a text that fills the network, or that is cut off before it is read, is looked at again."""
        most = CHARACTERS_A_TOKEN * self.longest
        full = {int(position) for position in np.flatnonzero(lengths >= self.longest)}
        cut = {position for position, value in enumerate(inputs) if _characters(value) > most}
        return frozenset(cut | {position for position in full - cut if self._overflows(inputs[position])})

    def _overflows(self, value: Any) -> bool:
        first, second = self._text_pair(value)
        tokens = self.tokenizer([first], None if second is None else [second], verbose=False)
        return len(tokens["input_ids"][0]) > self.longest

    def _text_pair(self, value: Any) -> tuple[str, str | None]:
        """What lies beyond the last token that is read is cut off before it costs anything, not after."""
        most = CHARACTERS_A_TOKEN * self.longest
        match value:
            case str():
                return value[:most], None
            case [str() as first, str() as second]:
                return first[:most], second[:most]
        raise UserError(f"a text input must be a string or a pair of strings, got {type(value).__name__}")


@dataclass(frozen=True)
class WordEncoder:
    """Texts whose words are answered, each at the first of its tokens. `texts` must know where tokens come from.

    A text is cut into words as its tokenizer does it, unless it comes as a list of words: then they are joined by
    blanks, and a word is all that stands between two of these.
    """

    texts: TextEncoder

    @property
    def longest(self) -> int:
        return self.texts.longest

    def __call__(self, inputs: Sequence[Any]) -> Encoded:
        joined = [_joined(value) for value in inputs]
        tokens = self.texts.tokens(joined)
        asked, words = [], []
        for value, text, each in zip(inputs, joined, tokens.encodings, strict=True):
            places = list(_trimmed(text, each.offsets))
            whose = each.word_ids if isinstance(value, str) else _given(value, places, each.word_ids)
            firsts = _firsts(whose, places)
            asked.append(np.isin(np.arange(len(places)), list(firsts.values())))
            ends = {word: end for word, (_, end) in zip(whose, places, strict=True) if word is not None}
            begins = tuple(places[at][0] for at in firsts.values())
            words.append(Words(text, begins, tuple(ends[word] for word in firsts), tuple(firsts)))
        encoded = self.texts.encoded(tokens, joined)
        return replace(encoded, arrays={**encoded.arrays, ASKED: np.concatenate(asked)}, words=tuple(words))


def _joined(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not (isinstance(value, list | tuple) and value and all(isinstance(word, str) and word for word in value)):
        there = "an empty word" if isinstance(value, list | tuple) and "" in value else type(value).__name__
        raise UserError(f"an input must be a text or a list of words, got {there}")
    return " ".join(value)


def _trimmed(text: str, offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where tokens stand, without the blanks before them that some tokenizers count to them."""
    for start, end in offsets:
        while start < end and text[start].isspace():
            start += 1
        yield start, end


def _given(words: Sequence[str], places: Sequence[tuple[int, int]], own: Sequence[int | None]) -> list[int | None]:
    """The number of the given word that each token belongs to; None: it surrounds the text."""
    begins = np.cumsum([0, *(len(word) + 1 for word in words)])
    return [
        None if word is None else int(np.searchsorted(begins, start, side="right")) - 1
        for word, (start, _) in zip(own, places, strict=True)
    ]


def _firsts(whose: Sequence[int | None], places: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The first token of each word, of those that stand for something."""
    firsts: dict[int, int] = {}
    for at, (word, (start, end)) in enumerate(zip(whose, places, strict=True)):
        if word is not None and start < end:
            firsts.setdefault(word, at)
    return firsts


def _characters(text: str | Sequence[str]) -> int:
    """Of a text, or of the longer text of a pair."""
    return len(text) if isinstance(text, str) else max(map(len, text))


@dataclass(frozen=True)
class ImageEncoder:
    """Images as arrays or nested lists, height x width or height x width x channels, in the preprocessor's range."""

    processor: Any
    channels: int
    size: tuple[int, int] | None = None  # the height and width that the network was built for, if it is for one only
    longest: None = None

    def __call__(self, inputs: Sequence[Any]) -> Encoded:
        images = [self._image(position, value) for position, value in enumerate(inputs)]
        # One by one: images of different sizes are no list until each has the network's.
        arrays = [self._processed(position, image) for position, image in enumerate(images)]
        self._check_sizes([array.shape[-2:] for array in arrays])
        for position, array in enumerate(arrays):
            if not np.isfinite(array).all():
                raise UserError(f"image {position} holds numbers that are too large for the preprocessor")
        return Encoded({"pixel_values": np.concatenate(arrays).astype(np.float32, copy=False)}, None)

    def _processed(self, position: int, image: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            made = self.processor(images=image, return_tensors="np", input_data_format="channels_last")
        except ValueError as error:  # such as of a range that it cannot resize
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"image {position} cannot be read by the network's preprocessor: {reason}") from error
        pixels: NDArray[np.float32] = made["pixel_values"]
        return pixels

    def _check_sizes(self, sizes: Sequence[tuple[int, int]]) -> None:
        wanted = self.size or sizes[0]
        for position, size in enumerate(sizes):
            if size != wanted:
                raise UserError(f"image {position} is {size[0]} x {size[1]}, it must be {wanted[0]} x {wanted[1]}")

    def _image(self, position: int, value: Any) -> NDArray[np.float32]:
        self._check_pixels(position, _first_sizes(value))  # first, as millions of empty rows would take numpy seconds
        try:
            with np.errstate(over="ignore"):  # what is too large is found below
                image = np.asarray(value, np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"an image must be an array of numbers: {error}") from error
        if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != self.channels):
            raise UserError(f"an image must be height x width or height x width x {self.channels}, got {image.shape}")
        self._check_pixels(position, image.shape)
        if not np.isfinite(image).all():
            raise UserError("an image must hold finite numbers only")
        return image[:, :, None].repeat(self.channels, axis=2) if image.ndim == 2 else image

    def _check_pixels(self, position: int, sizes: Sequence[int]) -> None:
        if len(sizes) > 1 and not 0 < sizes[0] * sizes[1] <= MOST_PIXELS:
            raise UserError(f"image {position} is {sizes[0]} x {sizes[1]}: 1 to {MOST_PIXELS} pixels are allowed")


def _first_sizes(value: Any) -> Sequence[int]:
    """Height and width of nested lists, as far as their first row tells.

    >>> _first_sizes([[1, 2, 3], [4, 5, 6]]), _first_sizes([[], []]), _first_sizes("text")
    ((2, 3), (2, 0), ())
    """
    if not isinstance(value, list) or not value or not isinstance(value[0], list):
        return ()
    return len(value), len(value[0])
