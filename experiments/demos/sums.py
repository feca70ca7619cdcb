"""Makes the demo's decoder that is shipped with the package: `make llm-demo`, some minutes.

A small Llama learns to write sums as words (deployments/demo/sums.py). In training its head reads the state after every
block, and later blocks have more weight in the loss: so a ramp needs no weights of its own. Then ramps are made as
`isobatch prepare` makes them for any decoder.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from isobatch.deployments.decoding.engine_setup import load_decoder, stop_tokens
from isobatch.deployments.demo import llm_demo_directory
from isobatch.deployments.demo.sums import CHARACTERS, END, UNKNOWN, answer_to, prompt_of, sums
from isobatch.deployments.prepare.decoder import ramps_for
from isobatch.deployments.progress import show
from isobatch.profiles.promise import RULES

IGNORED = -100  # Torch ignores positions with this label in its losses
CONTEXT = 64  # positions of the network, far more than a sum needs
PROMPTS = 500  # held-out sums for tests; the other held-out sums are for the ramps
# The share of tokens that may differ from the full network's. If none of 400 texts differs, at most 0.75 % of all texts
# do, with 95 % confidence.
ALLOWED_LOSS = 0.0
CALIBRATE = 0.8  # the share of prompts that thresholds come from


@dataclass(frozen=True)
class SumsRecipe:
    """The shape of the network and its training."""

    num_blocks: int = 8
    width: int = 64
    steps: int = 1800
    batch: int = 64
    learning_rate: float = 3e-3


RECIPE = SumsRecipe()


def train(recipe: SumsRecipe = RECIPE, seed: int = 0) -> Any:
    """A network that was trained without the held-out sums."""
    torch.manual_seed(seed)
    model = _network(recipe)
    tokens, labels = examples(sums(held_out=False))
    return trained(model, lambda chosen: _losses(model, tokens[chosen], labels[chosen]), len(tokens), recipe, seed)


def trained(model: Any, losses: Callable[[Tensor], Tensor], count: int, recipe: SumsRecipe, seed: int) -> Any:
    """The model after training on `count` examples. `losses`: the losses of the head after each block, for a batch."""
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=0.05, betas=(0.9, 0.98), fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    weights = torch.arange(1.0, recipe.num_blocks + 1)
    weights /= weights.sum()
    random = torch.Generator().manual_seed(seed)
    for step in show(range(recipe.steps), "training the demo's decoder"):
        lost = losses(torch.randint(count, (recipe.batch,), generator=random))
        optimiser.zero_grad()
        (lost * weights).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 250 == 0:
            print(f"step {step}: {' '.join(f'{loss:.3f}' for loss in lost.tolist())}", file=sys.stderr)
    return model.eval()


def _losses(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of the head after each block."""
    states = model.model(tokens, output_hidden_states=True).hidden_states
    read = [*(model.model.norm(state) for state in states[1:-1]), states[-1]]  # the last state is already normed
    return torch.stack([functional.cross_entropy(model.lm_head(each).flatten(0, 1), labels.flatten()) for each in read])


def examples(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Tokens, padded with end tokens, and the token to be written after each of them."""
    number = {character: place for place, character in enumerate(vocabulary())}
    length = max(len(prompt_of(*pair) + answer_to(*pair)) for pair in pairs) + 1
    tokens = np.full((len(pairs), length), number[END])
    labels = np.full((len(pairs), length), IGNORED)
    for row, pair in enumerate(pairs):
        prompt, answer = prompt_of(*pair), answer_to(*pair)
        text = [number[character] for character in prompt + answer] + [number[END]]
        tokens[row, : len(text)] = text
        labels[row, len(prompt) - 1 : len(text) - 1] = text[len(prompt) :]
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def vocabulary() -> list[str]:
    return [END, UNKNOWN, *dict.fromkeys(CHARACTERS)]


def _network(recipe: SumsRecipe) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=recipe.width,
        intermediate_size=2 * recipe.width,
        num_hidden_layers=recipe.num_blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        # The usual 0.02 suits wide layers; these are narrow, and would hardly learn in these few steps.
        initializer_range=recipe.width**-0.5,
    )
    return LlamaForCausalLM(config).train()


def save(model: Any, folder: Path) -> None:
    """Save the network in half precision, in which it is shipped and measured."""
    model.half().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> Any:
    """A tokenizer with one token for each character. A chat is read as its last message, which must be a sum."""
    with_chats = characters()
    with_chats.chat_template = (
        "{% set asked = messages[-1]['content'] | replace(' ', '') %}"
        "{{ asked if asked.endswith('=') else asked + '=' }}"
    )
    return with_chats


def characters() -> Any:
    """The same tokenizer without a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(vocabulary())}, UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=END, pad_token=END, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def add_ramps(folder: Path) -> None:
    """Make ramps from half of the held-out sums; the other half is left for tests and experiments."""
    model, words = load_decoder(folder), tokenizer()
    prompts = [words(prompt_of(*pair))["input_ids"] for pair in sums(held_out=True)[PROMPTS:]]
    report = ramps_for(model, prompts, stop_tokens(folder), ALLOWED_LOSS, max_tokens=24, calibrate=CALIBRATE)
    rules = report.rules.model_copy(update={"notes": {"data": "sums in words"}})
    (folder / RULES).write_text(rules.model_dump_json(indent=2) + "\n")


def main() -> None:
    """Replace the shipped demo."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        save(train(), folder)
        add_ramps(folder)
        rmtree(llm_demo_directory(), ignore_errors=True)
        copytree(folder, llm_demo_directory())


if __name__ == "__main__":
    main()
