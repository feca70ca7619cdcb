"""All ways of `make bench-tokens` have the same batches; only what they count differs, and who pads."""

from pathlib import Path

import numpy as np

from deployments.models import load as load_packed
from experiments.packing.padded import load
from experiments.packing.texts import untrained_minilm
from tests.helpers.tiny_tokenizers import save_tokenizer


def test_what_is_served_padded_answers_as_the_packed_network(tmp_path: Path) -> None:
    untrained_minilm(1).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    padded, packed = load(tmp_path), load_packed(tmp_path)
    texts = ["good", "a film that is good"]
    alike = [model.run(model.encode(texts), model.num_blocks, frozenset()).exits.logits for model in (padded, packed)]
    assert np.allclose(*alike, atol=1e-5)
