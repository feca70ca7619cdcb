"""Measures the speed of an untrained decoder of Llama's shape, with several texts of one length at once."""

from time import perf_counter
from typing import Any

import numpy as np
import torch

from experiments.gpu.tables import TableSetting
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine_setup import engine_of
from isobatch.deployments.decoding.ramp_rules import DecoderRules
from isobatch.deployments.decoding.sequences import TextRequest

WRITTEN = 64  # tokens of each text
LARGE_BYTES = 40 * 2**30  # a device with less memory gets the smaller network
# Llama 3.1 8B, Llama 3.2 1B, a trial: width, inner width, blocks, heads, heads of keys, words.
SHAPES = {
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "1B": (2048, 8192, 16, 32, 8, 128256),
    "trial": (64, 128, 2, 4, 2, 100),
}


def measure(setting: TableSetting) -> dict[str, float | str]:
    """Tokens per second of one text and of 32, after prompts of 2,048 tokens, and the rate of reading weights.

    That rate limits a GPU.
    """
    if setting.layers is not None:
        name, prompt, many = "trial", 32, 2
    else:
        memory_bytes = torch.cuda.get_device_properties(setting.device).total_memory if setting.on_gpu else 0
        name, prompt, many = "8B" if memory_bytes >= LARGE_BYTES else "1B", 2048, 32
    model = _untrained(name, setting, prompt + WRITTEN + 1)
    weights_bytes = sum(each.nbytes for each in model.parameters())
    result: dict[str, float | str] = {"network": f"Llama {name}"}
    for residents in (1, many):
        launch_s = _decoding_s(model, residents, prompt) / WRITTEN
        result[f"tokens_per_s_{residents}"] = residents / launch_s
        result[f"weights_gb_per_s_{residents}"] = weights_bytes / launch_s / 1e9
    return result


def _untrained(name: str, setting: TableSetting, context: int) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    width, inner, blocks, heads, key_heads, words = SHAPES[name]
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=words, max_position_embeddings=context,
    )  # fmt: skip
    with torch.device(setting.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setting.dtype)).eval()


def _decoding_s(model: Any, residents: int, prompt: int) -> float:
    """Seconds for the tokens after the first one, with this number of texts at once."""
    position_bytes = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
    needed_bytes = residents * (prompt + WRITTEN + 32) * position_bytes * model.dtype.itemsize
    config = DecoderConfig.model_validate({
        "model": "", "exits": "off", "max_residents": residents, "kv_megabytes": needed_bytes // 2**20 + 64,
        "max_waiting": residents, "ttft_ms": 1e9, "tpot_ms": 1e9,
    })  # fmt: skip
    texts = np.random.default_rng(0).integers(0, model.config.vocab_size, (residents, prompt)).tolist()
    took_s = []
    for written in (1, 1, WRITTEN + 1):  # the first time warms up
        engine = engine_of(model, DecoderRules(), config)
        begun_s = perf_counter()
        engine.write_all([TextRequest(tuple(text), written) for text in texts])
        took_s.append(perf_counter() - begun_s)
    return max(took_s[2] - took_s[1], 1e-9)
