"""Compares answers on the device with those of the same network on the host in float32, before times are measured.

The networks are small and untrained: one for each kind of attention (without padding, with a bias, with a window, with
a mask of later tokens), and one for pictures.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from experiments.gpu.tables import TableSetting
from experiments.shared.untrained import LABELS, NoEncoder
from isobatch.deployments.exits import entropy
from isobatch.deployments.models.backends import served
from isobatch.deployments.models.families import family_of
from isobatch.deployments.models.interface import BackedModel, backend_named
from isobatch.deployments.models.ramps import ExitRules, RampRule, Ramps, make_head
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.transport.packed import pack, unpack_on
from isobatch.profiles.model import Batch

FAMILIES = ("bert", "mpnet", "modernbert", "gpt2", "vit")
BACKENDS = ("torch", "graphs", "onnx", "onnx-graphs")
BLOCKS, CUT, WORDS, SIDE = 4, 2, 200, 32
LENGTHS = (48, 5, 100, 31, 7, 96, 12, 64)
OTHERS = (3, 90, 33, 80, 9, 41, 100, 4)  # for the same recorded shape


def measure(setting: TableSetting) -> dict[str, float | str]:
    """By family and backend: the largest difference of a logit, as a share of the spread of all logits.

    Two batches follow each other; both are cut in the middle, and survivors go to the host and back.
    """
    return {f"{family}, {backend}": result for family in FAMILIES for backend, result in _of_family(family, setting)}


def _of_family(family: str, setting: TableSetting) -> Iterator[tuple[str, float | str]]:
    host = _network(family, "cpu", torch.float32)
    exact = _network(family, setting.device, getattr(torch, setting.dtype))
    batches = [_batch(family, lengths) for lengths in (LENGTHS, OTHERS)]
    known = np.concatenate([_logits(host, batch, host.device) for batch in batches])
    exports = _has_onnx_runtime(setting) and (setting.layers is None or family == FAMILIES[0])  # exports take seconds
    for name in BACKENDS if exports else BACKENDS[:2]:
        try:
            if backend_named(name).obstacle(exact, False):
                continue
            model = served(exact, name, lambda _, name=name: f"answers {family} {setting} {name}")  # type: ignore[misc]
            own = np.concatenate([_logits(model, batch, model.device) for batch in batches])
        except Exception as error:  # other backends are still compared
            yield name, f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        yield name, float(np.abs(own - known).max() / known.std())


def _has_onnx_runtime(setting: TableSetting) -> bool:
    """Whether ONNX Runtime is installed for this device; otherwise exports are of no use."""
    if not (find_spec("onnxruntime") and find_spec("onnx")):
        return False
    import onnxruntime

    return not setting.on_gpu or "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def _logits(model: BackedModel, batch: Batch, device: torch.device) -> np.ndarray:
    """The logits of a ramp and of the head for each input; no input leaves at the ramp."""
    everybody = np.arange(len(batch))
    model.prepare([BlockRange(0, CUT, model.ramp_blocks), BlockRange(CUT, BLOCKS)], batch)
    model.warm_up(0, [CUT], model.ramp_blocks, batch)
    first = model.run(batch, CUT, model.ramp_blocks, everybody)
    assert first.survivors is not None, "This is a bug: all inputs are kept."
    last = model.run(unpack_on(device, [pack(first.survivors)]), BLOCKS, ())
    return np.concatenate([first.exits.logits, last.exits.logits])


def _network(family: str, device: str, dtype: torch.dtype) -> TorchModel:
    from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": BLOCKS}
    texts = {"vocab_size": WORDS, "max_position_embeddings": 128, "pad_token_id": 1, "initializer_range": 0.1}
    others: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": BLOCKS, "n_positions": 128},
        "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2},
        "vit": {"image_size": SIDE, "patch_size": 8, "initializer_range": 0.1},
    }
    own = {} if family == "gpt2" else sizes
    shape = AutoConfig.for_model(
        family, num_labels=LABELS, **own, **({} if family == "vit" else texts), **others.get(family, {})
    )
    kind = AutoModelForImageClassification if family == "vit" else AutoModelForSequenceClassification
    torch.manual_seed(0)
    model = kind.from_config(shape).eval()
    ramp = make_head("light", family_of(family).dissect(model).pooled_widths[CUT - 1], LABELS).to(device)
    rules = ExitRules(
        policy=f"{entropy.__module__}:{entropy.__name__}", ramps=(RampRule(block=CUT - 1, threshold=2.0),)
    )  # entropy is below 2 for all inputs, so each is reported
    anatomy = family_of(family).dissect(model.to(device=device, dtype=dtype))
    labels = [str(label) for label in range(LABELS)]
    return TorchModel(anatomy, NoEncoder(), Ramps(rules, {CUT - 1: ramp}), labels, torch.device(device), dtype)


def _batch(family: str, lengths: tuple[int, ...]) -> Batch:
    memory, random = np.zeros((len(lengths), 0), np.float32), np.random.default_rng(sum(lengths))
    if family == "vit":
        pixels = random.normal(size=(len(lengths), 3, SIDE, SIDE)).astype(np.float32)
        return Batch(0, {"pixel_values": pixels}, memory)
    return Batch(0, {"input_ids": random.integers(5, WORDS, sum(lengths))}, memory, np.array(lengths))
