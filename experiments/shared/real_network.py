"""Makes BERT-base with random weights, whose inputs leave at random with a known survival: only its times are real.

Its tokenizer has a few hundred made-up words, so no download is needed. In bfloat16 with AVX-512 or AMX, launches of 31
texts compute 3 to 7 times the texts per second of launches of one, as on a GPU.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.shared.commands import run_isobatch
from experiments.shared.machine import computes_bfloat16
from isobatch.deployments.exits import Decision, Range, takes
from isobatch.deployments.folders import cache_directory, locked, replacing
from isobatch.deployments.models.ramps import ExitRules, RampRule, make_head, save_ramps
from isobatch.profiles.files import Profile, load

# The share of inputs that enter each block.
SURVIVAL = (1.0, 0.95, 0.85, 0.7, 0.55, 0.42, 0.33, 0.26, 0.21, 0.17, 0.14, 0.12)
BLOCKS, WIDTH, LABELS, KIND = len(SURVIVAL), 768, ("neg", "pos"), "cpu"
WORDS = tuple(f"word{number}" for number in range(300))
LARGEST_BATCH = 32
UNCAPPED_BATCH = 128  # a CPU with AMX gains nothing from larger ones
PROFILED = 2400  # texts, so that the share that enters the middle block has a relative standard error of 3 %
DTYPE = "bfloat16" if computes_bfloat16() else "float32"  # this processor's fastest precision
FINE = 1e4  # a logit's digits beyond this are random numbers


@takes(Range(low=lambda labels: 0.0, high=lambda ramps: 1.0, leaves_below=True))
def leaves(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """The threshold is the share of inputs that leave; which ones is random."""
    return Decision(torch.frac(logits.float()[:, 0].abs() * FINE + 0.5) < threshold, logits, memory)


@dataclass(frozen=True)
class RealSize:
    """The network's width, a text's words and the largest batch: so large that the device limits the rate."""

    device: str = KIND
    width: int = WIDTH
    words: int = 11  # 13 tokens with [CLS] and [SEP]
    largest: int = LARGEST_BATCH

    @classmethod
    def of(cls, device: str) -> "RealSize":
        return cls() if device == KIND else cls(device, width=2048, words=500, largest=128)


CPU_SIZE = RealSize()


def texts(count: int, seed: int = 0, words: int = CPU_SIZE.words) -> list[str]:
    drawn = np.random.default_rng(seed).integers(0, len(WORDS), (count, words))
    return [" ".join(WORDS[word] for word in row) for row in drawn]


def profiled_texts(words: int = CPU_SIZE.words) -> list[str]:
    """The texts by which a profile counts exits; other texts have slightly other shares."""
    return texts(PROFILED, seed=1, words=words)


def checkpoint(survival: Sequence[float] = SURVIVAL, width: int = CPU_SIZE.width) -> Path:
    """The directory of the network with its ramps: made at first use, then kept in the cache.

    `survival`: the share of inputs that enter each block, one for each block.
    """
    shares = "" if survival == SURVIVAL else "-" + "-".join(f"{share:.3g}" for share in survival)
    wide = "" if width == CPU_SIZE.width else f"-{width}"
    target = cache_directory() / f"real-bert-{len(survival)}-{DTYPE}{wide}{shares}"
    with locked(target):
        if not target.is_dir():
            with replacing(target) as draft:
                _make(draft, survival, width)
    return target


def _make(folder: Path, survival: Sequence[float], width: int) -> None:
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    torch.manual_seed(0)
    vocabulary = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary)}, model_max_length=512)
    names = dict(enumerate(LABELS))
    config = BertConfig(
        vocab_size=len(vocabulary), pad_token_id=vocabulary.index("[PAD]"), hidden_size=width,
        num_hidden_layers=len(survival), num_attention_heads=width // 64, intermediate_size=4 * width,
        id2label=names, label2id={name: number for number, name in names.items()},
    )  # fmt: skip
    BertForSequenceClassification(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rules = tuple(
        RampRule(block=block, threshold=1 - after / here, survival=after)
        for block, (here, after) in enumerate(pairwise(survival))
    )
    heads = {rule.block: make_head("light", 2 * width, len(LABELS)) for rule in rules}
    save_ramps(folder, ExitRules(policy=f"{__name__}:leaves", ramps=rules, dtype=DTYPE), heads)


def profiled(
    network: Path, folder: Path, budget_s: float = 60.0, dtype: str = DTYPE, size: RealSize = CPU_SIZE
) -> Profile:
    """The profile of `isobatch profile` on this machine, on one thread, with the survival of `profiled_texts`."""
    data, out = folder / "texts.csv", folder / "profile.json"
    with data.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([each] for each in profiled_texts(size.words))])
    backend = "onnx" if dtype == "int8" else "torch"
    on_cpu = ["--kind", KIND, "--threads", 1] if size.device == KIND else []
    run_isobatch(
        "profile", network, "--data", data, "--out", out, "--dtype", dtype, "--backend", backend,
        "--device", size.device, "--largest", size.largest, "--timing-s", f"{budget_s:g}", *on_cpu,
    )  # fmt: skip
    return load(out)
