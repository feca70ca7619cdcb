"""Shapes and memory of networks that fill a GPU, on the `meta` device: each operation runs without its numbers. What
plans count of them, by datasheets and by measured tables, is compared with what a launch of that size needs."""

from functools import cache
from typing import Any
from weakref import finalize

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isobatch.cluster.profiling.datasheets import shape_of
from isobatch.deployments.decoding.anatomy import anatomy_of
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine_setup import kv_bytes
from isobatch.deployments.decoding.paged_attention import PagedKv
from isobatch.deployments.decoding.scheduler import DecodingLaunch, Piece
from isobatch.deployments.decoding.sequences import Sequence, Splits, TextRequest
from isobatch.deployments.models import attention
from isobatch.deployments.models.families import family_of
from isobatch.deployments.models.ramps import Ramps
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.spans import spans_of
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.measure import modules_run
from isobatch.profiles.model import Batch
from tests.helpers.tiny_networks import NoEncoder

META = torch.device("meta")
HALF = torch.float16
TOKENS = 176


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that operations make, while any of them is in use."""

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        self._device, self.now, self.peak = device, 0, 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(each) for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = function(*args, **(kwargs or {}))
        for made in torch.utils._pytree.tree_leaves(result):
            if isinstance(made, Tensor) and made.device == self._device and id(made) not in given:
                self._note(made)
        return result

    def _note(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._users:
            self.now += size
            self.peak = max(self.peak, self.now)
        self._users[key] = self._users.get(key, 0) + 1
        finalize(made, self._left, key, size)

    def _left(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.now -= size


def configuration(name: str) -> Any:
    import transformers

    large = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    kind = transformers.BertConfig if name == "bert-large" else transformers.ViTConfig
    return kind(num_labels=2, **large)


@cache
def network(name: str) -> TorchModel:
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    shape = configuration(name)
    family = family_of(shape.model_type)
    kind = AutoModelForSequenceClassification if family.reads == "text" else AutoModelForImageClassification
    with META:
        model = kind.from_config(shape, dtype=HALF).eval()
    return TorchModel(family.dissect(model), NoEncoder(), Ramps(), ["no", "yes"], META, HALF)


def batch(name: str, size: int) -> Batch:
    memory = np.zeros((size, 0), np.float32)
    if name == "bert-large":
        return Batch(0, {"input_ids": np.zeros(size * TOKENS, np.int64)}, memory, np.full(size, TOKENS))
    return Batch(0, {"pixel_values": np.zeros((size, 3, 224, 224), np.float16)}, memory)


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, attention makes no matrix of scores."""
    monkeypatch.setattr(attention, "varlen", lambda tokens, edges, longest, scaling: torch.empty_like(tokens[0]))
    monkeypatch.setattr("isobatch.deployments.models.torch_model.is_fused", lambda device, dtype: True)
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda query, *others, **more: torch.empty_like(query)
    )


def peaks(name: str, size: int) -> list[int]:
    """By block, the most memory that it takes beyond its input; the first reads the inputs themselves."""
    model, here, calls = network(name), batch(name, size), []
    for block in range(model.num_blocks - 1):
        with LiveBytes() as live:
            here = model.run(here, block + 1, ()).survivors
        calls.append(live.peak)
    return calls


@pytest.mark.parametrize("name", ["bert-large", "vit-large"])
def test_a_datasheets_memory_is_that_of_the_network(name: str) -> None:
    """Of each block's weights, and of an input behind it on the wire."""
    model, length = network(name), TOKENS if name == "bert-large" else None
    table = datasheet_table(shape_of(configuration(name), length), "h100", dtype="float16")
    real = weights(name)
    assert table.memory_bytes == pytest.approx(real, rel=0.1)
    assert sum(table.memory_bytes) == pytest.approx(sum(real), rel=0.01)
    assert model.run(batch(name, 32), 12, ()).survivors.size_bytes == 32 * table.hidden_bytes[11]
    assert table.hidden_bytes[11] == (TOKENS if length else 197) * 1024 * 2


def weights(name: str) -> list[int]:
    """By block, of the modules that run in it."""
    model, calls = network(name), list[int]()
    arrays: dict[str, Tensor] = {key: torch.as_tensor(each).to(META) for key, each in batch(name, 1).arrays.items()}
    spans = spans_of(np.array([TOKENS]), META, fused=True) if name == "bert-large" else None
    for block in range(model.num_blocks):
        with modules_run() as modules:
            output = model.through(BlockRange(block, block + 1), arrays, spans)
        calls.append(sum(each.nbytes for module in modules for each in module.parameters(recurse=False)))
        arrays = {} if output.hidden is None else {"hidden": output.hidden}
    return calls


@pytest.mark.parametrize("name", ["bert-large", "vit-large"])
def test_a_full_batch_takes_as_much_memory_as_its_inputs_alone(name: str) -> None:
    """Plans multiply the measured peak of one input by the batch size. So it must not grow faster."""
    alone, full = peaks(name, 1), peaks(name, 64)
    for block, (one, many) in enumerate(zip(alone, full, strict=True)):
        assert 0.95 * 64 * one <= many <= 1.01 * 64 * one, f"block {block}"
    widest = 64 * (TOKENS if name == "bert-large" else 197) * 4096 * 2
    assert widest < max(full) < 3 * widest, "the inner layer, before and after its activation"


LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip
RESIDENTS, CONTEXT = 32, 2048


@cache
def llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    with META:
        return AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA), dtype=HALF).eval()


def test_a_decoders_memory_is_its_weights_and_the_pages_that_its_configuration_allows() -> None:
    anatomy = anatomy_of(llama())
    assert anatomy.network_bytes == 2 * 8_030_261_248
    position_bytes = anatomy.shape.num_blocks * kv_bytes(anatomy)
    assert position_bytes == 32 * 2 * 8 * 128 * 2
    config = DecoderConfig.model_validate({"model": "", "kv_megabytes": 16_384})
    pages = config.pages(position_bytes)
    with LiveBytes() as live:
        kv = pages_of(anatomy, pages, config.page_tokens)
    assert live.now == pages * config.page_tokens * position_bytes <= 16_384 * 2**20
    assert pages * config.page_tokens >= 64 * CONTEXT, "64 texts of 2,048 tokens in 16 GiB"
    assert kv.device == META


def test_a_decoders_launch_takes_the_kv_of_one_block_once_more() -> None:
    """Attention reads a copy of the pages of its texts, and no block keeps its copy."""
    anatomy = anatomy_of(llama())
    kv = pages_of(anatomy, RESIDENTS * CONTEXT // 16 + 1, 16)
    each, splits = CONTEXT // 16, Splits((32,))
    pieces = []
    for name in range(RESIDENTS):
        sequence = Sequence(name, TextRequest((1,) * CONTEXT, 1), splits, 0.0, 16)
        sequence.pages = list(range(1 + name * each, 1 + (name + 1) * each))
        pieces.append(Piece(sequence, CONTEXT - 1, 1, 1))
    states = torch.empty(RESIDENTS, 4096, dtype=HALF, device=META)
    with LiveBytes() as live, torch.inference_mode():
        after = anatomy.through(range(3), states, kv.view(DecodingLaunch(0, tuple(pieces))))
    assert after.shape == states.shape
    gathered = RESIDENTS * CONTEXT * kv_bytes(anatomy)
    assert gathered == 256 * 2**20
    assert gathered < live.peak < 1.1 * gathered


def test_to_find_spoilt_pages_takes_less_memory_than_a_launch_with_them() -> None:
    pages = 1024
    kv = PagedKv(4, 2, 16, 1, torch.zeros(1), pages + 1, 16)
    kv.write(3, torch.tensor([700 * 2 * 16 * 2]), torch.tensor([float("nan")] * 16))
    with LiveBytes(kv.device) as live:
        assert kv.spoilt(range(1, pages)) == [700]
    block_of_launch = pages * 16 * 2 * 2 * 16 * 4
    assert 0 < live.peak < block_of_launch


def pages_of(anatomy: Any, pages: int, page_tokens: int) -> PagedKv:
    shape = anatomy.shape
    return PagedKv(
        shape.num_blocks, shape.heads, shape.width, anatomy.queries_per_key, anatomy.weights, pages, page_tokens
    )
