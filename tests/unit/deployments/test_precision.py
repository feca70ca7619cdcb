"""What replicas compute is what the tables of the plan say: one precision, whether or not the user names one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.planner.networks import distilbert
from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.input_planning import allowed
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.graph import profile_of, read_graph
from isobatch.deployments.replica import loading
from isobatch.deployments.replica.loading import load_model
from isobatch.profiles.curves import curve_table
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable
from tests.helpers.toy_model import Toy

DTYPES = ("float32", "float16")
FLEET = {"v100": 1, "p100": 1}
SIZES = (1, 2)  # of batches: plans are made often, and only their precision is looked at


def derived(kind: str) -> list[LatencyTable]:
    """As `isobatch profile --devices` makes them."""
    made = [(backend, dtype) for backend in ("torch", "onnx") for dtype in DTYPES]
    return [curve_table(distilbert(), kind, backend=backend, dtype=dtype, batch_sizes=SIZES) for backend, dtype in made]


def measured(kind: str, dtype: str, backend: str = "torch") -> LatencyTable:
    return replace(derived("v100")[0], kind=kind, backend=backend, dtype=dtype, source="measured: here")


def config_with(
    folder: Path, tables: list[LatencyTable], ramps: str = "", stored: str = "", **told: object
) -> AppConfig:
    """Of a Serve file for a network whose ramps were made for `ramps`, and with weights `stored` in one."""
    (folder / "config.json").write_text(json.dumps({"dtype": stored} if stored else {}))
    if ramps:
        (folder / "exits.json").write_text(json.dumps({"dtype": ramps}))
    survival = tuple(0.9**block for block in range(tables[0].num_blocks))
    save(Profile("distilbert", tuple(tables), ExitProfile(survival)), folder / "profile.json")
    planned = {} if "plan" in told else {"max_batch": max(SIZES)}
    return checked(AppConfig, {"model": str(folder), "profile": str(folder / "profile.json"), **planned, **told})


def computed_on(kind: str, config: AppConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    """The precision in which a replica on this kind loads the network."""
    calls: list[str] = []

    def loader(directory: str, device: str, dtype: str) -> Toy:
        calls.append(dtype)
        return Toy()

    monkeypatch.setattr(loading, "function_at", lambda path: loader)
    load_model(config, kind, str(config.model))
    return calls[0]


@pytest.mark.parametrize(
    ("ramps", "stored", "told", "expected"),
    [
        ("float16", "", {}, "float16"),
        ("float16", "float32", {"dtype": "float32"}, "float32"),
        ("float32", "float16", {}, "float32"),
        ("int8", "", {}, "float32"),
        ("", "float16", {}, "float16"),
        ("", "bfloat16", {}, "float32"),
        ("", "", {}, "float32"),
        ("float16", "", {"backend": "auto"}, "float16"),
        ("float32", "", {"backend": "auto", "dtype": "float16"}, "float16"),
    ],
)
def test_a_plan_that_is_made_at_the_start_is_for_the_precision_that_replicas_compute_in(
    ramps: str, stored: str, told: dict[str, object], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(tmp_path, derived("v100") + derived("p100"), ramps, stored, devices=FLEET, **told)
    assert read_graph(config).plan.dtype == expected
    for kind in FLEET:
        assert computed_on(kind, config, monkeypatch) == profile_of(config).table(kind).dtype == expected


def test_times_in_one_precision_decide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes in float32 unless it was measured in another one, and beside a GPU each has its own."""
    tables = [measured("cpu", "bfloat16"), *derived("v100")]
    config = config_with(tmp_path, tables, "float16", devices={"cpu": 2, "v100": 2})
    assert [profile_of(config).table(kind).dtype for kind in ("cpu", "v100")] == ["bfloat16", "float16"]
    assert read_graph(config).plan
    assert computed_on("cpu", config, monkeypatch) == "bfloat16"
    assert computed_on("v100", config, monkeypatch) == "float16"


@pytest.mark.parametrize(
    ("tables", "ramps", "told", "sentence"),
    [
        (
            derived("v100"),
            "bfloat16",
            {},
            "v100 would compute distilbert in bfloat16, .* in float16, float32 only: set",
        ),
        (
            derived("v100"),
            "float16",
            {"dtype": "bfloat16"},
            "or measure a v100 with 'isobatch profile --dtype bfloat16'",
        ),
        ([measured("v100", "float16")], "", {"dtype": "float32"}, "in float32, and .* has its times in float16 only"),
        (
            [measured("v100", "int8", "onnx")],
            "int8",
            {},
            r"has its times in int8 \(backend: onnx\) only: set dtype: to",
        ),
    ],
)
def test_a_profile_without_times_in_that_precision_is_refused_in_a_sentence(
    tables: list[LatencyTable], ramps: str, told: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    config = config_with(tmp_path, tables, ramps, devices={"v100": 2}, **told)
    with pytest.raises(UserError, match=sentence) as error:
        read_graph(config)
    assert "\n" not in str(error.value)


def test_devices_that_may_be_added_need_times_in_that_precision_too(tmp_path: Path) -> None:
    tables = [measured("cpu", "float32"), *derived("v100")]
    config = config_with(tmp_path, tables, "bfloat16", devices={"cpu": 2})
    controller = ControllerConfig(goal="cost", grow_to={"v100": 2})
    with pytest.raises(UserError, match="v100 would compute distilbert in bfloat16"):
        allowed(controller, config, profile_of(config))


def test_a_plan_keeps_its_times_and_decides_the_precision_unless_the_file_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = read_graph(config_with(tmp_path, derived("v100"), "float16", devices={"v100": 2}, dtype="float32")).plan
    (tmp_path / "plan.json").write_text(made.to_json())
    for settings, expected in (({}, "float32"), ({"dtype": "float16"}, "float16")):
        config = config_with(tmp_path, derived("v100"), "float16", plan=str(tmp_path / "plan.json"), **settings)
        assert computed_on("v100", config, monkeypatch) == profile_of(config).table("v100").dtype == expected
