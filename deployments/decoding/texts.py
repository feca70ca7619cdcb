"""Between texts and tokens: prompts, chats, and a text that grows token by token up to where it is to stop."""

from collections.abc import Sequence
from typing import Any

from deployments.front.answers import RefusedError

_UNFINISHED = "�"  # what a tokenizer gives for the first bytes of a character


class TextTokens:
    """A model's tokenizer."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self.context = tokenizer, context

    def prompt(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text)["input_ids"])

    def chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """The prompt that the model's own template makes of a conversation."""
        if not self._tokenizer.chat_template:
            raise RefusedError(400, "this model has no chat template: ask /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything, and says what it takes
            raise RefusedError(400, f"the model's chat template refuses these messages: {error}") from error
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def speech(self, stops: Sequence[str]) -> "Speech":
        return Speech(self._tokenizer, stops)


class Speech:
    """A text that grows: `hear` gives what is new and certain.

    What may yet become a stop string, or the rest of a character, is kept back. Nothing is said from a stop string on.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []  # since the last place where the text could be cut
        self._before = ""  # what the first of them say, and was heard already
        self._kept = ""
        self.stopped = False

    def hear(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that these tokens add; `last`: no others follow."""
        if self.stopped:
            return ""
        heard = self._kept + self._decoded(tokens, last)
        ends = [place for stop in self._stops if (place := heard.find(stop)) >= 0]
        if ends:
            self.stopped, self._kept = True, ""
            return heard[: min(ends)]
        keep = 0 if last else max((_overlap(heard, stop) for stop in self._stops), default=0)
        certain, self._kept = heard[: len(heard) - keep], heard[len(heard) - keep :]
        return certain

    def _decoded(self, tokens: Sequence[int], last: bool) -> str:
        """Tokens are decoded beside the ones before them, as some tokenizers write a word otherwise at the start."""
        self._tokens += tokens
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if text.endswith(_UNFINISHED) and not last:
            return ""
        new = text[len(self._before) :]
        self._before = self._cut(text)
        return new

    def _cut(self, text: str) -> str:
        """What the tokens say, of which only the latest are kept if these alone say the end of it. They may begin
        inside a character: where each of its bytes is a token, some tokenizers then read none of those that follow."""
        if len(self._tokens) <= _WINDOW:
            return text
        for size in range(_WINDOW, _WINDOW + _LONGEST_CHARACTER):
            latest = self._tokens[-size:]
            shorter: str = self._tokenizer.decode(latest, skip_special_tokens=True)
            if text.endswith(shorter):
                self._tokens = latest
                return shorter
        return text


_WINDOW = 8  # tokens that are decoded again with those that follow
_LONGEST_CHARACTER = 4  # bytes


def _overlap(text: str, stop: str) -> int:
    """How much of the end of the text may be the beginning of the stop string.

    >>> _overlap("one, tw", "two"), _overlap("one", "two")
    (2, 0)
    """
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
