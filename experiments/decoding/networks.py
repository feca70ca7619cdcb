"""Makes decoders of about 90 M random weights, whose last blocks add little, so that many tokens may leave early."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments.shared.commands import run_isobatch
from isobatch.deployments.decoding.engine_setup import load_tokenizer
from isobatch.deployments.demo import llm_demo_directory
from isobatch.deployments.folders import cache_directory, locked, replacing

READS, TOKENS = 1024, 48  # positions that a network reads; tokens of a text


def prompts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [f"{draw.randint(100, 99999)}+{draw.randint(100, 99999)}=" for _ in range(count)]


@dataclass(frozen=True)
class RealDecoder:
    """`make` gets the special tokens and the size of the vocabulary. `shares`: prompts with the same beginning share
    pages, which is not possible with an encoder."""

    name: str
    make: Callable[[Mapping[str, int], int], Any]
    shares: bool

    def checkpoint(self, dtype: str) -> Path:
        """The directory of the network with ramps for this precision: made at first use, then kept in the cache."""
        target = cache_directory() / f"real-{self.name}-{dtype}"
        with locked(target):
            if not target.is_dir():
                with replacing(target) as draft, TemporaryDirectory() as folder:
                    self._save(Path(folder))
                    (Path(folder) / "prompts.csv").write_text("text\n" + "\n".join(prompts(120, seed=2)) + "\n")
                    data = ["--data", f"{folder}/prompts.csv", "--max-accuracy-loss", "1%", "--max-tokens", str(TOKENS)]
                    run_isobatch("prepare", folder, *data, "--dtype", dtype, "--out", str(Path(folder) / "ramps"))
                    for file in (Path(folder) / "ramps").iterdir():
                        (draft / file.name).write_bytes(file.read_bytes())
        return target

    def _save(self, folder: Path) -> None:
        torch.manual_seed(1)
        tokenizer = load_tokenizer(llm_demo_directory())
        names = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        self.make(names, len(tokenizer)).eval().save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _llama(names: Mapping[str, int], vocabulary: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=576, intermediate_size=1536, num_hidden_layers=24, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=READS, initializer_range=0.05, tie_word_embeddings=True, **names,
    )  # fmt: skip
    network = LlamaForCausalLM(config)
    _scale(0.03, (each for block in network.model.layers[8:] for each in (block.self_attn.o_proj, block.mlp.down_proj)))
    return network


def _t5(names: Mapping[str, int], vocabulary: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocabulary, d_model=576, d_kv=64, num_heads=9, d_ff=1536, num_layers=12, dropout_rate=0.0,
        n_positions=READS, tie_word_embeddings=False, decoder_start_token_id=names["pad_token_id"], **names,
    )  # fmt: skip
    network = T5ForConditionalGeneration(config)
    with torch.no_grad():
        network.lm_head.weight[names["eos_token_id"]] = 0.0  # rarely the largest, so that texts rarely end early
    _scale(0.1, [network.shared])  # otherwise blocks would hardly change the next token
    for block in network.decoder.block[:4]:
        own, source, inner = block.layer
        _scale(8, (own.SelfAttention.o, source.EncDecAttention.o, inner.DenseReluDense.wo))
    return network


def _scale(times: float, layers: Iterable[Any]) -> None:
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(times)


DECODERS = {
    each.name: each for each in (RealDecoder("llama", _llama, shares=True), RealDecoder("t5", _t5, shares=False))
}
