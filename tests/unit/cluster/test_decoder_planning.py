"""`isobatch plan`, `simulate` and `serve` of a decoder, from its directory on."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isobatch.cluster.cli import app
from isobatch.cluster.commands.profile_texts import workload_of
from isobatch.cluster.serving.serve_file import DECODER, serve_file
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine_setup import decoder_shape, in_its_precision, usual_dtype
from isobatch.deployments.decoding.ramp_rules import DecoderRules, is_decoder
from isobatch.deployments.demo import llm_demo_directory
from isobatch.deployments.folders import weights_of
from isobatch.optimizer.plan import read_plan
from isobatch.profiles.errors import UserError
from isobatch.profiles.text_profile import load_text_profile, save_text_profile
from tests.helpers.paper_application import paper_decoder

DEMO = llm_demo_directory()
Called = Callable[..., str]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Called:
    """Calls a command where nothing is kept yet, and returns what it printed, or the sentence that it ended with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        if result.exception and not isinstance(result.exception, (UserError, SystemExit)):
            raise result.exception
        return result.output + str(result.exception or "")

    return run


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    made = paper_decoder(survival=((1, 0.1),), prompt=4, output=6, reads=64)
    save_text_profile(replace(made, weights=weights_of(DEMO)), path)
    return path


def test_a_plan_is_made_played_and_served(call: Called, profile: Path, tmp_path: Path) -> None:
    plan, prompts = tmp_path / "plan.json", tmp_path / "prompts.txt"
    plan.write_text("old")
    (tmp_path / "kept").hardlink_to(plan)
    output = call("plan", DEMO, "--profile", profile, "--kv-megabytes", 2, "--tpot-ms", 20, "--out", plan)
    assert (tmp_path / "kept").read_text() == "old", "the file is replaced whole"
    assert "behind block 1 of 8 (recompute)" in output
    assert "TPOT 20 ms for" in output
    promise, ceiling = (float(number.replace(",", "")) for number in re.findall(r"([\d,]+) tokens/s[,:]", output))
    (gap,) = re.findall(r"it is (\d+)% above the promise", output)
    assert int(gap) == pytest.approx(100 * (ceiling / promise - 1), abs=1)
    prompts.write_text("1+1=\n22+33=\n")
    served = {"name": "a", "import_path": DECODER, "args": {"model": str(DEMO), "profile": str(profile)}}
    (tmp_path / "serve.yaml").write_text(json.dumps({"applications": [served]}))
    rehearsal = ("simulate", "--config", tmp_path / "serve.yaml", "--plan", plan, "--rate", 20, "--hours", 0.002)
    assert "tokens per second" in call(*rehearsal, "--prompts", prompts)
    (served,) = serve_file(DEMO, {"plan": str(plan)})["applications"]
    (config,) = DecoderConfig.model_validate(served["args"]).per_kind().values()
    split = read_plan(plan).splits[0]
    assert (config.cuts, config.max_residents, config.tpot_ms) == ((2,), split.batch_size, 20.0)
    assert "nothing comes in so short a time" in call(*rehearsal[:-1], 1e-9)
    (trace := tmp_path / "trace.csv").write_text("TIMESTAMP\n2023-11-16 18:00:00\n2023-11-16 18:00:01\n")
    assert "trace.csv: 2 arrival times in 1 s" in call(*rehearsal, "--trace", trace)
    assert "--trace-each-s 60 is for counts" in call(*rehearsal, "--trace", trace, "--trace-each-s", 60)
    prompts.unlink()
    assert "cannot read" in call(*rehearsal, "--prompts", prompts)


def test_a_low_rate_is_not_compared_with_the_ceiling(call: Called, profile: Path) -> None:
    output = call("plan", DEMO, "--profile", profile, "--kv-megabytes", 2, "--rate", 0.5)
    assert "or by a simulation" in output
    assert "above the promise" not in output


def test_of_two_decoders_one_is_named(call: Called, tmp_path: Path) -> None:
    common = {"import_path": DECODER, "args": {"model": str(DEMO)}}
    two = [{"name": name, "route_prefix": f"/{name}", **common} for name in ("a", "b")]
    (tmp_path / "serve.yaml").write_text(json.dumps({"applications": two}))
    simulate = "simulate", "--config", tmp_path / "serve.yaml", "--rate", 1
    simulated = call(*simulate)
    assert "the Serve file has a, b: --application names the one to simulate" in simulated
    assert "there is no plan" in call(*simulate, "--application", "b")


def test_the_profile_of_another_decoder_is_refused(profile: Path) -> None:
    save_text_profile(replace(load_text_profile(profile), weights="other"), profile)
    with pytest.raises(UserError, match=r"profile\.json was made for other weights than those in .*: profile and plan"):
        serve_file(DEMO, {"profile": str(profile)})


def test_a_decoder_s_profile_is_not_read_as_a_classifier_s(call: Called, profile: Path) -> None:
    refusal = f"{profile} is a profile of a decoder: isobatch plan takes the decoder's directory"
    assert refusal in call("plan", "--profile", profile, "--devices", "cpu=1")


def test_a_plan_that_projects_is_made_where_its_loss_is_known(call: Called, profile: Path, tmp_path: Path) -> None:
    """And served with the one cut that exits.json has measured."""
    plan, options = tmp_path / "plan.json", ("--profile", profile, "--kv-megabytes", 2, "--exits", "project")
    assert "the share of tokens that continue is not known: run isobatch prepare" in call("plan", DEMO, *options)
    known = load_text_profile(profile)
    workload = replace(known.workload, survival=((0, 0.2), (1, 0.1)), projected=((1, 0.15),))
    save_text_profile(replace(known, workload=workload), profile)
    assert "the time of projection on cpu is not known" in call("plan", DEMO, *options)
    save_text_profile(replace(known, workload=workload, tables=(replace(known.tables[0], projects=True),)), profile)
    assert "behind block 1 of 8 (project)" in call("plan", DEMO, *options, "--out", plan)
    assert serve_file(DEMO, {"plan": str(plan)})["applications"][0]["args"]["plan"] == str(plan)
    simulated = call("simulate", "--config", DEMO, "--plan", plan, "--rate", 20, "--hours", 0.002)
    assert "was not measured here yet" in simulated


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("plan", DEMO, "--exits", "project"), "was not measured here yet: run isobatch profile"),
        (("plan", DEMO, "--slo-ms", "3"), "--slo-ms is for classifiers"),
        (("plan", DEMO, "--exits", "some"), "must be recompute, verified, project or off"),
        (("plan", DEMO, "--goal", "cost"), "the goal cost needs --rate"),
        (("plan", DEMO, "--goal", "goodput", "--rate", "5"), "--goal goodput is not for a rate, which is sustained at"),
        (("plan", DEMO, "--rate", "inf"), "--rate inf must be above 0, and finite"),
        (("plan", DEMO, "--goal", "goodput-per-dollar"), "--goal goodput-per-dollar is for classifiers"),
        (("plan", "./nowhere"), "nowhere: no such directory; give that of a decoder"),
        (("plan", DEMO, "--profile", "nowhere.json"), "cannot read nowhere.json"),
        (("plan", "--tpot-ms", "3"), "--tpot-ms is for decoders"),
        (("plan",), "--profile and --devices are needed"),
        (("profile", DEMO, "--largest", "3"), "--largest is for classifiers"),
        (("profile", DEMO, "--dtype", "int8"), "dtype 'int8' is not known; use one of float32, float16, bfloat16"),
        (("simulate", "--config", DEMO, "--rate", "1"), "there is no plan"),
        (("simulate", "--config", DEMO, "--rate", "1", "--mix", "0:0.5"), "--mix is for classifiers"),
    ],
)
def test_what_is_missing_or_wrong_is_one_sentence(call: Called, options: tuple[object, ...], said: str) -> None:
    assert said in call(*options)


def test_one_sentence_names_all_steps_to_a_plan(call: Called, tmp_path: Path) -> None:
    """Of a network without ramps: to a plan without exits, and to one that needs what only prepare measures."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO / name)
    assert f"was not measured here yet: run isobatch profile {tmp_path}" in call("plan", tmp_path)
    steps = "--data FILE --out OUT, isobatch profile OUT and isobatch plan OUT --exits project"
    assert f"run isobatch prepare {tmp_path} {steps}" in call("plan", tmp_path, "--exits", "project")


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda:99", r"device = 'cuda:99': this machine has \w+ GPUs?: with device cpu, processors compute the network"),
        ("mps", "device 'mps' is not known; use auto, cpu, cuda or cuda:0"),
        ("meta", "device 'meta' is not known"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["prepare", DEMO, "--data", "prompts.csv", "--out", "out"],
        ["profile", DEMO],
        ["evaluate", DEMO, "--data", "prompts.csv"],
        ["predict", "prompts.csv", "--model", DEMO, "--out", "out.csv"],
        ["bench", DEMO],
        ["cascade", DEMO, DEMO, "--data", "prompts.csv", "--out", "out", "--devices", "cpu=1"],
    ],
)
def test_an_absent_device_is_refused_first(call: Called, command: list[object], device: str, said: str) -> None:
    assert re.search(said, call(*command, "--device", device))


def test_a_measured_decoder_is_planned_without_saying_more(call: Called, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    output = call("profile", "llm-demo", "--timing-s", "0.1", "--devices", "h100", "--out", out)
    assert "and kept for isobatch plan llm-demo" in output
    for demo in ("llm-demo", DEMO):
        assert re.search("even alone, tokens of a text take .* on cpu", call("plan", demo, "--tpot-ms", "1e-6"))
    (timed,) = (table for table in load_text_profile(out).tables if not table.estimated)
    assert timed.residents
    assert "on h100" in call("plan", DEMO, "--tpot-ms", "1e-6", "--devices", "h100=2")


def test_a_network_that_is_not_prepared_is_profiled_with_assumed_lengths(tmp_path: Path) -> None:
    workload = workload_of(DecoderRules(), tmp_path, 64)
    assert (workload.survival, workload.prompts, workload.outputs) == ((), (16,), (16,))
    assert workload_of(DecoderRules(), tmp_path, 100_000).prompts == (128,)
    assert workload_of(DecoderRules(), tmp_path, 2).prompts == (1,)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "model_type is gpt2: of decoders, llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantized .gptq.: decoders are served in"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type is longrope, which depends on a text's length"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope_type is dynamic, which depends"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "su"}}, "rope_type is su, which"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "attention is chunked_attention: full_attention"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true: such networks are not served"),
        ({"rope_scaling": "longrope"}, "config.json: rope_scaling: Input should be an object"),
        ({"num_hidden_layers": "many"}, "config.json: num_hidden_layers: Input should be a valid integer"),
    ],
)
@pytest.mark.parametrize("command", ["prepare", "profile", "plan", "serve"])
def test_configs_are_refused(tmp_path: Path, call: Called, config: dict[str, Any], sentence: str, command: str) -> None:
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(llama | config))
    (tmp_path / "prompts.csv").write_text("text\none\n")
    options = {"prepare": ["--data", tmp_path / "prompts.csv", "--out", tmp_path / "out"]}.get(command, [])
    assert re.search(sentence, call(command, tmp_path, *options))


@pytest.mark.parametrize("wrong", [{"hidden_size": None}, {"hidden_size": 30}, {"num_attention_heads": 0}])
def test_a_config_that_the_library_refuses_is_one_sentence(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4} | wrong))
    with pytest.raises(UserError, match=r"its config.json cannot be read: \w.*") as refused:
        decoder_shape(tmp_path)
    assert "\n" not in str(refused.value)


def test_an_architecture_that_is_no_list_names_no_decoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": 3}')
    assert not is_decoder(tmp_path)


def test_a_decoder_is_profiled_and_served_in_the_precision_of_its_ramps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    assert usual_dtype(tmp_path, "cpu") == "float32"
    (tmp_path / "exits.json").write_text('{"dtype": "float16"}')
    assert usual_dtype(tmp_path, "cpu") == "float16"
    assert in_its_precision(DecoderConfig(model=str(tmp_path))).dtype == "float16"
    assert in_its_precision(DecoderConfig(model=str(tmp_path), dtype="float32")).dtype == "float32"
