"""Makes a small T5 that writes sums as words, as an example: `python -m experiments.demos.t5_sums DIRECTORY`.

It learns what the demo's decoder learns (sums.py), but an encoder reads the sum. The held-out sums are written
beside it, in files for `isobatch prepare` and `isobatch load`.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments.demos.sums import CONTEXT, IGNORED, PROMPTS, SumsRecipe, characters, trained, vocabulary
from isobatch.deployments.demo.sums import END, answer_to, prompt_of, sums

RECIPE = SumsRecipe(num_blocks=6, steps=1500)
ENCODER_BLOCKS = 2
DATA = "sums.csv"  # the file with prompts for `isobatch prepare`
PROMPTS_FILE = "prompts.txt"  # the file with prompts for `isobatch load`


def train(recipe: SumsRecipe = RECIPE, seed: int = 0) -> Any:
    """A network that was trained without the held-out sums."""
    torch.manual_seed(seed)
    model = _network(recipe)
    sources, answers = examples(sums(held_out=False))

    def losses(chosen: Tensor) -> Tensor:
        return _losses(model, sources[chosen], answers[chosen])

    return trained(model, losses, len(sources), recipe, seed)


def _losses(model: Any, sources: Tensor, answers: Tensor) -> Tensor:
    """The cross-entropy of the head after each block of the decoder."""
    end = model.config.decoder_start_token_id
    begun = torch.cat([torch.full_like(answers[:, :1], end), answers[:, :-1].clamp(min=end)], dim=1)
    texts = {"input_ids": sources, "attention_mask": (sources != end).long(), "decoder_input_ids": begun}
    states = model(**texts, use_cache=False, output_hidden_states=True).decoder_hidden_states
    read = [*(model.decoder.final_layer_norm(state) for state in states[1:-1]), states[-1]]  # the last is normed
    logits = [model.lm_head(each * model.config.d_model**-0.5) for each in read]
    return torch.stack([functional.cross_entropy(each.flatten(0, 1), answers.flatten()) for each in logits])


def examples(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The tokens that the encoder reads, padded with end tokens, and the tokens to be written."""
    number = {character: place for place, character in enumerate(vocabulary())}
    sources = [torch.tensor([number[each] for each in prompt_of(*pair)]) for pair in pairs]
    answers = [torch.tensor([*(number[each] for each in answer_to(*pair)), number[END]]) for pair in pairs]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(sources, True, number[END]), pad(answers, True, IGNORED)


def _network(recipe: SumsRecipe) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    end = vocabulary().index(END)
    config = T5Config(
        vocab_size=len(vocabulary()),
        d_model=recipe.width,
        d_kv=recipe.width // 4,
        num_heads=4,
        d_ff=2 * recipe.width,
        num_layers=ENCODER_BLOCKS,
        num_decoder_layers=recipe.num_blocks,
        dropout_rate=0.0,
        n_positions=CONTEXT,
        pad_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=end,
    )
    return T5ForConditionalGeneration(config).train()


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    characters().save_pretrained(folder)
    unseen = [prompt_of(*pair) for pair in sums(held_out=True)]
    with (folder / DATA).open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([prompt] for prompt in unseen[PROMPTS:])])
    (folder / PROMPTS_FILE).write_text("\n".join(unseen[:PROMPTS]) + "\n")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m experiments.demos.t5_sums DIRECTORY")
    save(train(), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
