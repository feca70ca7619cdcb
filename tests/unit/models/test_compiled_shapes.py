"""oneDNN compiles what multiplies half precision for each number of rows: launches have few, known before they come."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isobatch.deployments.models import load
from isobatch.deployments.models.spans import MIN_STEP, Spans, rows_for
from isobatch.deployments.models.torch_model import TorchModel
from tests.helpers.tiny_networks import hugging_face, network, random_inputs
from tests.helpers.tiny_tokenizers import save_tokenizer

AT_MOST = 1 / 32


def seen_by_blocks(model: TorchModel) -> set[int]:
    """How many rows the first block is given from now on."""
    sizes, run = set[int](), model.anatomy.blocks[0]

    def noted(hidden: Tensor, spans: Spans | None) -> Tensor:
        sizes.add(len(hidden))
        return run(hidden, spans)

    model.anatomy = replace(model.anatomy, blocks=[noted, *model.anatomy.blocks[1:]])
    return sizes


@given(st.integers(1, 10**6))
def test_few_rows_are_added(tokens: int) -> None:
    rows = rows_for(tokens)
    assert tokens <= rows < tokens + max(MIN_STEP, AT_MOST * tokens + 1)
    assert rows_for(rows) == rows


@pytest.mark.parametrize(("dtype", "compiles"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_half_precision_is_computed_with_few_numbers_of_rows(dtype: torch.dtype, compiles: bool) -> None:
    model = network("bert", dtype=dtype)
    sizes, tokens = seen_by_blocks(model), set[int]()
    for count in range(1, 9):
        batch = model.merge(random_inputs("bert", count, seed=count))
        tokens.add(int(batch.lengths.sum()))
        assert len(model.run(batch, 1, ()).survivors.arrays["hidden"]) == batch.lengths.sum()
    assert sizes == ({rows_for(each) for each in tokens} if compiles else tokens)


def test_no_launch_meets_a_shape_that_was_not_compiled(tmp_path: Path) -> None:
    hugging_face("bert").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    sizes = seen_by_blocks(model)
    model.compile_shapes(4, 100, within_s=60.0, clock=iter(range(100)).__next__)
    assert sizes == {rows_for(tokens) for tokens in range(1, 101)}
