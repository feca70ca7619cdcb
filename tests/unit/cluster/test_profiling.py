"""The command on a tiny network, without a clock's worth of waiting."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.planner.networks import distilbert
from isobatch.cluster.cli import app, main
from isobatch.cluster.profiling.block_times import (
    exits_from_rules,
    replica_adds_s,
    report,
    texts,
    timed,
    uncatalogued,
    with_sure,
)
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.folders import hash_of
from isobatch.deployments.models import load
from isobatch.deployments.models.ramps import ExitRules, RampRule, make_head, save_ramps
from isobatch.deployments.named import demo_folder
from isobatch.profiles.curves import BACKENDS, DTYPES
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.devices import kind_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.files import load as load_profile
from isobatch.profiles.lengths import Lengths
from isobatch.profiles.measure import facts_of
from isobatch.profiles.model import Batch, SplitModel
from isobatch.profiles.promise import RULES
from tests.helpers.clock import Clock
from tests.helpers.commands import ran
from tests.helpers.tiny_networks import hugging_face
from tests.helpers.tiny_tokenizers import save_tokenizer

RUNNER = CliRunner()
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    hugging_face("bert").save_pretrained(folder)
    save_tokenizer(folder, ["the", "film"])
    (folder / "inputs.jsonl").write_text('{"text": "the film"}\n' * 5)
    return folder


def profiled(checkpoint: Path, out: Path, *more: str) -> str:
    return ran("profile", checkpoint, "--out", out, "--device", "cpu", "--timing-s", "0.2", "--largest", "4", *more)


@pytest.fixture(scope="module")
def prepared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two ramps, of which 'isobatch prepare' wrote down how many go on."""
    folder = Path(copytree(checkpoint, tmp_path_factory.mktemp("prepared") / "tiny-ee"))
    rules = ExitRules(ramps=tuple(RampRule(block=block, threshold=0.5, survival=0.75 - block / 4) for block in (0, 2)))
    save_ramps(folder, rules, {rule.block: make_head("light", 32, 3) for rule in rules.ramps})
    return folder


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong must be found before anything is timed."""

    def timed(*_: object) -> None:
        raise AssertionError("the clock was started")

    monkeypatch.setattr("isobatch.cluster.profiling.block_times.timed", timed)


@pytest.fixture(scope="module")
def measured(checkpoint: Path) -> tuple[Path, str]:
    out = checkpoint / "profile" / "profile.json"
    out.parent.mkdir()
    return out, profiled(checkpoint, out, "--tokens", "6,12", "--data", str(checkpoint / "inputs.jsonl"))


def test_profile_writes_a_table_per_length_and_says_how_steady_it_was(measured: tuple[Path, str]) -> None:
    out, output = measured
    profile = load_profile(out)
    assert [(table.kind, table.length) for table in profile.tables] == [("cpu", 6), ("cpu", 12)]
    assert all(table.batch_sizes[0] == 1 and table.batch_sizes[-1] <= 4 for table in profile.tables)
    assert set(profile.exits.survival) == {1.0}  # a network without ramps
    assert profile.tables[0].memory_bytes[0] > profile.tables[0].memory_bytes[1] > 0  # the embedding is in block 0
    assert "rounds spread by" in output
    about = ["cpu, 6 tokens", "cpu, 12 tokens", "exits", "lengths"]
    assert [note.partition(": ")[0] for note in profile.notes] == about
    assert report(profile).row_count == sum(len(table.batch_sizes) for table in profile.tables)


def test_a_short_text_is_told_by_its_tokens_and_says_nothing_of_inputs() -> None:
    table = datasheet_table(distilbert(13), "v100", batch_sizes=(0.230769, 1, 2))
    rows = report(Profile("distilbert", (replace(table, source="measured: a V100"),)))
    assert list(rows.columns[1].cells) == ["3 tokens", "1", "2"]
    for column in ("ms per input", "inputs/s"):
        cells = next(list(each.cells) for each in rows.columns if each.header == column)
        assert [bool(cell) for cell in cells] == [False, True, True]


def test_two_profiles_at_once_are_both_in_the_file(
    checkpoint: Path, measured: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "profile.json"

    def while_another_ends(*told: Any) -> Any:
        copy(measured[0], out)
        return timed(*told)

    monkeypatch.setattr("isobatch.cluster.profiling.block_times.timed", while_another_ends)
    profiled(checkpoint, out, "--tokens", "6", "--kind", "slow-cpu")
    assert load_profile(out).kinds == ("cpu", "slow-cpu")


def test_a_prepared_network_brings_its_exits_and_datasheets_fill_in(prepared: Path, tmp_path: Path) -> None:
    output = profiled(prepared, tmp_path / "p.json", "--tokens", "6", "--devices", "v100,k80,cpu")
    assert "not measured: v100, 6 tokens (torch float32, published; " in output
    assert output.count("not measured: ") == 2, "a line for each kind of device"
    profile = load_profile(tmp_path / "p.json")
    ways = len(BACKENDS) * len(DTYPES)
    assert [table.kind for table in profile.tables] == ["cpu", *["v100"] * ways, *["k80"] * ways]
    assert [table.derived for table in profile.tables] == [False, *[True] * 2 * ways]
    assert (profile.tables[0].backend, profile.tables[0].dtype) == ("torch", "float32")
    assert profile.exits == ExitProfile((1.0, 0.75, 0.75, 0.25))
    assert "as 'isobatch prepare' measured them" in profile.notes[-1]
    assert [seconds > 0 for seconds in profile.table("k80").ramp_s[0]] == [True, False, True, False]


@pytest.mark.parametrize(("ramps", "first"), [("float16", "float16"), ("int8", "float32")])
def test_times_in_the_networks_own_precision_are_first_so_that_plans_take_them(
    prepared: Path, tmp_path: Path, ramps: str, first: str
) -> None:
    """They are those in which a GPU would compute it: see deployments/precision.py."""
    folder, out = Path(copytree(prepared, tmp_path / "half")), tmp_path / "p.json"
    rules = json.loads((folder / "exits.json").read_text())
    (folder / "exits.json").write_text(json.dumps(rules | {"dtype": ramps}))
    profiled(folder, out, "--tokens", "6", "--devices", "v100")
    profile = load_profile(out)
    assert (profile.table("v100").backend, profile.table("v100").dtype) == ("torch", first)
    assert profile.on("onnx", "").table("v100").dtype == first
    other = next(dtype for dtype in DTYPES if dtype != first)
    assert profile.on("", other).table("v100").dtype == other


def test_exits_that_were_prepared_anew_replace_those_of_before(prepared: Path, tmp_path: Path) -> None:
    folder, out = Path(copytree(prepared, tmp_path / "again")), tmp_path / "p.json"
    alone = ("--tokens", "6")
    counting = (*alone, "--data", str(prepared / "inputs.jsonl"))

    def prepare_anew(survival: float) -> ExitProfile:
        rules = ExitRules(ramps=(RampRule(block=1, threshold=0.5, survival=survival),))
        save_ramps(folder, rules, {1: make_head("light", 32, 3)})
        return ExitProfile((1.0, 1.0, survival, survival))

    profiled(folder, out, *alone)
    anew = prepare_anew(0.5)
    assert "they are dropped" not in profiled(folder, out, *alone)
    assert load_profile(out).exits == anew
    profiled(folder, out, *counting)
    counted = load_profile(out).exits
    assert "they are dropped" not in profiled(folder, out, *alone)
    assert load_profile(out).exits == counted != anew
    prepare_anew(0.75)
    assert "they are dropped" not in profiled(folder, out, *counting), "they are counted again"
    anew = prepare_anew(0.6)
    assert "they are dropped" in profiled(folder, out, *alone)
    assert load_profile(out).exits == anew


def test_the_exit_table_beside_a_checkpoint_tells_at_which_ramps_inputs_leave_together(tmp_path: Path) -> None:
    folder = demo_directory()
    rules = load(folder).ramps.rules
    counted = exits_from_rules([(rule.block, rule.survival) for rule in rules.ramps], 8)
    result = with_sure(counted, folder, rules)
    assert result.survival == counted.survival == result.survival_with(range(7))
    assert result.survival_with({6})[7] > result.survival[7], "some would have left at a closed ramp only"
    assert with_sure(counted, tmp_path, rules) == counted, "there is no table"
    short = ExitProfile((1.0,) * 4)
    assert with_sure(short, folder, rules) == short, "the table is of another network"


def ends(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def interrupted_profile(checkpoint: Path, out: Path, tokens: str) -> Profile:
    """What is kept after a Ctrl-C."""
    options = ["profile", str(checkpoint), "--out", str(out), "--device", "cpu", "--tokens", tokens]
    few = ["--timing-s", "0.1", "--largest", "2", "--data", str(checkpoint / "inputs.jsonl")]
    assert RUNNER.invoke(app, [*options, *few], catch_exceptions=False).exit_code == 130
    return load_profile(out)


def test_an_interrupted_count_is_noted(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: SplitModel, values: Sequence[Any]) -> Iterator[Batch]:
        yield model.encode(values[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr("isobatch.cluster.profiling.block_times.in_batches", interrupted)
    profile = interrupted_profile(checkpoint, tmp_path / "p.json", "6")
    assert "exits: WARNING: interrupted: counted over 2 of 5 inputs of inputs.jsonl" in profile.notes


def test_times_are_kept_where_no_exits_were_counted(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.cluster.profiling.block_times.in_batches", ends)
    profile = interrupted_profile(checkpoint, tmp_path / "p.json", "6")
    assert [table.length for table in profile.tables] == [6]
    assert not any("exits" in note or "interrupted" in note for note in profile.notes)


def test_the_first_lengths_times_are_kept_where_the_second_one_has_none(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[int]()

    def once(*facts: Any) -> Any:
        begun.append(1)
        return facts_of(*facts) if len(begun) == 1 else ends()

    monkeypatch.setattr("isobatch.cluster.profiling.block_times.facts_of", once)
    profile = interrupted_profile(checkpoint, tmp_path / "p.json", "6,12")
    assert [table.length for table in profile.tables] == [6]
    assert not any("interrupted" in note for note in profile.notes), "this table is complete"


def test_times_are_kept_where_it_is_not_known_what_a_replica_adds(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.cluster.profiling.block_times.replica_adds_s", ends)
    profile = interrupted_profile(checkpoint, tmp_path / "p.json", "6,12")
    assert [table.length for table in profile.tables] == [6]
    wanted = "interrupted: only batch sizes 1, 2 were measured, without what a replica adds to launches"
    assert wanted in profile.notes[0]


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--out", "nodir/p.json"), "cannot write nodir/p.json: No such file or directory"),
        (("--data", "empty.jsonl", "--out", "empty.jsonl"), "cannot write empty.jsonl: this command uses that file"),
        (("--devices", "v1000"), "unknown device kind 'v1000'"),
        (("--data", "empty.jsonl"), "holds no inputs"),
        (("--text-column", "text"), "--text-column is for --data: name a file"),
        (("--max-rows", "50"), "--max-rows is for --data: name a file"),
        *((("--tokens", wrong), "must be numbers of tokens") for wrong in ("0", "many", "32,,64")),
    ],
)
def test_what_is_wrong_is_found_before_anything_is_timed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match=sentence):
        profiled(checkpoint, tmp_path / "p.json", *more)


@pytest.mark.usefixtures("no_clock")
def test_a_network_of_images_has_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--tokens is for networks that read texts: leave it out"):
        profiled(demo_folder(), tmp_path / "p.json", "--tokens", "32")


@pytest.mark.usefixtures("no_clock")
def test_another_networks_file_is_refused_first(measured: tuple[Path, str], prepared: Path) -> None:
    with pytest.raises(UserError, match="cannot add a profile of tiny-ee"):
        profiled(prepared, measured[0])


@pytest.mark.usefixtures("no_clock")
def test_notes_of_the_ramps_that_were_edited_are_refused(prepared: Path, tmp_path: Path) -> None:
    folder, data = Path(copytree(prepared, tmp_path / "edited")), prepared / "inputs.jsonl"
    rules = json.loads((folder / RULES).read_text())
    (folder / RULES).write_text(json.dumps(rules | {"notes": {"data_hash": hash_of([data]), "rows": "all", "seed": 0}}))
    with pytest.raises(UserError, match=r"edited/exits\.json: notes: rows and seed must be whole numbers"):
        profiled(folder, tmp_path / "p.json", "--data", str(data))


def test_a_device_that_no_plan_can_use_is_told() -> None:
    assert uncatalogued("a100") is None
    takes = "geforce-rtx-4090 is not in the catalogue: plans take it as geforce-rtx-4090=COUNT@PRICE:GB"
    assert uncatalogued(kind_of("NVIDIA GeForce RTX 4090")) == takes


def test_invented_texts_have_the_length_that_was_asked_for(checkpoint: Path) -> None:
    model = load(checkpoint, device="cpu")
    for inputs in texts(model, [5, 9]):
        np.testing.assert_array_equal(inputs.batch(3).lengths, [inputs.length] * 3)


def test_a_table_says_what_computed_it(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "profile.json"
    profiled(prepared, out, "--backend", "onnx", "--tokens", "4", "--largest", "2", "--timing-s", "0.1")
    (table,) = load_profile(out).tables
    assert table.backend == "onnx"
    assert "cpu, onnx, float32" in table.source
    assert min(table.memory_bytes) > 0


def test_a_users_own_backend_is_found(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy(ROOT / "tests" / "helpers" / "toy_backend.py", tmp_path / "my_backend.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    few = ["--device", "cpu", "--tokens", "4", "--largest", "2", "--timing-s", "0.1"]
    monkeypatch.setattr(sys, "argv", ["isobatch", "profile", str(prepared), "--backend", "my_backend:TOY", *few])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    (table,) = load_profile(tmp_path / "profile.json").tables
    assert table.backend == "toy"


@pytest.mark.parametrize("command", ["profile", "bench"])
def test_a_backend_that_is_not_known_is_refused_before_anything_is_loaded(command: str) -> None:
    result = RUNNER.invoke(app, [command, "no-such-checkpoint", "--backend", "onyx"])
    assert str(result.exception).startswith("backend 'onyx' is not known; known are: auto, torch, graphs, onnx,")


def test_texts_are_measured_as_long_as_they_are(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{"film " * words}"}}\n' for words in (1, 2, 9, 16)))
    output = profiled(prepared, tmp_path / "p.json", "--data", str(tmp_path / "texts.jsonl"))
    profile = load_profile(tmp_path / "p.json")
    assert profile.lengths == Lengths((3, 4, 11, 18))
    (table,) = profile.tables
    assert table.length == profile.length == 9
    assert table.batch_sizes[0] == pytest.approx(3 / 9, rel=1e-5)  # no text of this tokenizer has fewer tokens
    assert 1 in table.batch_sizes
    assert table.batch_sizes[-1] <= 4
    assert profile.token_exits is not None
    assert "lengths: 9 tokens on average in texts.jsonl, 3 to 18: plans count tokens" in output


def test_what_a_replica_adds_to_a_launch_is_what_it_takes_beside_the_network(checkpoint: Path) -> None:
    """The clock moves by what is called: each merge that a replica makes takes a second, a pass of the network two."""
    model, clock = load(checkpoint), Clock()

    def taking(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def later(*arguments: Any) -> Any:
            clock.now_s += seconds
            return call(*arguments)

        return later

    model.merge, model.run = taking(1.0, model.merge), taking(2.0, model.run)  # type: ignore[method-assign]
    two, one = (model.encode(["the film"] * count) for count in (2, 1))
    assert replica_adds_s(model, two, clock) == 1.0
    assert replica_adds_s(model, one, clock) == 0.0, "there is nothing to join"
