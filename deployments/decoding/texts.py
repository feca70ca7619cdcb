"""Converts between texts and tokens: prompts, chats, and texts that grow token by token until they stop."""

from collections.abc import Sequence
from typing import Any

from deployments.front.answers import RefusedError

_UNFINISHED = "�"  # decoded from the first bytes of a character, while the others are missing
_WINDOW = 8  # the number of latest tokens that are decoded again with new ones
_LONGEST_CHARACTER = 4  # bytes, in UTF-8


class TextTokens:
    """A model's tokenizer."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self.context = tokenizer, context

    def prompt(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text)["input_ids"])

    def chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """The prompt that the model's chat template makes of a conversation."""
        if not self._tokenizer.chat_template:
            raise RefusedError(400, "this model has no chat template: ask /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise any error, with a sentence for users
            raise RefusedError(400, f"the model's chat template refuses these messages: {error}") from error
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def growing_text(self, stops: Sequence[str]) -> "GrowingText":
        return GrowingText(self._tokenizer, stops)


class GrowingText:
    """A text that grows with its tokens: `add` returns the characters that are new and certain.

    Characters that may be the beginning of a stop string, or a part of a character, are held back. The text ends before
    the first stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []  # since the last place at which the text could be cut
        self._before = ""  # the text of the first of these tokens, which was returned already
        self._held_back = ""
        self.stopped = False

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that these tokens add; `last`: no tokens follow."""
        if self.stopped:
            return ""
        text = self._held_back + self._decoded(tokens, last)
        ends = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held_back = True, ""
            return text[: min(ends)]
        certain = len(text) - (0 if last else max((_overlap(text, stop) for stop in self._stops), default=0))
        self._held_back = text[certain:]
        return text[:certain]

    def _decoded(self, tokens: Sequence[int], last: bool) -> str:
        """The text of new tokens, decoded after those before them: some tokenizers decode first words differently."""
        self._tokens += tokens
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if text.endswith(_UNFINISHED) and not last:
            return ""
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
