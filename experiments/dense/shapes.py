"""Times exits with bridges in networks of the usual shapes, with random weights."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from isobatch.deployments.models import load
from isobatch.profiles.measure import host_clock_for

SIDE, LABELS = 256, 150  # as many labels as ADE20K has
RUNS = 3


def shapes() -> Iterator[tuple[str, Any]]:
    from transformers import (
        ConvNextConfig,
        SegformerConfig,
        SegformerForSemanticSegmentation,
        UperNetConfig,
        UperNetForSemanticSegmentation,
    )

    yield "segformer_b0", SegformerForSemanticSegmentation(SegformerConfig(num_labels=LABELS))
    tiny = ConvNextConfig(out_features=["stage1", "stage2", "stage3", "stage4"], hidden_sizes=[96, 192, 384, 768])
    yield "upernet_tiny", UperNetForSemanticSegmentation(UperNetConfig(backbone_config=tiny, num_labels=LABELS))


def exit_costs() -> Iterator[tuple[str, float]]:
    """The cost of the exit behind each region except the last, as a share of the network's time for one picture."""
    for name, network in shapes():
        with TemporaryDirectory() as folder:
            yield from _costs(name, network, Path(folder))


@torch.inference_mode()
def _costs(name: str, network: Any, folder: Path) -> Iterator[tuple[str, float]]:
    from transformers import SegformerImageProcessorPil

    network.save_pretrained(folder)
    SegformerImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    model = load(folder)
    assert model.anatomy.bridge, "This is a bug: a network that labels pixels has bridges."
    batch = model.encode([np.zeros((SIDE, SIDE, 3), np.uint8)])
    pooled, _ = model.features(batch)
    whole_s = _least_s(partial(model.run, batch, model.num_blocks, ()))
    widths = model.anatomy.pooled_widths
    ends = [block for block in range(model.num_blocks - 1) if widths[block] < widths[block + 1]]
    for region, block in enumerate(ends):
        yield (
            f"exit_cost_{name}_{region}",
            _least_s(partial(model.anatomy.bridge(block).eval(), pooled[block])) / whole_s,
        )


def _least_s(call: Callable[[], object]) -> float:
    clock, took_s = host_clock_for("cpu"), list[float]()
    for _ in range(RUNS):
        began_s = clock()
        call()
        took_s.append(clock() - began_s)
    return min(took_s)
