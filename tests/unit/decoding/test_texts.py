"""A text that grows says the same in whatever groups its tokens come, and nothing from a stop string on."""

import asyncio
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from isobatch.deployments.decoding.engine_setup import load_tokenizer
from isobatch.deployments.decoding.front import TextPiece
from isobatch.deployments.decoding.openai_api import CHAT_SHAPE, COMPLETION_SHAPE, ReplyShape, TextReply
from isobatch.deployments.decoding.sequences import TextRequest, TokenLogprobs
from isobatch.deployments.decoding.texts import TextTokens
from isobatch.deployments.front.answers import RefusedError


class Bytes:
    """A tokenizer whose tokens are bytes: characters may come in several, and not all sequences are text."""

    chat_template: str | None = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def get_vocab(self) -> dict[str, int]:
        return {"<0x00>": 0}

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode("utf-8", "replace")


class Runs(Bytes):
    """One that reads none of the bytes in a row where it cannot read all of them, as those of Llama 2 and Mistral."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        try:
            return bytes(tokens).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(tokens)


def heard(
    text: str, cuts: list[int], stops: list[str], tokenizer: Bytes | None = None, least: int = 0
) -> tuple[str, int, bool]:
    """The text, the tokens that belong to it, and whether a stop string ended it."""
    tokens = list(text.encode())
    speech = TextTokens(tokenizer or Bytes(), 100).growing_text(stops, least=least)
    edges = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    results = [speech.add(tokens[start:stop]) for start, stop in pairwise(edges)] + [speech.add([], last=True)]
    return "".join(new for new, _ in results), sum(taken for _, taken in results), speech.stopped


@pytest.mark.parametrize("tokenizer", [Bytes(), Runs()])
@given(text=st.text("abä€😀", max_size=40), cuts=st.lists(st.integers(0, 200), max_size=40))
def test_groups_do_not_matter(tokenizer: Bytes, text: str, cuts: list[int]) -> None:
    assert heard(text, cuts, [], tokenizer) == (text, len(text.encode()), False)


def test_a_long_text_of_long_characters_is_heard_as_it_comes() -> None:
    speech = TextTokens(Runs(), 100).growing_text([])
    for result in "a€😀ä" * 20:
        *first, last = result.encode()
        assert [speech.add([byte])[0] for byte in (*first, last)] == [""] * len(first) + [result]
        assert len(speech._tokens) < 12, "few tokens are decoded again with each"


def test_a_text_keeps_its_first_space_if_characters_of_several_tokens_end_its_prompt() -> None:
    """Some tokenizers, such as that of Llama 2, decode the first word of a text without the space before it."""

    class FirstWord(Runs):
        def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
            return super().decode(tokens).removeprefix(" ")

    for prompt in ("one 😀y 😀", "你好世界", "a b c d e f"):
        text = TextTokens(FirstWord(), 100).growing_text([], after=tuple(prompt.encode()))
        assert text.add(list(b" two"), last=True)[0] == " two"


@pytest.mark.parametrize("kind", [Bytes, Runs])
def test_bytes_that_never_become_a_character_are_not_all_decoded_again_with_each(kind: type[Bytes]) -> None:
    tokenizer, decoded = kind(), list[int]()
    decode = tokenizer.decode
    tokenizer.decode = lambda tokens, **options: (decoded.append(len(tokens)), decode(tokens, **options))[1]  # type: ignore[method-assign]
    text, calls = TextTokens(tokenizer, 100).growing_text([]), list[str]()
    for _ in range(1000):
        calls.append(text.add([0xFF])[0])
    assert len("".join(calls)) > 900, "it comes as it is written"
    calls.append(text.add([], last=True)[0])
    assert "".join(calls) == "\ufffd" * 1000
    assert max(decoded) < 64


@given(
    st.text("abä", max_size=30),
    st.lists(st.integers(0, 200), max_size=30),
    st.lists(st.text("abä", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_a_text_ends_before_the_first_stop_string(text: str, cuts: list[int], stops: list[str], least: int) -> None:
    """However its tokens are grouped, and with as many tokens as up to the end of the stop string."""
    ends = [
        (end, -len(stop))
        for end in range(1, len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop) and len(text[:end].encode()) > least
    ]
    text_read, taken, stopped = heard(text, cuts, stops, least=least)
    assert stopped == bool(ends)
    if ends:
        end, size = min(ends)
        assert (text_read, taken) == (text[: end + size], len(text[:end].encode()))
    else:
        assert (text_read, taken) == (text, len(text.encode()))


def test_tokens_without_text_belong_to_it() -> None:
    speech = TextTokens(Bytes(), 100).growing_text(["z"], silent={0})
    assert speech.add([97, 0, 98], last=True) == ("ab", 3)


def test_spaces_stay_where_a_tokenizer_would_clean_them_up(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({each: place for place, each in enumerate("ab .'t?")}, "a"))
    words.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=True).save_pretrained(tmp_path)
    texts = TextTokens(load_tokenizer(tmp_path), 100)
    text, result = texts.growing_text([]), "a . b 't ? a"
    tokens = ["ab .'t?".index(each) for each in result]
    assert "".join(text.add([token])[0] for token in tokens) == texts.text_of(tokens) == result


def reply_in_bytes(shape: ReplyShape = COMPLETION_SHAPE, silent: tuple[int, ...] = ()) -> TextReply:
    return TextReply(shape, "tiny", TextTokens(Bytes(), 100), [TextRequest((97,), 99)], (), 0.0, silent=silent)


@given(st.text("abä€😀\0", max_size=40), st.integers(1, 5))
def test_each_token_has_the_place_of_its_character_in_the_text(text: str, size: int) -> None:
    """However its tokens are grouped; those of the character 0 have no text here."""
    reply, tokens = reply_in_bytes(silent=(0,)), list(text.encode())
    groups = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    places = [len(text[:place].replace("\0", "")) for place, each in enumerate(text) for _ in each.encode()]
    assert [place for group in groups for place in reply.offsets(0, group)] == places


def test_log_probabilities_of_parts_of_characters_stay_apart_and_claim_no_bytes() -> None:
    first, other, letter = (each.encode()[0] for each in "ä€a")
    best = ((first, -1.0), (other, -2.0), (letter, -3.0))
    piece = TextPiece("", (3,), None, (first,), (TokenLogprobs(-1.0, best, 3),))
    plain, chat = (shape.logprobs(reply_in_bytes(shape), 0, piece) for shape in (COMPLETION_SHAPE, CHAT_SHAPE))
    assert plain["top_logprobs"] == [{f"token_id:{first}": -1.0, f"token_id:{other}": -2.0, "a": -3.0}]
    (token,) = chat["content"]
    assert plain["tokens"] == [token["token"]] == [f"token_id:{first}"]
    assert [each["token"] for each in token["top_logprobs"]] == [*plain["top_logprobs"][0]]
    assert [each["bytes"] for each in (token, *token["top_logprobs"])] == [None, None, None, [letter]]


def test_a_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(RefusedError, match="has no chat template"):
        asyncio.run(TextTokens(Bytes(), 100).chat([{"role": "user", "content": "a"}]))


@pytest.mark.parametrize(("knows", "read"), [("", b"system=a;user=b;"), (" developer", b"developer=a;user=b;")])
def test_instructions_of_a_developer_reach_a_template_that_knows_only_those_of_the_system(
    knows: str, read: bytes
) -> None:
    class Roles(Bytes):
        chat_template = f"roles:{knows}"

        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return "".join(f"{each['role']}={each['content']};" for each in messages)

    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert bytes(asyncio.run(TextTokens(Roles(), 100).chat(messages))) == read


class Counting(Bytes):
    """Notes how many characters it was given, and in which thread."""

    def __init__(self) -> None:
        self.given: list[tuple[int, str]] = []

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        self.given.append((len(text), threading.current_thread().name))
        return super().__call__(text, **options)


def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenized() -> None:
    tokenizer = Counting()
    with pytest.raises(RefusedError, match=r"1,040,000 characters: the model reads 64 tokens, each of 6 characters"):
        asyncio.run(TextTokens(tokenizer, 64).prompt("1" * 1_040_000))
    assert not tokenizer.given


def test_a_long_text_is_tokenized_beside_the_event_loop_and_no_further_than_the_context() -> None:
    tokenizer = Counting()
    with pytest.raises(RefusedError, match=r"more than 10,000 tokens"):
        asyncio.run(TextTokens(tokenizer, 10_000).prompt("1" * 60_000))
    assert [(size, "tokenizing" in thread) for size, thread in tokenizer.given] == [(40_000, True)]
    assert len(asyncio.run(TextTokens(tokenizer, 10_000).prompt("1" * 9_000))) == 9_000
