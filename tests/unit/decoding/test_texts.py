"""A text that grows says the same in whatever groups its tokens come, and nothing from a stop string on."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.decoding.texts import TextTokens
from deployments.front.answers import RefusedError


class Bytes:
    """A tokenizer whose tokens are bytes: characters may come in several, and not all sequences are text."""

    chat_template: str | None = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode("utf-8", "replace")


class Runs(Bytes):
    """One that reads none of the bytes in a row where it cannot read all of them, as those of Llama 2 and Mistral."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        try:
            return bytes(tokens).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(tokens)


def heard(text: str, cuts: list[int], stops: list[str], tokenizer: Bytes | None = None) -> tuple[str, bool]:
    speech, tokens = TextTokens(tokenizer or Bytes(), 100).growing_text(stops), list(text.encode())
    edges = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    said = "".join(speech.add(tokens[start:stop]) for start, stop in pairwise(edges))
    return said + speech.add([], last=True), speech.stopped


@pytest.mark.parametrize("tokenizer", [Bytes(), Runs()])
@given(text=st.text("abä€😀", max_size=40), cuts=st.lists(st.integers(0, 200), max_size=40))
def test_groups_do_not_matter(tokenizer: Bytes, text: str, cuts: list[int]) -> None:
    assert heard(text, cuts, [], tokenizer) == (text, False)


def test_a_long_text_of_long_characters_is_heard_as_it_comes() -> None:
    speech = TextTokens(Runs(), 100).growing_text([])
    for said in "a€😀ä" * 20:
        *first, last = said.encode()
        assert [speech.add([byte]) for byte in (*first, last)] == [""] * len(first) + [said]
        assert len(speech._tokens) < 12, "few tokens are decoded again with each"


@given(
    st.text("abä", max_size=30),
    st.lists(st.integers(0, 200), max_size=30),
    st.lists(st.text("abä", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_a_text_ends_before_its_first_stop_string(text: str, cuts: list[int], stops: list[str]) -> None:
    said, stopped = heard(text, cuts, stops)
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert said == text
    else:
        assert text.startswith(said)
        assert any(text[len(said) :].startswith(stop) for stop in stops)
        assert not any(stop in said for stop in stops)


def test_a_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(RefusedError, match="has no chat template"):
        TextTokens(Bytes(), 100).chat([{"role": "user", "content": "a"}])
