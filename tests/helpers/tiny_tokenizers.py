"""A tokenizer of a few words, and networks that read them, so that texts can be read without a download."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

WORDS = ["the", "a", "film", "is", "was", "not", "good", "bad", "great", "dull", "and", "but"]


def save_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> Any:
    from transformers import BertTokenizer

    vocabulary = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *words]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary)}, model_max_length=512)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_trained(
    folder: Path,
    kind: str,
    words: Sequence[str],
    names: Sequence[str],
    losses: Callable[[Any, Any], Iterable[torch.Tensor]],
    problem: str | None = None,
) -> None:
    """A checkpoint without ramps. `kind`: of transformers; `losses`: of each step, by the model and its tokenizer."""
    import transformers

    tokenizer = save_tokenizer(folder, words)
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 32}
    longest = {"vocab_size": len(tokenizer), "max_position_embeddings": 24, "pad_token_id": 1}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    ids = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    config = transformers.BertConfig(**sizes, **longest, **dropouts, **ids, problem_type=problem)
    model = getattr(transformers, kind)(config)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
    for loss in losses(model, tokenizer):
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval().save_pretrained(folder)
