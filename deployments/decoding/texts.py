"""Converts between texts and tokens: prompts, chats, and texts that grow token by token until they stop."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from isobatch.deployments.front.answers import RefusedError

UNFINISHED = "�"  # decoded from the first bytes of a character, while the others are missing
_WINDOW = 8  # the number of latest tokens that are decoded again with new ones
_LONGEST_CHARACTER = 4  # bytes, in UTF-8
# Additions that end inside a character, one after the other. Real texts hardly end there so often, and all tokens since
# then are decoded again with each.
_MOST_UNFINISHED = 32
SHORT_TEXT = 4096  # characters: tokenized at once, in about a millisecond
TYPICAL_TOKEN = 4  # characters


_OLD_ROLES = {"developer": "system"}  # OpenAI's newer name of a role


class TextTokens:
    """A model's tokenizer."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self.context = tokenizer, context
        self._vocabulary: Mapping[str, int] = tokenizer.get_vocab()
        self._longest = max(map(len, self._vocabulary))  # characters of a token
        self._aside = ThreadPoolExecutor(1, "tokenizing")
        self._texts = dict[int, str]()  # by token, as many as were needed

    async def chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """The prompt that the model's chat template makes of a conversation."""
        if not self._tokenizer.chat_template:
            raise RefusedError(400, "this model has no chat template: ask /v1/completions")
        if "developer" not in str(self._tokenizer.chat_template):  # some templates drop roles that they do not know
            messages = [{**each, "role": _OLD_ROLES.get(each["role"], each["role"])} for each in messages]
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise any error, with a sentence for users
            raise RefusedError(400, f"the model's chat template refuses these messages: {error}") from error
        return await self.prompt(text, add_special_tokens=False)

    async def prompt(self, text: str, **options: bool) -> tuple[int, ...]:
        """The tokens of a text that may fit. Long texts are read one by one in a thread, and delay no other request."""
        if len(text) > self.context * self._longest:
            raise RefusedError(
                400,
                f"the prompt has {len(text):,} characters: the model reads {self.context:,} tokens, each of "
                f"{self._longest} characters at most",
            )
        if len(text) <= SHORT_TEXT:
            return self._read(text, options)
        return await asyncio.get_running_loop().run_in_executor(self._aside, self._read, text, options)

    def _read(self, text: str, options: Mapping[str, bool]) -> tuple[int, ...]:
        """The tokens of a text. Of a long text the beginning is read first, which may be too long already."""
        size = max(SHORT_TEXT, TYPICAL_TOKEN * self.context)
        while size < len(text):
            # In the whole text, one long token may replace the last ones of this part, at most one for each character.
            if len(self._tokenizer(text[:size], **options)["input_ids"]) > self.context + self._longest:
                raise RefusedError(400, f"the prompt has more than {self.context:,} tokens, which the model reads")
            size *= 2
        return tuple(self._tokenizer(text, **options)["input_ids"])

    def text_of(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def silent(self, names: Iterable[str]) -> frozenset[int]:
        """The tokens of these names that texts are decoded without, such as special tokens."""
        tokens = (self._vocabulary[name] for name in names if name in self._vocabulary)
        return frozenset(token for token in tokens if not self.text_of([token]))

    def token_text(self, token: int) -> str:
        """The text of one token inside a text: some tokenizers decode first words differently. It is kept, since an
        answer with log probabilities may need tens of thousands."""
        if (text := self._texts.get(token)) is None:
            once, twice = (self._tokenizer.decode([token] * count) for count in (1, 2))
            text = self._texts[token] = str(twice[len(once) :])
        return text

    def growing_text(
        self, stops: Sequence[str], silent: Collection[int] = (), least: int = 0, after: Sequence[int] = ()
    ) -> "GrowingText":
        return GrowingText(self._tokenizer, stops, silent, least, after)


class GrowingText:
    """A text that grows with its tokens: `add` returns the characters that are new and certain.

    Characters that may be the beginning of a stop string, or a part of a character, are held back. The text ends before
    the stop string that is completed first (of several, the longest), however its tokens are grouped; those that are
    completed by one of the first `least` tokens do not count. Tokens in `silent` have no text. The text continues the
    prompt `after`: alone, its first word would lose its space with some tokenizers.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], silent: Collection[int], least: int, after: Sequence[int]
    ) -> None:
        self._tokenizer, self._stops, self._silent, self._least = tokenizer, stops, silent, least
        self._tokens = list[int]()  # since the last place at which the text could be cut
        self._before = ""  # the text of these tokens: the prompt's, or returned before
        for size in range(min(_WINDOW, len(after)), 0, -1):  # the first ones may be parts of a character
            latest = list(after[-size:])
            before: str = tokenizer.decode(latest, skip_special_tokens=True)
            if UNFINISHED not in before:
                self._tokens, self._before = latest, before
                break
        self._held_back = ""
        self._unfinished = 0  # additions since the last one that ended with a character
        self._read = 0  # tokens
        self.stopped = False

    def add(self, tokens: Sequence[int], last: bool = False) -> tuple[str, int]:
        """The text that these tokens add, and the number of those that belong to it: all, up to the one that completes
        a stop string. `last`: no tokens follow."""
        text, taken = "", 0
        for group in ([[token] for token in tokens] or [[]]) if self._stops else [tokens]:
            if self.stopped:
                break
            taken += len(group)
            self._read += len(group)
            with_text = [token for token in group if token not in self._silent]
            text += self._until_stop(self._decoded(with_text, last and taken == len(tokens)))
        if last and not self.stopped:
            text, self._held_back = text + self._held_back, ""
        return text, taken

    def _until_stop(self, new: str) -> str:
        """The text that is certain after this new one."""
        if not self._stops:
            return new
        text = self._held_back + new
        if self._read > self._least and (place := self._stop_in(text, len(self._held_back))) is not None:
            self.stopped, self._held_back = True, ""
            return text[:place]
        certain = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held_back = text[certain:]
        return text[:certain]

    def _stop_in(self, text: str, known: int) -> int | None:
        """The place of the stop string that ends first after the known characters, and of these of the longest."""
        begun = ((text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stops)
        ends = [(place + len(stop), place) for place, stop in begun if place >= 0]
        return min(ends)[1] if ends else None

    def _decoded(self, tokens: Sequence[int], last: bool) -> str:
        """The text of new tokens, decoded after those before them: some tokenizers decode first words differently."""
        self._tokens += tokens
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        self._unfinished += 1
        if text.endswith(UNFINISHED) and not last and self._unfinished < _MOST_UNFINISHED:
            return ""
        self._unfinished = 0
        new = text[len(self._before) :]
        self._before = self._cut(text)
        return new

    def _cut(self, text: str) -> str:
        """Forget all but the latest tokens if these alone decode to the end of the text; return the text of the rest.

        The latest tokens may begin inside a character whose bytes are tokens. Some tokenizers then decode none of the
        bytes that follow, so more tokens are tried.
        """
        if len(self._tokens) <= _WINDOW:
            return text
        for size in range(_WINDOW, _WINDOW + _LONGEST_CHARACTER):
            latest = self._tokens[-size:]
            shorter: str = self._tokenizer.decode(latest, skip_special_tokens=True)
            if text.endswith(shorter):
                self._tokens = latest
                return shorter
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the end of the text that may be the beginning of the stop string.

    >>> _overlap("one, tw", "two"), _overlap("one", "two")
    (2, 0)
    """
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
