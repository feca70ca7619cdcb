"""Encodes a user's inputs for a network: on the host, in numpy, with the checkpoint's own preprocessor."""

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from types import NoneType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.points import box_of
from isobatch.profiles.errors import UserError, WrongInputError
from isobatch.profiles.model import Sides, Words

MAX_PIXELS = 2**23  # largest number of pixels of one image: preprocessors take many times the memory of the image
MOST_TOGETHER = 2**26  # pixels of the pictures of one request, which hold a thread of the front for seconds
PICTURES = ("JPEG", "PNG", "WEBP")  # the formats of images that are given as bytes
MOST_SCANS = 100  # of a JPEG; encoders write about ten
_JPEG, _SCAN, _END = b"\xff\xd8", b"\xda", b"\xd9"
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # of a part of a JPEG that states its length, or of its end
# The name of an array that says which tokens are answered. The value crosses process boundaries in batches.
ANSWERED_TOKENS = "asked"
# Characters of a text that are tokenized, per token that the network reads: words of natural texts are shorter.
CHARACTERS_PER_TOKEN = 64
HALF = "\\ud800"  # of a surrogate pair, as JSON writes it


@dataclass(frozen=True)
class Encoded:
    arrays: Mapping[str, NDArray[Any]]
    lengths: NDArray[np.int64] | None
    truncated: frozenset[int] = frozenset()  # positions of texts of which only a part is read
    words: tuple[Words | Sides, ...] | None = None  # of each text if words are answered; of pictures for points


class Encoder(Protocol):
    """The checkpoint's preprocessor."""

    @property
    def longest(self) -> int | None:
        """The largest number of tokens in a text; None for a network that reads images."""

    def __call__(self, inputs: Sequence[Any]) -> Encoded: ...


@dataclass(frozen=True)
class TextEncoder:
    """Texts, or pairs of texts, one token after another.

    `types`: the network takes token types, which tell the texts of a pair apart. Some networks take none although their
    tokenizer gives types, such as DistilBERT with BERT's tokenizer. `unread`: the token that a head
    which reads the last one skips at the end of a text; None: there is none.
    """

    tokenizer: Any
    longest: int
    types: bool = True
    unread: int | None = None

    def __call__(self, inputs: Sequence[Any]) -> Encoded:
        return self.encoded(self.tokens(inputs), inputs)

    def tokens(self, inputs: Sequence[Any]) -> Any:
        first, second = zip(*(self._text_pair(place, value) for place, value in enumerate(inputs)), strict=True)
        other = next((place for place, text in enumerate(second) if (text is None) != (second[0] is None)), None)
        if other is not None:
            raise UserError(f"text {other}: single texts and pairs of texts cannot stand in one request")
        try:
            return self.tokenizer(
                list(first),
                None if second[0] is None else list(second),
                truncation=True,
                max_length=self.longest,
                return_attention_mask=False,
                **({} if self.types else {"return_token_type_ids": False}),
            )
        except TypeError as error:  # what the tokenizer says of such a text
            raise UserError(
                f"a text has half of a character, such as {HALF}: was it cut in the middle of one?"
            ) from error

    def encoded(self, tokens: Any, inputs: Sequence[Any]) -> Encoded:
        arrays = {name: np.fromiter(chain.from_iterable(rows), np.int64) for name, rows in tokens.items()}
        lengths = np.fromiter(map(len, tokens["input_ids"]), np.int64)
        if not lengths.all():  # possible if the tokenizer adds no special tokens
            empty, problem = int(lengths.argmin()), "is empty: this network's tokenizer makes no token of it"
            raise WrongInputError(f"text {empty} {problem}", inputs[empty], problem)
        truncated = self._truncated(inputs, lengths)
        if self.unread is not None:
            kept, lengths = _up_to_last_read(arrays["input_ids"] != self.unread, lengths)
            arrays = {name: array[kept] for name, array in arrays.items()}
        return Encoded(arrays, lengths, truncated)

    def _truncated(self, inputs: Sequence[Any], lengths: NDArray[np.int64]) -> frozenset[int]:
        """Positions of truncated texts. Only texts with the largest number of tokens are tokenized a second time."""
        most = CHARACTERS_PER_TOKEN * self.longest
        full = {int(position) for position in np.flatnonzero(lengths >= self.longest)}
        texts = ([value] if isinstance(value, str) else value for value in inputs)
        cut = {position for position, parts in enumerate(texts) if max(map(len, parts)) > most}
        return frozenset(cut | {position for position in full - cut if self._overflows(position, inputs[position])})

    def _overflows(self, place: int, value: Any) -> bool:
        first, second = self._text_pair(place, value)
        tokens = self.tokenizer([first], None if second is None else [second], verbose=False)
        return len(tokens["input_ids"][0]) > self.longest

    def _text_pair(self, place: int, value: Any) -> tuple[str, str | None]:
        match value:
            case str():
                return self._cut(value), None
            case [str() as first, str() as second]:
                return self._cut(first), self._cut(second)
        problem = f"must be a text or a pair of texts, got {_kind_of(value)}"
        raise WrongInputError(f"text {place} {problem}", value, problem)

    def _cut(self, text: str) -> str:
        """The part of a text that is tokenized, so that a huge text costs no more than the longest that is read."""
        skipped = self.skipped(text)
        return text[skipped : skipped + CHARACTERS_PER_TOKEN * self.longest]

    def skipped(self, text: str) -> int:
        """The number of characters before that part: of a network that reads the end of long texts."""
        beyond = max(0, len(text) - CHARACTERS_PER_TOKEN * self.longest)
        return beyond if self.tokenizer.truncation_side == "left" else 0


def _up_to_last_read(
    is_read: NDArray[np.bool_], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which tokens stand before the last one that is read or are it, and how many of each text; at least its first.

    >>> kept, lengths = _up_to_last_read(np.array([True, False, True, False, False]), np.array([4, 1]))
    >>> kept.tolist(), lengths.tolist()
    ([True, True, True, False, True], [3, 1])
    """
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(is_read)) - np.repeat(starts, lengths)
    last = np.maximum.reduceat(np.where(is_read, places, 0), starts)
    return places <= np.repeat(last, lengths), last + 1


@dataclass(frozen=True)
class WordEncoder:
    """Texts whose words are answered, each word at its first token. The tokenizer of `texts` must give offsets.

    The tokenizer splits a text into words. An input may also be a list of words: they are joined by blanks, and the
    words of the list are answered.
    """

    texts: TextEncoder

    @property
    def longest(self) -> int:
        return self.texts.longest

    def __call__(self, inputs: Sequence[Any]) -> Encoded:
        joined = [_as_text(place, value) for place, value in enumerate(inputs)]
        tokens = self.texts.tokens(joined)
        answered, words = [], []
        for value, text, encoding in zip(inputs, joined, tokens.encodings, strict=True):
            offsets = list(_trimmed(text, encoding.offsets, self.texts.skipped(text)))
            word_ids = encoding.word_ids
            word_of_token = word_ids if isinstance(value, str) else _word_numbers(value, offsets, word_ids)
            firsts = _first_tokens(word_of_token, offsets)
            answered.append(np.isin(np.arange(len(offsets)), list(firsts.values())))
            ends = {word: end for word, (_, end) in zip(word_of_token, offsets, strict=True) if word is not None}
            begins = tuple(offsets[token][0] for token in firsts.values())
            words.append(Words(text, begins, tuple(ends[word] for word in firsts), tuple(firsts)))
        encoded = self.texts.encoded(tokens, joined)
        arrays = {**encoded.arrays, ANSWERED_TOKENS: np.concatenate(answered)}
        return replace(encoded, arrays=arrays, words=tuple(words))


def texts_of(encoder: object) -> TextEncoder | None:
    """The part of an encoder that has the tokenizer; None: it reads images, or is of another make."""
    texts = encoder.texts if isinstance(encoder, WordEncoder) else encoder
    return texts if isinstance(texts, TextEncoder) else None


def _as_text(place: int, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not (isinstance(value, list | tuple) and value and all(isinstance(word, str) and word for word in value)):
        got = "an empty word" if isinstance(value, list | tuple) and "" in value else _kind_of(value)
        problem = f"must be a text or a list of words, got {got}"
        raise WrongInputError(f"text {place} {problem}", value, problem)
    return " ".join(value)


def _kind_of(value: object) -> str:
    """What stands in place of a text, in JSON's words.

    >>> _kind_of(b"\\xff"), _kind_of(["a"] * 3), _kind_of(None), _kind_of(True), _kind_of(1.5)
    ('a file', 'a list of 3', 'null', 'true or false', 'a number')
    """
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    kinds = {bytes: "a file", dict: "an object", NoneType: "null", bool: "true or false"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _trimmed(text: str, offsets: Sequence[tuple[int, int]], skipped: int) -> Iterator[tuple[int, int]]:
    """The places of tokens in the whole text, without leading blanks, which some tokenizers include."""
    for start, end in offsets:
        at, stop = start + skipped, end + skipped
        while at < stop and text[at].isspace():
            at += 1
        yield at, stop


def _word_numbers(
    words: Sequence[str], offsets: Sequence[tuple[int, int]], word_ids: Sequence[int | None]
) -> list[int | None]:
    """The number of each token's word in the list of words; None for a special token."""
    begins = np.cumsum([0, *(len(word) + 1 for word in words)])
    return [
        None if word is None else int(np.searchsorted(begins, start, side="right")) - 1
        for word, (start, _) in zip(word_ids, offsets, strict=True)
    ]


def _first_tokens(word_of_token: Sequence[int | None], offsets: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The first token of each word. Tokens without any character do not count."""
    firsts: dict[int, int] = {}
    for token, (word, (start, end)) in enumerate(zip(word_of_token, offsets, strict=True)):
        if word is not None and start < end:
            firsts.setdefault(word, token)
    return firsts


@dataclass(frozen=True)
class ImageEncoder:
    """Images as arrays or nested lists, height x width or height x width x channels, in the preprocessor's range; or
    pictures as bytes or base64, which have values from 0 to 255."""

    processor: Any
    channels: int
    size: tuple[int, int] | None = None  # height and width of all images; None: the network takes any size
    boxed: bool = False  # the preprocessor takes boxes, as of networks that find points: each whole picture is one
    longest: None = None

    def __call__(self, inputs: Sequence[Any]) -> Encoded:
        arrays, sides = list[NDArray[np.float32]](), list[Sides]()
        # One by one, as images may have different sizes until the preprocessor resizes them, and as a picture of a few
        # bytes may hold millions of pixels.
        wanted = self.size
        for place, value in enumerate(inputs):
            try:
                image = self._image(value)
                array = self._processed(image)
                wanted = wanted or (array.shape[-2], array.shape[-1])
                _check_processed(array, wanted)
            except UserError as error:
                raise WrongInputError(f"image {place} {error}", value, str(error)) from error
            arrays.append(array)
            sides.append(_sides_of(image))
        words = tuple(sides) if self.boxed else None
        return Encoded({"pixel_values": np.concatenate(arrays).astype(np.float32, copy=False)}, None, words=words)

    def _processed(self, image: NDArray[np.float32]) -> NDArray[np.float32]:
        boxes = {"boxes": [[box_of(_sides_of(image))]]} if self.boxed else {}
        pixels = _as_bytes(image) if self.boxed else image  # then it rounds while it resizes, as for transformers
        try:
            processed = self.processor(images=pixels, return_tensors="np", input_data_format="channels_last", **boxes)
        except ValueError as error:  # for example values in a range that it cannot resize
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"cannot be read by the network's preprocessor: {reason}") from error
        arrays: NDArray[np.float32] = processed["pixel_values"]
        return arrays

    def _image(self, value: Any) -> NDArray[np.float32]:
        if isinstance(value, bytes | str):
            return self._picture(value)
        # Before numpy reads the image, as millions of empty rows take seconds.
        _check_pixels(_first_sizes(value))
        try:
            with np.errstate(over="ignore"):  # numbers that are too large are refused below
                image = np.asarray(value, np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"must be an array of numbers: {error}") from error
        if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != self.channels):
            raise UserError(f"must be height x width or height x width x {self.channels}, got {image.shape}")
        _check_pixels(image.shape)
        if not np.isfinite(image).all():
            raise UserError("must hold finite numbers only")
        return image[:, :, None].repeat(self.channels, axis=2) if image.ndim == 2 else image

    def _picture(self, value: bytes | str) -> NDArray[np.float32]:
        """Decode a JPEG, PNG or WebP. Its size is checked before its pixels take any memory."""
        from PIL import Image

        try:
            with Image.open(BytesIO(content := _bytes_of(value)), formats=PICTURES) as picture:
                _check_pixels((picture.height, picture.width))
                _check_scans(content)
                pixels = pixels_of(picture, "L" if self.channels == 1 else "RGB").astype(np.float32)
        except UserError:
            raise
        except Image.DecompressionBombError as error:
            raise UserError(f"is too large: 1 to {MAX_PIXELS} pixels are allowed") from error
        except (OSError, SyntaxError, ValueError) as error:  # damaged, or another format
            named = "bytes" if isinstance(value, bytes) else "a text (base64)"
            raise UserError(f"is given as {named}, but is not a complete {', '.join(PICTURES)}") from error
        return pixels.reshape(*pixels.shape[:2], self.channels)


def pixels_of(picture: Any, mode: str) -> NDArray[np.uint8]:
    """The pixels of an open picture in this mode of Pillow's, upright."""
    from PIL import Image, ImageOps

    picture.load()
    with suppress(Exception):  # a picture whose EXIF data are damaged stays as it is
        ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode.startswith("I;16"):  # 16 bits of grey, of which Pillow would make all above 255 white
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    return np.asarray(picture.convert(mode))


def check_together(inputs: Sequence[Any]) -> None:
    """Refuse pictures that have too many pixels together, before any of them is decoded."""
    if len(inputs) * MAX_PIXELS <= MOST_TOGETHER:
        return
    if (pixels := sum(_count_of(value) for value in inputs if is_picture(value))) > MOST_TOGETHER:
        raise UserError(f"the pictures have {pixels} pixels together: {MOST_TOGETHER} are allowed")


def _count_of(value: bytes | str) -> int:
    """The number of pixels of a picture; 0 for one that cannot be read, which is refused later."""
    from PIL import Image

    with (
        suppress(OSError, SyntaxError, ValueError, Image.DecompressionBombError),
        Image.open(BytesIO(_bytes_of(value)), formats=PICTURES) as picture,
    ):
        return int(picture.width * picture.height)
    return 0


def _check_pixels(sizes: Sequence[int]) -> None:
    if len(sizes) > 1 and not 0 < sizes[0] * sizes[1] <= MAX_PIXELS:
        raise UserError(f"is {sizes[0]} x {sizes[1]}: 1 to {MAX_PIXELS} pixels are allowed")


def _check_scans(content: bytes) -> None:
    """Refuse a JPEG of very many scans: a scan of 20 bytes makes the decoder go through all pixels once more."""
    at, scans = len(_JPEG), 0
    while content.startswith(_JPEG) and (marker := _MARKER.search(content, at)) and marker[1] != _END:
        at = marker.end() + int.from_bytes(content[marker.end() : marker.end() + 2], "big")
        scans += marker[1] == _SCAN
        if scans > MOST_SCANS:
            raise UserError(f"has more than {MOST_SCANS} scans")


def _check_processed(array: NDArray[np.float32], wanted: tuple[int, int]) -> None:
    if (sizes := array.shape[-2:]) != wanted:
        raise UserError(f"is {sizes[0]} x {sizes[1]}, it must be {wanted[0]} x {wanted[1]}")
    if not np.isfinite(array).all():
        raise UserError("holds numbers that are too large for the preprocessor")


def _as_bytes(image: NDArray[np.float32]) -> NDArray[Any]:
    """An image of whole numbers from 0 to 255 as bytes; any other one as it is."""
    with np.errstate(invalid="ignore"):
        as_bytes = image.astype(np.uint8)
    return as_bytes if (as_bytes == image).all() else image


def _sides_of(image: NDArray[np.float32]) -> Sides:
    return Sides(*image.shape[:2])


def _bytes_of(value: bytes | str) -> bytes:
    """The bytes of a picture; a text is base64, and may be a data URL, or in lines.

    >>> _bytes_of("data:image/png;base64,YWI="), _bytes_of("YW\\nI=\\n")
    (b'ab', b'ab')
    """
    if isinstance(value, bytes):
        return value
    text = value.partition(",")[2] if value.startswith("data:") else value
    return b64decode("".join(text.split()), validate=True)


def is_picture(value: object) -> bool:
    """Whether an input for a network of images must be decoded, which takes milliseconds."""
    return isinstance(value, bytes | str)


def _first_sizes(value: Any) -> Sequence[int]:
    """Height and width of nested lists, by their first row.

    >>> _first_sizes([[1, 2, 3], [4, 5, 6]]), _first_sizes([[], []]), _first_sizes("text")
    ((2, 3), (2, 0), ())
    """
    if not isinstance(value, list) or not value or not isinstance(value[0], list):
        return ()
    return len(value), len(value[0])
