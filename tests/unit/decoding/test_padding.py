"""In half precision on a processor, launches have few numbers of rows, as oneDNN compiles for each. The added rows
change no token."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from isobatch.deployments.decoding.anatomy import anatomy_of
from isobatch.deployments.decoding.network import MOST_IN_STEPS, ROW_STEP, UNPADDED
from isobatch.deployments.decoding.sequences import TextRequest
from tests.helpers.tiny_decoders import decoder, engine, plainly, t5, written_by

RAMPS = {0: 0.3, 2: 0.3}
SPARE = 5  # added rows


@pytest.mark.parametrize(("dtype", "compiles"), [(torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize("project", [False, True])
def test_half_precision_is_computed_with_few_numbers_of_rows(dtype: torch.dtype, compiles: bool, project: bool) -> None:
    model = deepcopy(decoder(seed=31)).to(dtype)
    anatomy, sizes, padding, of_prompts = anatomy_of(model), set[int](), set[int](), set[int]()
    through, make_kv = anatomy.through, anatomy.project

    def noted(compute: Callable[..., Any], blocks: range, states: Tensor, view: Any) -> Any:
        rows = view.positions.shape[1]
        sizes.add(len(states))
        (padding if rows <= MOST_IN_STEPS else of_prompts).add(len(states) - rows)
        return compute(blocks, states, view)

    anatomy.through, anatomy.project = partial(noted, through), partial(noted, make_kv)  # type: ignore[method-assign]
    requests = [TextRequest((1, 2 + number % 20, 3), 3 + number % 5) for number in range(23)]
    written = engine(model, RAMPS, project=project).write_all(requests)
    assert [len(tokens) for tokens in written] == [request.max_tokens for request in requests]
    spare = {size % ROW_STEP for size in sizes if size > UNPADDED}
    assert (spare == {0}) == compiles
    assert max(padding) == (ROW_STEP - 1 if compiles else 0)
    assert max(of_prompts) == (11 if compiles else 0)  # 23 prompts of 3 tokens, in 80 rows


@pytest.mark.parametrize("kind", [decoder, t5])
@pytest.mark.parametrize("project", [False, True])
def test_added_rows_change_no_token(kind: Callable[..., Any], project: bool) -> None:
    model = deepcopy(kind(seed=32))
    prompts = [(1, 2, 3), (4, 5), (6, 7, 8, 9), (10,)]
    requests = [anatomy_of(model).shape.request(prompt, 6) for prompt in prompts]
    plain = [plainly(model, request, RAMPS, project) for request in requests]
    anatomy = anatomy_of(model)
    through, make_kv = anatomy.through, anatomy.project

    def with_more(states: Tensor) -> Tensor:
        return functional.pad(states, (0, 0, 0, SPARE), value=1.0)

    def padded(blocks: range, states: Tensor, view: Any) -> Tensor:
        return through(blocks, with_more(states), view)[: len(states)]

    def made(blocks: range, states: Tensor, view: Any) -> None:
        make_kv(blocks, with_more(states), view)

    anatomy.through, anatomy.project = padded, made  # type: ignore[method-assign]
    written = written_by(engine(model, RAMPS, project=project), requests)
    assert list(written.values()) == plain
