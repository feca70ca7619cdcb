"""Linear layers as products: what the layers compute, in every precision, with each weight kept once."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from isobatch.deployments.decoding.anatomy import anatomy_of
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.models.products import pack_when_used, product_of
from tests.helpers.tiny_decoders import BLOCKS, decoder, engine, t5

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


class Owner(nn.Module):
    def __init__(self, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(24, size, bias, dtype=dtype) for size in (40, 8, 16))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_product_computes_what_its_layers_do_and_they_go_on_as_its_parts(dtype: torch.dtype, bias: bool) -> None:
    owner, plain = Owner(dtype, bias), Owner(dtype, bias)
    product = product_of(owner, "one", "two", "three")
    for count in (1, 3, 33, 200):
        rows = torch.randn(count, 24, dtype=dtype)
        wanted = torch.cat([plain.one(rows), plain.two(rows), plain.three(rows)], dim=1)
        for result, part in (
            (product(rows), wanted), (product(rows, 40), wanted[:, 40:]), (owner.two(rows), wanted[:, 40:48])
        ):  # fmt: skip
            torch.testing.assert_close(result, part, rtol=0, atol=CLOSE[dtype])
    assert not list(owner.parameters()), "a weight is kept twice"


@pytest.mark.parametrize("tied", [False, True])
def test_a_network_of_products_is_the_same_network_and_no_larger(tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = decoder(tied=tied).config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain, tokens = copy.deepcopy(model), torch.tensor([[1, 2, 3, 4]])
    size = sum(each.nbytes for each in model.parameters())
    assert anatomy_of(model).network_bytes == size
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
    written = engine(model, {}).write_all([TextRequest((1, 2, 3), 6)])
    wanted = plain.generate(tokens[:, :3], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert written == wanted[:, 3:].tolist()
    assert {type(each) for each in model.modules()} & {nn.Linear} == ({nn.Linear} if tied else set())
    kept = [each for each in model.parameters() if each.dim() == 2 and not each.is_meta]
    assert len(kept) == 1, "a weight beside those of tokens is kept twice"


def test_a_t5_of_products_is_the_same_network() -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(t5(gated=True).config, dtype=torch.float32).eval()
    plain, source = copy.deepcopy(model), torch.tensor([[1, 2, 3, 4, 5]])
    with torch.inference_mode():
        fields = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": False}
        wanted = plain.generate(source, **fields)
        anatomy_of(model)
        settings = {"input_ids": source, "decoder_input_ids": torch.tensor([[0, 1]])}
        torch.testing.assert_close(model(**settings).logits, plain(**settings).logits)
    written = engine(model, {BLOCKS - 2: 1.1}).write_all([TextRequest((0,), 8, source=(1, 2, 3, 4, 5))])
    assert written == wanted[:, 1:].tolist()


def test_layers_pack_their_weights_when_they_first_run() -> None:
    layers = nn.Sequential(nn.Linear(24, 40, dtype=torch.float32), nn.Linear(40, 8, dtype=torch.float32))
    plain, rows = copy.deepcopy(layers), torch.randn(5, 24)
    pack_when_used(layers)
    with torch.inference_mode():
        first = layers[0](rows)
        assert [layer.weight.is_meta for layer in layers] == [True, False], "a weight is packed too early or kept twice"
        torch.testing.assert_close(layers[1](first), plain(rows))
        torch.testing.assert_close(layers(rows), plain(rows))
    assert [layer.weight.nbytes for layer in layers] == [layer.weight.nbytes for layer in plain]


def test_threads_that_run_a_layer_first_at_the_same_time_all_get_its_outputs() -> None:
    layer = nn.Linear(24, 40)
    plain, rows = copy.deepcopy(layer), torch.randn(5, 24)
    pack_when_used(layer)
    with ThreadPoolExecutor(8) as threads:
        for result in threads.map(layer, [rows] * 32):
            torch.testing.assert_close(result, plain(rows))
