"""A tokenizer of a few words, and a network that reads them, so that texts can be read without a download."""

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


def bert_config(words: int, names: Sequence[str], **more: Any) -> Any:
    """The configuration of a tiny BERT with a vocabulary of `words` and these labels."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=words,
        num_hidden_layers=4,
        hidden_size=24,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        pad_token_id=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
        **more,
    )
