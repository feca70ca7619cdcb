"""A tokenizer of a few words, so that texts can be read without a download."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = ["the", "a", "film", "is", "was", "not", "good", "bad", "great", "dull", "and", "but"]


def save_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> Any:
    from transformers import BertTokenizer

    vocabulary = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *words]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary)}, model_max_length=512)
    tokenizer.save_pretrained(folder)
    return tokenizer
