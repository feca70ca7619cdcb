"""All ways of `make bench-tokens` have the same batches; only what they count differs, and who pads."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from cluster.load.report import Lateness, Summary
from deployments.models import load as load_packed
from experiments.packing.padded import load
from experiments.packing.texts import untrained_minilm
from experiments.tokens import run
from profiles.datasheet import datasheet_table
from profiles.files import Profile
from profiles.lengths import Lengths
from profiles.shapes import encoder
from tests.helpers.tiny_tokenizers import save_tokenizer


def test_the_same_plan_counts_tokens_and_inputs() -> None:
    shape = encoder("minilm", layers=6, hidden=384, inner=1536, length=24)
    profile = Profile("minilm", (datasheet_table(shape, "cpu"),), lengths=Lengths((12, 24, 36)))
    tokens, inputs, padded = run._ways(profile)
    assert (tokens.plan.length, inputs.plan.length) == (24, None)
    assert replace(tokens.plan, length=None) == inputs.plan
    assert (padded.plan, padded.profile, padded.loader) == (inputs.plan, inputs.profile, run.PADDED)
    assert inputs.profile.length is None
    assert inputs.profile.table("cpu") == tokens.profile.table_of("cpu", 24)


def test_figures_are_of_the_best_rate_of_each() -> None:
    def one(goodput_per_s: float) -> Summary:
        lateness = Lateness({}, {}, {}, 0.0, 1.0, 2, 0, 2)
        return Summary(100, 1.0, 9.0, 9.0, goodput_per_s, 1.0, {}, {}, None, 0.0, lateness, 9.0, goodput_per_s * 20)

    inputs, padded = [one(45.0), one(40.0)], [one(30.0), one(20.0)]
    figures = run._figures({"tokens": [one(90.0), one(60.0)], "inputs": inputs, "padded": padded}, 100.0)
    assert figures["goodput_per_s_ratio"] == 2.0
    assert figures["goodput_per_s_overloaded_ratio"] == 1.5
    assert figures["goodput_per_s_over_padded"] == 3.0
    assert figures["good_tokens_per_s_tokens"] == 1800.0
    assert figures["late_share_inputs"] == 0.02


def test_what_is_served_padded_answers_as_the_packed_network(tmp_path: Path) -> None:
    untrained_minilm(1).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    padded, packed = load(tmp_path), load_packed(tmp_path)
    texts = ["good", "a film that is good"]
    alike = [model.run(model.encode(texts), model.num_blocks, frozenset()).exits.logits for model in (padded, packed)]
    assert np.allclose(*alike, atol=1e-5)
