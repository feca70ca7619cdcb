"""A directory, a Serve file or nothing becomes one Serve file; what is wrong is said before anything starts."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from isobatch.cluster.cli import app
from isobatch.cluster.commands.deploy import check_unchanged, kept_plans
from isobatch.cluster.commands.serve import example, fronts_of
from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.serving.applications import beside
from isobatch.cluster.serving.serve_file import (
    APPLICATION,
    CONTROLLER,
    DECODER,
    ROOT,
    check_ports,
    grpc_addresses,
    only,
    serve_file,
    served,
    with_demo,
    with_grpc,
)
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.decoding.ramp_rules import DecoderRules
from isobatch.deployments.folders import ramps_of, weights_of
from isobatch.deployments.graph import plan_hash
from isobatch.deployments.models.checkpoint import check_index
from isobatch.deployments.models.ramps import read_rules
from isobatch.deployments.named import VIRTUAL, built_in, demo_folder
from isobatch.deployments.ray_facts import StoredPlan
from isobatch.optimizer.plan import DecodingTerms, Placement, Plan, Split, read_plan
from isobatch.profiles.errors import MOST_YAML_BYTES, UserError, read_model
from isobatch.profiles.files import load, save
from isobatch.profiles.promise import RULES
from isobatch.profiles.text_profile import load_text_profile
from tests.helpers.commands import ran


def test_a_directory_and_the_demo_become_one_application(tmp_path: Path) -> None:
    content = serve_file(tmp_path, {"device": "cuda"})
    (application,) = content["applications"]
    assert application["import_path"] == APPLICATION
    assert application["args"] == {"model": str(tmp_path), "device": "cuda"}
    assert content["http_options"] == {"host": "127.0.0.1", "port": 8000}
    for demo in (None, Path("demo")):
        assert serve_file(demo, {"device": "cpu"})["applications"][0]["args"] == {"device": "cpu"}


def test_the_demos_are_named_in_a_file_too_unless_a_directory_has_the_name(tmp_path: Path) -> None:
    file, applications = tmp_path / "serve.yaml", (("demo", APPLICATION), ("llm-demo", DECODER))
    named = [{"name": name, "import_path": path, "args": {"model": name}} for name, path in applications]
    for application in named:
        file.write_text(yaml.safe_dump({"applications": [application]}))
        arguments = serve_file(file, {})["applications"][0]["args"]
        assert arguments == {"name": application["name"], "model": str(built_in(application["name"]))}
    (tmp_path / "demo").mkdir()
    file.write_text(yaml.safe_dump({"applications": named[:1]}))
    assert serve_file(file, {})["applications"][0]["args"] == {"model": str(tmp_path / "demo")}


def test_a_field_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """YAML's reader would take the last one, and say nothing of the other."""
    file = tmp_path / "serve.yaml"
    common = f"import_path: {APPLICATION}, args: {{device: cpu"
    file.write_text(f"applications:\n  - {{{common}, slo_ms: 50,\n     slo_ms: 100}}}}\n")
    with pytest.raises(UserError, match=r"serve\.yaml cannot be read as YAML: line 3: slo_ms is there twice: keep one"):
        serve_file(file, {})
    file.write_text(f"applications:\n  - &one {{name: a, {common}}}}}\n  - {{<<: *one, name: b, route_prefix: /b}}\n")
    assert [each["name"] for each in serve_file(file, {})["applications"]] == ["a", "b"]


def test_a_head_of_several_numbers_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"problem_type": "regression"}')
    with pytest.raises(UserError, match="regression with 2 outputs: only heads that give labels or one number are"):
        serve_file(tmp_path, {})
    serve_file(tmp_path, {"loader": "tests.helpers.toy_model:load"})  # whose loader knows better
    (tmp_path / "config.json").write_text('{"problem_type": "regression", "id2label": {"0": "score"}}')
    serve_file(tmp_path, {})
    (tmp_path / "config.json").write_text('{"problem_type": "regression", "id2label": null, "num_labels": 1}')
    serve_file(tmp_path, {})


DEMO = ROOT / "cluster" / "demo"
DEEP = "[" * 100_000
RAMP = '{"ramps": [{"block": 0, "threshold": %s}]}'


@pytest.mark.parametrize(
    ("name", "content", "read", "sentence"),
    [
        ("plan.json", DEEP, read_plan, "is not JSON: it is nested too deeply"),
        ("profile.json", DEEP, load, "is not JSON: it is nested too deeply"),
        ("profile.json", DEEP, load_text_profile, "nested too deeply"),
        ("config.json", DEEP, lambda path: serve_file(path.parent, {}), "is not JSON: it is nested too deeply"),
        ("config.json", "[]", lambda path: serve_file(path.parent, {}), "config.json must be a JSON object, got list"),
        ("config.json", '{"a": ', lambda path: serve_file(path.parent, {}), "is not JSON: Expecting value"),
        ("exits.json", DEEP, read_rules, "is nested too deeply"),
        ("exits.json", "[]", read_rules, "Input should be an object"),
        ("exits.json", RAMP % "NaN", read_rules, "threshold: Input should be a finite number"),
        ("exits.json", RAMP % "1e999", read_rules, "threshold: Input should be a finite number"),
        ("exits.json", RAMP % "NaN", partial(read_model, model=DecoderRules), "should be a finite number"),
        ("exits.json", '{"treshold": 1}', partial(read_model, model=DecoderRules), "treshold: there is no such field"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../../etc/passwd"}}',
         lambda path: check_index(path.parent), "'../../etc/passwd', which is not a file of this directory"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_sentence(
    tmp_path: Path, name: str, content: str, read: Callable[[Path], object], sentence: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_batch_that_no_device_computes_is_refused_in_plans_and_profiles(tmp_path: Path) -> None:
    for name, read in (("plan.json", read_plan), ("profile.json", load)):
        largest = re.sub(r'("batch_sizes?": (?:\[[^\]]*, )?)\d+', r"\g<1>1000000000000", (DEMO / name).read_text())
        (tmp_path / name).write_text(largest)
        with pytest.raises(UserError, match="1000000000000"):
            read(tmp_path / name)


def test_a_device_is_read_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"serve\.yaml: it is a device, not a file"):
        serve_file(tmp_path / "serve.yaml", {})


def test_without_a_file_the_demo_has_two_splits_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    application, controller = serve_file(None, {})["applications"]
    assert len(read_plan(Path(application["args"]["plan"])).splits) == 2
    assert ControllerConfig.model_validate(controller["args"]).application == application["name"]


def test_a_directory_with_a_plan_gets_a_controller_and_what_the_plan_was_made_for(tmp_path: Path) -> None:
    plan = replace(read_plan(DEMO / "plan.json"), slo_s=0.07, backend="onnx", dtype="int8")
    (tmp_path / "plan.json").write_text(plan.to_json())
    files = {"plan": str(tmp_path / "plan.json"), "profile": str(DEMO / "profile.json")}
    application, controller = serve_file(tmp_path, files)["applications"]
    assert application["args"] == {"model": str(tmp_path), "replan": True} | files
    assert ControllerConfig.model_validate(controller["args"]).application == application["name"]
    config = checked(AppConfig, application["args"])
    assert (config.slo_ms, config.backend, config.dtype) == (70.0, "onnx", "int8")
    settings = checked(AppConfig, application["args"] | {"slo_ms": 90.0, "backend": VIRTUAL, "dtype": "float32"})
    assert (settings.slo_ms, settings.backend, settings.dtype) == (90.0, VIRTUAL, "float32")
    published = replace(plan, backend="tensorrt", dtype="float16")  # nothing here computes by that
    (tmp_path / "plan.json").write_text(published.to_json())
    config = checked(AppConfig, application["args"])
    assert (config.backend, config.dtype) == ("torch", "float32")


def test_what_is_written_as_a_file_is_served_alike(tmp_path: Path) -> None:
    out, files = tmp_path / "serve.yaml", ["--plan", str(DEMO / "plan.json"), "--profile", str(DEMO / "profile.json")]
    out.write_text("old")
    (tmp_path / "kept").hardlink_to(out)
    output = CliRunner().invoke(app, ["serve", "demo", *files, "--port", "9000", "--grpc-port", "0", "--out", str(out)])
    assert f"isobatch deploy {out}" in output.stderr
    assert (tmp_path / "kept").read_text() == "old", "the file is replaced whole"
    again = serve_file(out, {})
    assert again["http_options"] == {"host": "127.0.0.1", "port": 9000}
    assert again["applications"] == serve_file(Path("demo"), {"plan": files[1], "profile": files[3]})["applications"]


def test_controllers_need_the_key_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    files = ("--plan", DEMO / "plan.json", "--profile", DEMO / "profile.json")
    ran("serve", "demo", *files, "--out", out := tmp_path / "serve.yaml")
    for target, options in ((Path("demo"), files), (out, ())):
        ran("serve", target, *options, "--api-key-variable", "KEY", "--out", again := tmp_path / "again.yaml")
        keys = [each["args"]["api_key_variable"] for each in yaml.safe_load(again.read_text())["applications"]]
        assert keys == ["KEY", "KEY"]


@pytest.mark.parametrize("free", [True, False])
def test_a_file_says_of_grpc_only_what_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: bool) -> None:
    monkeypatch.setattr("isobatch.cluster.serving.ports.is_free", lambda *_: free)
    out, fields = tmp_path / "serve.yaml", {"--grpc-port": "9001", "--host": "10.0.0.1"}
    for options, port in (([], None), ([each for one in fields.items() for each in one], 9001)):
        ran("serve", "demo", *options, "--out", out)
        assert serve_file(out, {})["applications"][0]["args"].get("grpc_port") == port


def test_options_of_a_server_are_refused_where_only_a_file_is_written(tmp_path: Path) -> None:
    for option, *value in (["--dashboard"], ["--metrics-port", 9464], ["--patience-s", 60]):
        with pytest.raises(UserError, match=f"{option} is for a server that starts here: --out only writes a file"):
            ran("serve", "demo", option, *value, "--out", tmp_path / "serve.yaml")
    with pytest.raises(UserError, match="--patience-s is for a start: leave it out with --check"):
        ran("deploy", tmp_path / "serve.yaml", "--check", "--patience-s", 60)
    for command in (("serve", "demo"), ("deploy", tmp_path / "serve.yaml")):
        with pytest.raises(UserError, match="--patience-s -1 must be above 0"):
            ran(*command, "--patience-s", -1)


def test_a_plan_that_stays_though_its_file_has_new_content_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve starts nothing anew while `args:` stay the same."""
    from isobatch.deployments import ray_facts

    path = tmp_path / "plan.json"
    path.write_text((DEMO / "plan.json").read_text())
    content = serve_file("demo", {"plan": str(path), "profile": str(DEMO / "profile.json")})
    before = plan_hash(AppConfig(**content["applications"][0]["args"]))
    running = StoredPlan("isobatch.3f9a01", before, 0, path.read_text())
    monkeypatch.setattr(ray_facts, "stored_plan", {"isobatch": running}.get)
    assert list(kept_plans(content)) == []
    path.write_text(path.read_text() + " ")
    assert list(kept_plans(content)) == ["isobatch"]
    without_plan = [content["applications"][0] | {"args": {}}]
    assert list(kept_plans({"applications": without_plan})) == []


def test_a_decoder_that_keeps_its_plan_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve

    def plan_of(residents: int) -> Plan:
        terms = DecodingTerms("off", 64, 8, 1.0, 0.1)
        return Plan((Placement("cpu", 1, (Split(0, 8, residents),)),), decoding=terms)

    def front_with(first: Plan | None) -> SimpleNamespace:
        answer = SimpleNamespace(result=lambda timeout_s: first)
        return SimpleNamespace(first=SimpleNamespace(remote=lambda: answer))

    fronts = dict[str, SimpleNamespace]()
    monkeypatch.setattr(serve, "get_deployment_handle", lambda deployment, application: fronts[application])
    (path := tmp_path / "plan.json").write_text(plan_of(4).to_json())
    content = {"applications": [{"name": "texts", "import_path": DECODER, "args": {"model": "x", "plan": str(path)}}]}
    assert list(kept_plans(content)) == [], "it does not answer"
    fronts["texts"] = front_with(plan_of(8))
    assert list(kept_plans(content)) == ["texts"]
    fronts["texts"] = front_with(plan_of(4))
    assert list(kept_plans(content)) == []


def test_a_deploy_that_another_one_replaced_meanwhile_fails() -> None:
    shop, plain = {"name": "shop", "args": {"slo_ms": 100}}, {"name": "plain"}
    check_unchanged([shop, plain], [shop, plain | {"args": {}}, {"name": "other", "args": {"slo_ms": 7}}])
    for theirs in ([plain], [shop | {"args": {"slo_ms": 200}}, plain]):
        with pytest.raises(UserError, match="another deploy has changed or ended shop meanwhile"):
            check_unchanged([shop, plain], theirs)


def test_a_file_with_applications_of_other_programs_only_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = list[dict[str, Any]]()
    monkeypatch.setattr("isobatch.cluster.commands.serve.run", lambda content, *_: served.append(content))
    ran("serve", written(tmp_path, {"applications": [theirs := {"name": "theirs", "import_path": "theirs:app"}]}))
    assert served[0]["applications"] == [theirs]
    for option in (("--slo-ms", 5), ("--grpc-port", 9000), ("--profile", DEMO / "profile.json")):
        with pytest.raises(UserError, match=f"{option[0]} is for applications of isobatch, and the file has none"):
            ran("serve", tmp_path / "serve.yaml", *option)


def test_a_profile_that_no_plan_was_made_from_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.cluster.commands.serve.run", lambda *_: None)
    files = ("--profile", DEMO / "profile.json", "--plan", DEMO / "plan.json")
    ran("serve", "demo", *files)
    for out in ((), ("--out", "serve.yaml")):
        with pytest.raises(UserError, match=r"--profile .*/profile.json is for a plan: give --plan too"):
            ran("serve", "demo", *files[:2], *out)


def written(folder: Path, content: str | dict[str, Any]) -> Path:
    (file := folder / "serve.yaml").write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def a(name: str, prefix: str, path: str = APPLICATION, **arguments: Any) -> dict[str, Any]:
    """An application of a Serve file."""
    return {"name": name, "import_path": path, "route_prefix": prefix, "args": arguments}


def test_applications_of_others_are_left_alone(tmp_path: Path) -> None:
    text = "applications: [{name: other, import_path: 'a:b', args: {c: 1}}]\nhttp_options: {port: 9}"
    content = serve_file(written(tmp_path, text), {"device": "cpu"})
    assert content["applications"] == [{"name": "other", "import_path": "a:b", "args": {"c": 1}}]
    assert content["http_options"] == {"host": "127.0.0.1", "port": 9}


def one(path: str = APPLICATION, **fields: str) -> str:
    """A Serve file with one application, which has these fields."""
    return f"applications: [{{import_path: '{path}'{''.join(f', {name}: {each}' for name, each in fields.items())}}}]"


CONTROLLED = f"applications: [{{name: isobatch, import_path: '{APPLICATION}'}}, {{name: c, route_prefix: /c, "


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: b: c", "cannot be read as YAML"),
        ("just text", "needs a list 'applications:'"),
        ("applications: []", "needs a list 'applications:'"),
        ("applications: [{import_path: 5}]", "import_path = 5: every"),
        ("devices: {t4: 1}\napplications: [{name: a, profile: b.json}]", "is the file of a fleet: 'isobatch plan "),
        (str(["x"] * MOST_YAML_BYTES), "has more than 64,000 bytes: is it the right file?"),
        (one() + "\nhttp_options: {ssl_keyfile: k}", "speaks no TLS"),
        (one() + "\ntarget_capacity: 50", "target_capacity has no effect"),
        (one() + "\nhttp_options: {port: 70000}", "http_options: port = 70000: "),
        (one() + "\nhttp_options: {port: null}", "http_options: port = None: "),
        (one() + "\nhttp_option: {port: 9}", "is 'http_options' meant"),
        (one() + "\nhttp_options: {prot: 9}", "http_options: there is no field 'prot'; is 'port' meant?"),
        (one() + "\n7: 8", "no field 7; there are: applications, contr"),
        (one(route_prefix="a"), "applications: route_prefix = 'a': "),
        (one(route_prefix="/a/"), "applications: route_prefix = '/a/': '/a/' must begin with / and not end with it"),
        (one(route_prefix="/my app"), "applications: route_prefix = '/my app': "),
        (one(name="''"), "applications: name = '': "),
        (one() + "\nhttp_options: {host: ''}", "http_options: host = '': "),
        (one(name="[x]"), r"applications: name = \['x'\]: Input should be a valid string"),
        (one(rout_prefix="/a"), "'rout_prefix'; is 'route_prefix' meant"),
        (one(deployments="[{name: split}]"), "reaches front, network, deployer only"),
        (one(deployments="{front: 1}"), "deployments: must be a list"),
        (one(args="{model: /nowhere}"), "'/nowhere': no such"),
        (one(args='{plan: "a\\0b"}'), "is not a path"),
        (one(args="{links: {v100: 1}}"), "args: links.v100 = 'v100': "),
        (one(args="{slo_ms: .inf}"), "slo_ms = inf: Input should be a finite number"),
        (one(args="{max_batch: 1000000000000}"), "max_batch = 1000000000000: Input should be less than or equal to "),
        *(
            (one(misspelt), f"import_path = '{misspelt}': .* is '{APPLICATION}' meant")
            for misspelt in ("isobatch.deployments.app:biuld", "deployment.app:build", "deployments.apps:build")
        ),
        (one(CONTROLLER, args="{replan_evry_s: 1}"), "no field 'replan_evry_s'; there are: replan_every_s, "),
        (f"{CONTROLLED}import_path: '{CONTROLLER}', args: {{devices: {{v100: -1}}}}}}]", "devices.v100"),
        (
            f"{CONTROLLED}import_path: '{CONTROLLER}', args: {{api_key_variable: NO_SUCH_KEY}}}}]",
            "api_key_variable = 'NO_SUCH_KEY': that environment variable is not set",
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        serve_file(written(tmp_path, text), {})
    assert "\n" not in str(error.value)


def test_a_controller_without_arguments_controls_the_application_of_the_usual_name(tmp_path: Path) -> None:
    file = written(tmp_path, f"{CONTROLLED}import_path: '{CONTROLLER}'}}]")
    _, controller = only("isobatch", serve_file(file, {}))["applications"]
    assert (controller["name"], controller["args"]) == ("c", {})


def test_ports_that_are_written_as_texts_are_numbers(tmp_path: Path) -> None:
    text = one(args="{grpc_port: '8001'}") + "\nhttp_options: {port: '9', root_path: /b}"
    content = serve_file(written(tmp_path, text), {})
    assert content["http_options"] == {"host": "127.0.0.1", "port": 9, "root_path": "/b"}
    assert grpc_addresses(content) == [("127.0.0.1", 8001)]


def test_relative_paths_are_from_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    file = written(tmp_path / "here", one(args="{model: model}"))
    for place in (tmp_path, tmp_path / "here" / "model"):
        monkeypatch.chdir(place)
        for named in (file, Path(os.path.relpath(file))):
            (application,) = serve_file(named, {})["applications"]
            assert application["args"]["model"] == str(tmp_path / "here" / "model")


def test_a_path_that_is_not_there_or_of_another_kind_is_named() -> None:
    with pytest.raises(UserError, match="/nowhere/at/all: no such directory or file"):
        serve_file(Path("/nowhere/at/all"), {})
    with pytest.raises(UserError, match="is not a profile of a decoder"):
        serve_file(Path("llm-demo"), {"profile": str(DEMO / "profile.json")})


@pytest.mark.parametrize(("option", "value"), [("--max-batch", 8), ("--slo-ms", 50), ("--backend", "onnx")])
def test_an_option_of_classifiers_is_refused_for_a_decoder(tmp_path: Path, option: str, value: object) -> None:
    with pytest.raises(
        UserError, match=f"^{option} is for classifiers, and the application isobatch is a decoder: its own"
    ):
        ran("serve", "llm-demo", option, value, "--out", tmp_path / "serve.yaml")


def test_the_profile_and_the_plan_of_another_network_of_the_same_depth_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile, plan = load(DEMO / "profile.json"), read_plan(DEMO / "plan.json")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    mine = weights_of(tmp_path / "model")

    def served(profile_of: str, plan_of: str, **more: str) -> None:
        save(replace(profile, model=f"m{profile_of}", weights=profile_of), tmp_path / "profile.json")
        named = replace(plan, model=f"m{plan_of}", weights=plan_of)
        (tmp_path / "plan.json").write_text(named.to_json())
        arguments = {"model": "model", "profile": "profile.json", "plan": "plan.json", **more}
        serve_file(written(tmp_path, {"applications": [a("a", "/", **arguments)]}), {})

    served(mine, mine)
    served("", "")  # of an earlier version, which did not say
    profile = replace(profile, ramps=ramps_of(tmp_path / "model"))
    served(mine, mine)
    assert not caplog.text
    (tmp_path / "model" / RULES).write_text('{"head_temperature": 2.0, "notes": {}}')
    served(mine, mine)
    assert "exits that were counted with other ramps than" in caplog.text
    with pytest.raises(UserError, match=r"plan\.json: this command uses that file"):
        ran("serve", tmp_path / "serve.yaml", "--out", tmp_path / "plan.json")
    with pytest.raises(UserError, match=f"is of mother .*/model has other weights .{mine}"):
        served("other", mine)
    for profile_of in (mine, ""):
        with pytest.raises(UserError, match=f"plan.json is of mother .*/model has other weights .{mine}"):
            served(profile_of, "other")
    with pytest.raises(UserError, match=rf"is for mother \(weights other\), .* is of m{mine}"):
        served(mine, "other", backend="virtual")


@pytest.mark.parametrize(
    ("told", "port", "free", "found"),
    [
        ({}, None, True, [("127.0.0.1", 8001)]),
        ({}, None, False, []),
        ({}, 9001, False, [("127.0.0.1", 9001)]),
        ({}, 0, True, []),
        ({"grpc_port": 9001}, None, False, [("127.0.0.1", 9001)]),
        ({"grpc_port": 9001}, 0, True, []),
        ({"grpc_port": 9001, "grpc_host": "0.0.0.0"}, 9002, True, [("0.0.0.0", 9002)]),
    ],
)
def test_the_port_of_grpc(told: dict[str, Any], port: int | None, free: bool, found: list[tuple[str, int]]) -> None:
    application = {"name": "isobatch", "import_path": APPLICATION, "args": told}
    content = with_grpc({"applications": [application]}, None, port, lambda *_: free)
    assert grpc_addresses(content) == found
    assert application["args"] == told, "what was given stays as it was"


# Several applications


def test_the_usual_port_of_grpc_is_left_to_the_application_that_names_it() -> None:
    content = {"applications": [a("first", "/1"), a("second", "/2", grpc_port=8001)]}
    assert grpc_addresses(with_grpc(content, None, None, lambda *_: True)) == [("127.0.0.1", 8001)]
    assert len(grpc_addresses(with_grpc(content, None, 8002, lambda *_: True))) == 2
    everywhere = with_grpc(content, "0.0.0.0", 8002, lambda *_: True)
    assert grpc_addresses(everywhere) == [("0.0.0.0", 8002), ("0.0.0.0", 8001)]
    assert grpc_addresses(with_grpc(content, None, 0, lambda *_: True)) == []
    with pytest.raises(UserError, match="grpc_port = 8001: two applications"):
        with_grpc(content, None, 8001, lambda *_: True)


def test_http_and_grpc_have_ports_of_their_own() -> None:
    content = {"applications": [a("first", "/")], "http_options": {"port": 8001}}
    assert grpc_addresses(with_grpc(content, None, None, lambda *_: True)) == []
    with pytest.raises(UserError, match="port = 8001: HTTP and gRPC cannot have the same"):
        with_grpc(content, None, 8001, lambda *_: True)
    with pytest.raises(UserError, match="port = 8000: HTTP and gRPC cannot have the same"):
        check_ports({"applications": [a("first", "/", grpc_port=8000)]})


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ([a("first", "/2")], "name = 'first': two applications cannot have the same"),
        ([a("first.240601.canary", "/2")], "name = 'first.240601.canary': replicas of first have such names: choose a"),
        ([a("second", "/1")], "route_prefix = '/1': two"),
        ([{"name": name, "import_path": f"{name}:c"} for name in ("second", "third")], "prefix = '/': two"),
        ([a("second", "/2", grpc_port=9001)], "grpc_port = 9001: two"),
        ([a("second", "/2", canary={"application": "third"})], "second: canary: application = 'third': .* are first"),
        (
            [a("second", "/2", canary={"application": "first"}, predict_form="tei")],
            "second: canary: application = 'first': clients could not read its answers: give both the same",
        ),
        ([a("c", "/c", CONTROLLER, application="third")], "application = 'third': c would control none of .*: first"),
        (
            [a(name, f"/{name}", CONTROLLER, application="first") for name in ("c", "d")],
            "args: application = 'first': two controllers cannot lead one application",
        ),
    ],
)
def test_what_two_applications_share_is_one_line(tmp_path: Path, others: list[dict[str, Any]], sentence: str) -> None:
    file = written(tmp_path, {"applications": [a("first", "/1", grpc_port=9001), *others]})
    with pytest.raises(UserError, match=sentence):
        serve_file(file, {})


def test_what_runs_there_is_kept_or_ended_as_is_told() -> None:
    fields, running = {"applications": [a("new", "/new")]}, [a("new", "/old"), a("other", "/other", grpc_port=9001)]
    with pytest.raises(UserError, match=r"^other: running there and not in the file: --others keep"):
        beside(fields, running, None)
    assert beside(fields, running, "keep")["applications"] == [running[1], *fields["applications"]]
    assert beside(fields, running, "end") == fields == beside(fields, running[:1], None)
    with pytest.raises(UserError, match="grpc_port = 9001"):
        beside({"applications": [a("new", "/new", grpc_port=9001)]}, running, "keep")


# The request that is shown after the start


def body_for(folder: Path, config: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    request = example(serve_file(folder, {}))
    return None if request is None else json.loads(request[1])["inputs"]


def test_each_application_is_asked_with_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    texts = a("texts", "/texts", DECODER, model="llm-demo", api_key_variable="KEY")
    content = {"applications": [a("open", "/"), texts]}
    assert fronts_of("http://h:1", content) == {
        "open": ("http://h:1", {}), "texts": ("http://h:1/texts", {"X-API-Key": "secret"}),
    }  # fmt: skip
    assert example(content)[0::2] == ("/texts/v1/completions", "KEY")


def test_the_demo_is_asked_about_a_digit() -> None:
    request = example(serve_file(None, {}))
    (image,) = json.loads(request[1])["inputs"]
    assert [len(row) for row in image] == [8] * 8
    assert max(map(max, image)) == 16


def test_a_checkpoint_is_asked_about_what_it_reads(tmp_path: Path) -> None:
    assert body_for(tmp_path, {"vocab_size": 10}) == ["a text to be classified"]
    labels_words = {"vocab_size": 10, "architectures": ["BertForTokenClassification"]}
    assert body_for(tmp_path, labels_words) == ["a text whose words are to be labelled"]
    assert body_for(tmp_path, {"num_channels": 1, "image_size": 2}) == [[[0.5, 0.5], [0.5, 0.5]]]
    (image,) = body_for(tmp_path, {"num_channels": 3})
    assert (len(image), len(image[0]), image[0][0]) == (224, 224, [0.5, 0.5, 0.5])
    assert body_for(tmp_path, {"model_type": "other"}) is None


def test_the_demo_stands_where_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.deployments.named.DEMO", "tempfile:gettempdir")
    content = serve_file(None, {"max_batch": 4})
    complete = with_demo(content)
    arguments = complete["applications"][0]["args"]
    assert Path(arguments.pop("model")).is_dir()
    assert arguments.pop("name") == "demo"
    assert complete == content
    named = serve_file(tmp_path, {})
    assert with_demo(named) == named
    own = serve_file(written(tmp_path, one(args="{loader: 'shop.models:load'}")), {})
    assert with_demo(own) == own, "the demo's promise is not that of another network"


def test_options_of_the_command_override_the_file_and_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "serve.yaml"
    ran("serve", "demo", "--dtype", "bfloat16", "--backend", "onnx", "--slo-ms", 50, "--max-batch", 8, "--out", out)
    (application,) = serve_file(out, {})["applications"]
    config = checked(AppConfig, application["args"])
    assert (config.dtype, config.backend, config.slo_ms, config.max_batch) == ("bfloat16", "onnx", 50.0, 8)
    files = ("--plan", DEMO / "plan.json", "--profile", DEMO / "profile.json")
    with pytest.raises(UserError, match="max_batch cannot be set beside a plan"):
        ran("serve", "demo", *files, "--max-batch", 8, "--out", out)
    copytree(demo_folder(), model := tmp_path / "model")
    for name in ("plan.json", "profile.json"):
        (model / name).write_text((DEMO / name).read_text())
    planned = []
    for options in ((), ("--replicas", 2)):
        ran("serve", model, *options, "--out", out)
        planned.append("plan" in served(serve_file(out, {}))[0]["args"])
    assert planned == [True, False], "replicas are for serving without the plan in the folder"


def test_a_model_without_a_plan_is_computed_on_a_gpu_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = list[dict[str, Any]]()
    monkeypatch.setattr("isobatch.cluster.commands.serve.run", lambda content, *_: served.append(content))
    monkeypatch.setattr("isobatch.cluster.commands.serve.gpus_here", lambda: 1)
    for name in ("plan.json", "profile.json"):
        (tmp_path / name).write_text((DEMO / name).read_text())
    copytree(demo_folder(), model := tmp_path / "model")
    files = ("--plan", tmp_path / "plan.json", "--profile", tmp_path / "profile.json")
    for options in ((model,), (model, "--device", "cpu"), (model, "--replicas", 2), (model, *files), ()):
        ran("serve", *options, "--grpc-port", 0)
    devices = [content["applications"][0]["args"].get("device") for content in served]
    assert devices == ["cuda", "cpu", "cuda", None, None]
