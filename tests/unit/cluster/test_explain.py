"""isobatch explain: what each mechanism brings, and what would bring more."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.planner.networks import distilbert
from isobatch.cluster.simulator import explained
from isobatch.optimizer import Objective
from isobatch.optimizer.plan import DecodingTerms, Placement, Plan, Split, read_plan
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, load, save
from isobatch.profiles.latency import MOST_BATCH
from tests.helpers.commands import ran
from tests.helpers.simulated_fleet import FAST, TWO

PLAN = Plan((Placement("v100", 2, (Split(0, 6, 8, (0, 1, 2, 3, 4)),)),), slo_s=0.1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explained, "EFFORT", replace(explained.EFFORT, inputs=300, slos=2, most=1_000))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    tables = (datasheet_table(distilbert(), "v100", batch_sizes=(1, 8)),)
    exits = ExitProfile((1.0, 0.9, 0.8, 0.4, 0.3, 0.25))
    save(Profile("distilbert", tables, exits, weights="a1b2"), profile)
    plan.write_text(PLAN.to_json())
    return plan, profile


def test_each_step_is_a_mechanism_more_and_the_last_one_is_the_plan(files: tuple[Path, Path], tmp_path: Path) -> None:
    plan, profile = files
    printed = json.loads(ran("explain", plan, "--profile", profile, "--json", "--picture", tmp_path / "steps.png"))
    names = [each["mechanism"] for each in printed["steps"]]
    assert names[:2] == [explained.SINGLE, explained.BATCHES]
    assert names[-1] == explained.TOGETHER
    single, batches = (printed["steps"][number]["goodput_per_s"] for number in (0, 1))
    assert 0 < single < batches
    assert {each["what"] for each in printed["changes"]} >= {"one more v100"}
    assert all(each["times"] > 1.01 for each in printed["changes"])
    assert (tmp_path / "steps.png").read_bytes()[:4] == b"\x89PNG"
    words = ran("explain", plan, "--profile", profile)
    assert "What would bring more" in words
    assert "99% in time" in words
    assert re.search(r"one more v100: \+[45]\d%", words)
    assert (tmp_path / "plan-steps.png").exists()


def test_the_largest_batch_that_is_allowed_is_explained_too(files: tuple[Path, Path]) -> None:
    plan, profile = files
    options = "--profile", profile, "--picture", "", "--json"
    usual, most = (json.loads(ran("explain", plan, *options, "--max-batch", batch)) for batch in (8, MOST_BATCH))
    assert most == usual


def test_a_kind_that_the_catalogue_lacks_is_explained_by_its_own_times(files: tuple[Path, Path]) -> None:
    plan, profile = files
    known = load(profile)
    save(replace(known, tables=tuple(replace(each, kind="mine") for each in known.tables)), profile)
    placement = replace(PLAN.placements[0], kind="mine")
    plan.write_text(replace(PLAN, placements=(placement,)).to_json())
    assert "one more mine" in ran("explain", plan, "--profile", profile, "--picture", "")


def test_survivors_move_faster_inside_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explained, "changes", lambda *_: [])  # they take time, and are tested above
    plan, profile, splits = (
        tmp_path / "plan.json",
        tmp_path / "profile.json",
        (Split(0, 3, 8, (0, 1, 2)), Split(3, 6, 8)),
    )
    tables = tuple(datasheet_table(distilbert(), kind, batch_sizes=(1, 8)) for kind in ("v100", "p100"))
    save(Profile("distilbert", tables, ExitProfile((1.0, 0.9, 0.8, 0.4, 0.3, 0.25))), profile)
    placements = (Placement("v100", 1, splits[:1]), Placement("p100", 1, splits[1:]))
    plan.write_text(Plan(placements, slo_s=0.012).to_json())

    def sustained_per_s(*more: str) -> float:
        printed = json.loads(ran("explain", plan, "--profile", profile, "--json", "--picture", "", *more))
        return float(printed["steps"][-1]["goodput_per_s"])

    assert sustained_per_s("--one-machine") > 1.2 * sustained_per_s()


def test_packing_is_a_step_where_texts_have_lengths() -> None:
    steps = list(explained.steps(TWO, FAST, Objective(slo_s=0.05, max_batch=8), padded=FAST))
    assert [each.mechanism for each in steps][2] == explained.PACKING
    assert all(each.goodput_per_s > 0 for each in steps)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"slo_s": None}, "has no SLO, within which inputs must be answered: give --slo-ms"),
        ({"placements": (Placement("k80", 1, (Split(0, 6, 1),)),)}, "k80"),
        ({"placements": (Placement("v100", 1, (Split(0, 4, 1),)),)}, "covers 4 blocks, the network of the profile 6"),
        ({"model": "bert", "weights": "c3d4"}, "is for bert, the profile is of distilbert, whose weights are others"),
    ],
)
def test_an_error_is_one_line(files: tuple[Path, Path], change: dict[str, object], sentence: str) -> None:
    plan, profile = files
    plan.write_text(replace(read_plan(plan), **change).to_json())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=sentence) as error:
        ran("explain", plan, "--profile", profile, "--picture", "")
    assert "\n" not in str(error.value)


def test_an_slo_that_no_plan_keeps_is_refused(files: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=r"no plan keeps the SLO of 0\.01 ms on these devices: --slo-ms gives"):
        ran("explain", files[0], "--profile", files[1], "--slo-ms", 0.01)


def test_a_plan_for_texts_is_refused_before_its_profile_is_read(files: tuple[Path, Path]) -> None:
    plan, profile = files
    terms = DecodingTerms("off", prompt_rows=8, kv_megabytes=1, ttft_s=1.0, tpot_s=1.0)
    plan.write_text(Plan((Placement("cpu", 1, (Split(0, 6, 8),)),), decoding=terms).to_json())
    profile.write_text("{}")
    with pytest.raises(UserError, match="writes texts: `isobatch simulate` shows what it sustains"):
        ran("explain", plan, "--profile", profile, "--picture", "")


@pytest.mark.parametrize(
    ("picture", "sentence"),
    [("steps.xyz", r"cannot draw steps.xyz: a picture's name ends in \.png"), (".svg", "cannot draw .svg")],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_simulated(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, picture: str, sentence: str
) -> None:
    monkeypatch.setattr(explained, "steps", lambda *_: pytest.fail("it simulates"))
    with pytest.raises(UserError, match=sentence):
        ran("explain", files[0], "--profile", files[1], "--picture", picture)
