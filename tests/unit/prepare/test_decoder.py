"""Where a decoder's head may be read early, and how sure it has to be."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import isobatch
from experiments.demos import t5_sums
from experiments.demos.sums import PROMPTS, SumsRecipe, save, train
from isobatch.cluster.load.prompts import prompts_in
from isobatch.cluster.profiling import launch_prices
from isobatch.cluster.serving.serve_file import serve_file
from isobatch.deployments.decoding.anatomy import shape_of
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine_setup import decoder_shape, engine_of, load_decoder
from isobatch.deployments.decoding.ramp_rules import DecoderRules, check_decoder, is_decoder, rules_of
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.demo import llm_demo_directory
from isobatch.deployments.models.backends import warn_of_ramp_dtype
from isobatch.deployments.prepare.decoder import (
    cheapest_schedule,
    early_head_outputs,
    ramp_report,
    ramps_for,
    texts,
    threshold,
)
from isobatch.profiles.errors import UserError
from isobatch.profiles.text_profile import load_text_profile
from tests.helpers.commands import done
from tests.helpers.tiny_decoders import VOCABULARY, decoder, plainly, t5

tokens = st.lists(st.tuples(st.sampled_from([0.2, 0.4, 0.6, 0.8]), st.booleans()), min_size=1, max_size=12)


@given(tokens, st.sampled_from([0.0, 0.1, 0.3]))
def test_a_threshold_lets_as_many_leave_as_the_loss_allows(tokens: list[tuple[float, bool]], allowed: float) -> None:
    sure, agrees = np.array([each for each, _ in tokens]), np.array([each for _, each in tokens])

    def loss(value: float) -> float:
        return float((~agrees[sure >= value]).sum()) / len(sure)

    fits = [value for value in (0.2, 0.4, 0.6, 0.8, 1.01) if loss(value) <= allowed]
    best = max(fits, key=lambda value: float((sure >= value).mean()))
    result = threshold(sure, agrees, allowed)
    assert loss(result) <= allowed
    assert (sure >= result).mean() == (sure >= best).mean()


@given(st.floats(0.05, 0.95))
def test_the_fewer_go_on_the_fewer_launches_a_token_costs(f: float) -> None:
    assert cheapest_schedule(f, 1e-5).deep_share > 0, "exits.json refuses 0"
    costs = [cheapest_schedule(f, p).cost for p in (1.0, 0.8, 0.5, 0.2, 0.0)]
    assert costs[0] == 1.0
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(costs))


@pytest.mark.parametrize("kind", [decoder, t5])
def test_readings_are_what_plain_decoding_sees(kind: Callable[[], Any]) -> None:
    model = kind()
    requests = [shape_of(model.config).request(prompt, tokens) for prompt, tokens in (((1, 2, 3), 6), ((4,), 3))]
    full = [plainly(model, each, {})[0] for each in requests]
    outputs = early_head_outputs(model, requests, full)
    assert outputs.sure.shape == (3, 9)
    for block in range(3):
        leaves = outputs.sure[block] >= 0.3
        depths = [depth for each in requests for depth in plainly(model, each, {block: 0.3})[1]]
        first = int(np.argmax(leaves)) if leaves.any() else len(leaves)
        assert [depth == block for depth in depths[: first + 1]] == leaves[: first + 1].tolist()


def test_ramps_keep_to_the_loss_on_the_prompts_that_they_come_from() -> None:
    model = decoder(max_position_embeddings=2**20)
    prompts = [(number % 23, number % 7, number % 11) for number in range(40)]
    report = ramps_for(model, prompts, frozenset(), allowed_loss=0.05, max_tokens=6)
    (ramp,) = report.rules.ramps
    requests = [TextRequest(prompt, 6) for prompt in prompts[:20]]
    outputs = early_head_outputs(model, requests, texts(model, report.rules.__class__(), requests))
    lost = (outputs.sure[ramp.block] >= ramp.threshold) & ~outputs.agrees[ramp.block]
    assert lost.mean() <= 0.05
    assert 0 <= (report.rules.same_texts or 0) <= 1
    thresholds = {ramp.block: ramp.threshold}
    unseen = [TextRequest(prompt, 6) for prompt in prompts[20:]]
    freely = [plainly(model, each, thresholds, project=True) for each in unseen]
    same = [tokens == plainly(model, each, {})[0] for each, (tokens, _) in zip(unseen, freely, strict=True)]
    assert report.rules.project.same_texts == np.mean(same)
    assert report.rules.project.survival == np.mean([depth > ramp.block for _, each in freely for depth in each])
    report.rules.check_projectable(None)
    report.rules.check_projectable([ramp.block + 1])
    with pytest.raises(UserError, match="its loss was measured with the cuts"):
        report.rules.check_projectable([4])
    with pytest.raises(UserError, match="does not have its loss: isobatch prepare measures it"):
        DecoderRules().check_projectable(None)
    with pytest.raises(UserError, match="3 different prompts: at least 20"):
        ramps_for(model, prompts[:3] * 9, frozenset(), 0.005, 6)


def test_no_copy_of_a_prompt_that_chooses_the_threshold_tests_it() -> None:
    model, prompts = decoder(), [(number, number % 7) for number in range(20)]
    once, twice = (ramps_for(model, each, frozenset(), 0.05, 3) for each in (prompts, [*prompts, *prompts]))
    assert twice.tokens == once.tokens == 10 * 3
    assert twice.rules.model_copy(update={"lengths": once.rules.lengths}) == once.rules
    assert twice.rules.lengths.prompts == once.rules.lengths.prompts * 2, "clients repeat prompts, too"


def test_a_network_of_one_block_has_no_place_for_a_ramp() -> None:
    prompts = [[number % VOCABULARY, number // VOCABULARY] for number in range(30)]
    with pytest.raises(UserError, match="the network has one block: a ramp stands between two"):
        ramps_for(decoder(num_hidden_layers=1), prompts, frozenset(), 0.01, 4)


@pytest.mark.parametrize("command", ["evaluate", "predict", "bench", "cascade"])
def test_a_command_for_classifiers_says_what_a_decoder_is(command: str, tmp_path: Path) -> None:
    model, data = llm_demo_directory(), tmp_path / "data.csv"
    data.write_text("text,label\n" + "1+1=,2\n" * 30)
    arguments = {
        "predict": (data, "--model", model, "--out", tmp_path / "out.csv"),
        "cascade": (model, model, "--data", data, "--devices", "cpu=1", "--slo-ms", 100, "--out", tmp_path / "out"),
    }
    sentence = "is a decoder, which writes texts, not a classifier: isobatch prepare, profile, plan and serve take it"
    with pytest.raises(UserError, match=sentence):
        done(command, *arguments.get(command, (model, "--data", data)))
    with pytest.raises(UserError, match=sentence):
        isobatch.load(model)


def test_prompts_that_leave_no_room_are_named_as_the_reason() -> None:
    prompts = [f"{number}+1=" for number in range(30)]
    with pytest.raises(UserError, match=r"0 of 30 prompts leave room for 500 tokens \(--max-tokens\)"):
        ramp_report(llm_demo_directory(), prompts, 500, "float32", 0.01, "cpu")


def test_prompts_that_are_left_out_are_counted(tmp_path: Path) -> None:
    data, out = tmp_path / "data.csv", tmp_path / "out"
    prompts = [f"{number}+{1 if number < 30 else 10**58}=" for number in range(36)]
    data.write_text("text\n" + "\n".join(prompts))
    arguments = ("prepare", llm_demo_directory(), "--data", data, "--out", out, "--max-tokens", 4)
    output = done(*arguments).output
    assert "6 of 36 prompts are left out: others leave room for 4 tokens (--max-tokens): the model reads 64" in output
    data.write_text("text\n" + "\n".join(prompts[:30]))
    output = done(*arguments, "--force").output
    assert "left out" not in output


def test_a_t5_that_says_sums_gets_a_ramp(tmp_path: Path) -> None:
    made, out = tmp_path / "t5", tmp_path / "out"
    recipe = SumsRecipe(num_blocks=3, width=16, steps=3, batch=4)
    t5_sums.save(t5_sums.train(recipe), made)
    options = ("--data", made / "sums.csv", "--out", out, "--max-tokens", 6, "--max-rows", 50)
    assert "a ramp after block" in done("prepare", made, *options).output
    check_decoder(out)
    assert len(prompts_in(made / "prompts.txt")) == PROMPTS
    content = serve_file(out, {})
    assert content["applications"][0]["import_path"] == "isobatch.deployments.decoding.app:build"
    config = DecoderConfig(model=str(out), kv_megabytes=8)
    running = engine_of(load_decoder(out), rules_of(out, 3), config)
    (written,) = running.write_all([decoder_shape(out).request((3, 4), 5)])
    assert len(written) == 5


def test_what_else_has_an_encoder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BartForConditionalGeneration"], "model_type": "bart"}')
    assert is_decoder(tmp_path)
    with pytest.raises(UserError, match="model_type is bart: of decoders, llama, mistral, qwen2, qwen3, smollm3, "):
        check_decoder(tmp_path)


def test_of_a_sorted_file_all_parts_choose_the_threshold_and_test_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    decoder("llama").save_pretrained(tmp_path / "network")
    every = [f"{number}+{number}=" for number in range(100)]
    (tmp_path / "sums.csv").write_text("\n".join(["text", *every]))
    read = list[str]()

    def note(source: Path, prompts: list[str], *_: object) -> None:
        read.extend(prompts)
        raise UserError("enough")

    monkeypatch.setattr("isobatch.deployments.prepare.decoder.ramp_report", note)
    with pytest.raises(UserError, match="enough"):
        done("prepare", tmp_path / "network", "--data", tmp_path / "sums.csv", "--out", tmp_path / "out")
    assert sorted(read) == sorted(every)
    assert 15 <= len({*read[:50]} & {*every[:50]}) <= 35


def test_the_command_gives_a_decoder_a_ramp_and_refuses_what_is_for_classifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save(train(SumsRecipe(num_blocks=3, width=16, steps=3, batch=4)), tmp_path / "network")
    data = tmp_path / "sums.csv"
    data.write_text("text,context\n" + "\n".join(f"{number}+{number}=,sums" for number in range(30)))
    out = tmp_path / "out"
    arguments = ("prepare", tmp_path / "network", "--data", data, "--out", out, "--max-tokens", 6)
    for wrong in (("--ramp", "pooler"), ("--dtype", "int8")):
        with pytest.raises(UserError, match=f"{wrong[0]}.* is for classifiers"):
            done(*arguments, *wrong)
    output = done(*arguments, "--dtype", "bfloat16").output
    assert "sums.csv: text from 'text'; not read: 'context'" in output, "a prompt is a single text"
    assert "a ramp after block" in output
    assert "'exits: project' is not chosen" in output
    rules = json.loads((out / "exits.json").read_text())
    assert (rules["kind"], rules["dtype"]) == ("decoder", "bfloat16")
    assert (out / "model.safetensors").exists()
    monkeypatch.setattr(launch_prices, "SETTINGS", launch_prices.SETTINGS[:8])  # those of few residents
    options = ("--timing-s", 0.1, "--device", "cpu", "--dtype", "float32", "--out", tmp_path / "profile.json")
    done("profile", out, *options, "--kind", "t4", "--devices", "t4,l4,l4")
    tables = load_text_profile(tmp_path / "profile.json").tables
    assert [(table.kind, table.estimated) for table in tables] == [("t4", False), ("l4", True)]
    assert caplog.text.count("made for bfloat16; in float32 inputs leave at other ramps") == 1
    warn_of_ramp_dtype(out, "bfloat16", "bfloat16")
    assert caplog.text.count("inputs leave at other ramps") == 1
