"""Every field has a default and a description; a wrong field is reported in one line."""

from dataclasses import replace
from pathlib import Path

import pytest

from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.named import function_at
from isobatch.optimizer import Placement, Plan, Split
from isobatch.profiles.errors import UserError


def test_every_field_is_described_and_has_a_default() -> None:
    AppConfig()
    assert all(field.description and not field.is_required() for field in AppConfig.model_fields.values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_bach": 8}, "no field 'max_bach'; there are: model, "),
        ({"max_batch": 0}, "max_batch = 0: .*greater than or equal to 1"),
        ({"slo_ms": True}, "args: slo_ms = true: this must be a number"),
        ({"devices": {"cpu": True}, "profile": "q.json"}, "args: devices.cpu = true: this must be a number"),
        ({"device": "gpu"}, "device = 'gpu': 'gpu' must be 'cpu' or 'cuda': Ray gives"),
        ({"dtype": "int4"}, "dtype = 'int4'.*'bfloat16'"),
        ({"backend": "virtual"}, "args: backend: virtual needs its profile too"),
        ({"plan": "p.json"}, "args: a plan needs its profile too"),
        ({"plan": "p.json", "profile": "q.json", "device": "cuda"}, "device cannot be set beside a plan"),
        ({"max_waiting": 10**12}, "max_waiting = 1000000000000: .*less than or equal to 1048576"),
        ({"loader": "toy.load"}, "loader = 'toy.load'.*package.module:function"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        checked(AppConfig, arguments)
    assert "\n" not in str(error.value)


def test_a_plan_brings_the_slo_that_it_was_made_for(tmp_path: Path) -> None:
    plan, file = Plan((Placement("v100", 1, (Split(0, 4, 8),)),), slo_s=0.25), tmp_path / "plan.json"
    arguments = {"plan": str(file), "profile": "q.json"}
    usual = AppConfig().slo_ms
    assert checked(AppConfig, arguments).slo_ms == usual, "what is wrong with the file is said where it is needed"
    file.write_text(plan.to_json())
    assert checked(AppConfig, arguments).slo_ms == 250
    assert checked(AppConfig, arguments | {"slo_ms": 100}).slo_ms == 100
    file.write_text(replace(plan, slo_s=None).to_json())
    assert checked(AppConfig, arguments).slo_ms == usual


@pytest.mark.parametrize("path", ["nowhere:load", "math:cubic_root", "math:pi", "math"])
def test_an_import_path_that_names_no_function_is_refused(path: str) -> None:
    with pytest.raises(UserError, match=path):
        function_at(path)
