"""Fronts beside one engine, of a decoder like Llama and of a T5."""

from collections.abc import Iterator

import pytest

from experiments.demos.sums import characters, tokenizer
from tests.helpers.decoder_world import World
from tests.helpers.tiny_decoders import decoder, t5


@pytest.fixture
def world() -> Iterator[World]:
    made = World(decoder(), tokenizer())
    yield made
    made.loop.end()


@pytest.fixture
def world_of_t5() -> Iterator[World]:
    made = World(t5(), characters())
    yield made
    made.loop.end()
