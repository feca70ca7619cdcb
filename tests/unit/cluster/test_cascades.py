"""`isobatch cascade`: what it tries, what it takes, and what it says of input that does not fit."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isobatch.cluster.cascades import Timed, Tryout, best
from isobatch.cluster.cli import app
from isobatch.cluster.commands.cascade_run import table
from isobatch.cluster.simulator.plan_choice import best_simulated
from isobatch.cluster.simulator.sustained import sustained_per_s
from isobatch.deployments.folders import hash_of, ramps_of
from isobatch.deployments.models import load_served
from isobatch.deployments.models.ramps import ExitRules, read_rules, save_ramps
from isobatch.deployments.prepare.cascades import Combination
from isobatch.optimizer import problem
from isobatch.optimizer.plan import read_plan
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import load as load_profile
from isobatch.profiles.latency import LatencyTable
from tests.helpers.cascade_directories import cascade_directory
from tests.helpers.command_lines import material
from tests.helpers.interruptions import interrupt_sweep
from tests.helpers.made_up_candidates import made_up
from tests.helpers.simulated_fleet import HASTIER, HASTY
from tests.helpers.tiny_networks import NoEncoder

LONGER = replace(HASTY, last_inputs=2000, last_slos=20, most=2_000)  # searches are tested where plans are chosen


def timed(blocks: int, block_s: float) -> Timed:
    rows = ((block_s,) * blocks, (4 * block_s,) * blocks)
    made = LatencyTable(
        "v100", (1, 8), rows, ((0.0,) * blocks,) * 2, 1e-4, (64,) * blocks, (10**8,) * blocks, "made up"
    )
    return Timed((made,), None, 8, NoEncoder())


def tryout(slo_s: float = 1.0, count: int = 3000) -> Tryout:
    candidates, terms = made_up(count)
    return Tryout(candidates, [timed(2, 0.001), timed(4, 0.005)], [None, None], terms, fleet("v100=2"), slo_s)


def tried(here: Tryout) -> tuple[Any, Any]:
    """All combinations, and the row of each."""
    combinations = here.combinations(2)
    return combinations, [here.row(each) for each in combinations]


def test_the_cascade_is_taken_where_it_serves_most_within_what_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.cluster.cascades.SIMULATED", 2000)
    here = tryout()
    combinations, rows = tried(here)
    assert [row.name for row in rows] == ["small", "large", "small > large"]
    small, large, both = rows
    assert not small.hopeful, "it serves most, but errs"
    assert small.goodput_per_s > both.goodput_per_s > 1.5 * large.goodput_per_s
    assert best(rows) is both
    taken = here.tested(rows, combinations)
    assert taken.figures.promise
    assert (taken.profile.edges, taken.made.members) == ((2,), both.made.members)
    assert sum(taken.shares) == pytest.approx(1.0)
    assert taken.dollars_per_million < large.dollars_per_million
    assert 2 in {split.start for split in taken.plan.splits}
    rate = 0.5 * large.goodput_per_s
    quick, slow = here.latency(taken, rate), here.latency(large, rate)
    assert quick[0] < slow[0]
    assert quick[0] < quick[1]
    assert len(table(rows, [quick, slow, None], rate).rows) == 3


def test_what_is_taken_promises_what_the_simulator_sustains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.cluster.cascades.best_simulated", partial(best_simulated, effort=LONGER))
    here = tryout(slo_s=0.25)
    row = here.row(Combination((0, 1)))
    result = here.with_simulated_plan(row)
    assert 2 in {split.start for split in result.plan.splits}
    assert (row.plan.slo_s, result.plan.slo_s, result.plan.length) == (0.25, 0.25, row.plan.length)
    facts = problem(row.profile, here.devices, links_between(here.devices))
    assert sustained_per_s(result.plan, facts, 0.25, 3000, slos=20) == pytest.approx(result.goodput_per_s, rel=0.1)


def test_where_the_test_rows_are_too_few_the_last_network_alone_is_taken() -> None:
    here = tryout(count=120)
    combinations, rows = tried(here)
    assert here.tested(rows, combinations).made.alone


def test_where_the_last_network_alone_is_late_and_the_best_fails_the_test_nothing_is_written() -> None:
    here = tryout(slo_s=0.01, count=120)
    here = replace(here, terms=replace(here.terms, max_loss=0.3))
    combinations, rows = tried(here)
    assert best(rows).name == "small", [(row.name, row.hopeful, row.plan) for row in rows]
    assert rows[1].plan is None
    failing = replace(here, terms=replace(here.terms, max_loss=0.001))
    rows = [replace(row, made=replace(row.made, evidence=failing.row(combinations[0]).made.evidence)) for row in rows]
    with pytest.raises(UserError, match="small failed the test of its promise, and large alone"):
        here.tested(rows, combinations)


def test_a_deadline_that_nobody_keeps_is_one_line() -> None:
    with pytest.raises(UserError, match="--slo-ms"):
        best(tried(tryout(slo_s=0.0001))[1])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("isobatch.cluster.simulator.plan_choice.DEFAULT_EFFORT", HASTIER)
    monkeypatch.setattr("isobatch.cluster.cascades.best_simulated", partial(best_simulated, effort=HASTIER))
    monkeypatch.setattr("isobatch.cluster.cascades.SIMULATED", 1000)
    monkeypatch.chdir(material(tmp_path))
    return tmp_path


FEW = "--device cpu --timing-s 0.1 --largest 4"
LINE = f"cascade my-small my-bert --data others.csv --devices v100=2 --slo-ms 500 {FEW} --out both"


def run(line: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, line.split())
    return result.exit_code, result.output + (str(result.exception) if isinstance(result.exception, UserError) else "")


def test_what_is_written_is_served_planned_and_loaded(here: Path) -> None:
    code, result = run(LINE)
    assert code == 0, result
    assert "written to both" in result
    profile, answers = load_profile(here / "both" / "profile.json"), load_served(here / "both").predict(["a good film"])
    assert len(answers) == 1
    code, result = run("plan --profile both/profile.json --devices v100=2 --slo-ms 500")
    assert code == 0, result
    assert profile.num_blocks == load_served(here / "both").num_blocks
    assert profile.ramps == ramps_of(here / "both")
    code, result = run(LINE)
    assert "exists already" in result
    code, result = run(f"{LINE} --force".replace("others.csv", "both/exits.json"))
    assert "both/exits.json: lies in --out both, which is replaced" in result


def test_a_cascade_is_profiled_planned_and_evaluated_as_any_other(here: Path) -> None:
    cascade_directory(here / "both")
    code, result = run(
        "profile both --device cpu --tokens 6 --largest 2 --timing-s 0.1 --devices v100 --out profile.json"
    )
    assert code == 0, result
    profile = load_profile(here / "profile.json")
    assert (profile.num_blocks, profile.edges, profile.kinds) == (7, (4,), ("cpu", "v100"))
    assert profile.exits.survival == (1.0, 1.0, 0.9, 0.9, 0.5, 0.5, 0.5)
    (measured,) = (table for table in profile.tables if table.kind == "cpu")
    assert min(seconds for table in profile.tables for row in table.block_s for seconds in row) > 0
    assert measured.hidden_bytes[3] < measured.hidden_bytes[2], "at the edge only the text travels"
    code, result = run("plan --profile profile.json --devices v100=2 --slo-ms 500 --out plan.json")
    assert code == 0, result
    assert 4 in {split.start for split in read_plan(here / "plan.json").splits}
    code, result = run("evaluate both --data others.csv --device cpu --max-rows 20")
    assert code == 0, result
    assert "is a cascade" in run("prepare both --data others.csv --out ee")[1]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (LINE.replace("my-small my-bert", "my-bert"), "two networks or more"),
        (LINE.replace("my-small", "my-bert"), "named twice"),
        (LINE.replace("my-small", "nowhere/at/all"), "no such directory"),
        (LINE.replace("v100=2", "v100"), "KIND=COUNT"),
        (LINE.replace("500", "0"), "--slo-ms 0 must be above 0"),
        (LINE + " --policy patience", "remembers earlier ramps"),
        (LINE + " --policy nothing", "cannot be imported"),
        (LINE + " --policy near", "policy near gives a score, but this network gives labels"),
        (LINE + " --max-accuracy-loss much", "is not a share"),
        (
            LINE + " --metric mean-iou",
            "is not for cascades, whose networks give one label: accuracy, ",
        ),
        (LINE.replace("others.csv", "bodies.jsonl"), "no column of texts"),
    ],
)
def test_what_does_not_fit_is_one_line(here: Path, line: str, told: str) -> None:
    code, result = run(line)
    assert code != 0
    assert told in " ".join(result.split())


def test_networks_that_do_not_belong_together_are_one_line(here: Path) -> None:
    config = here / "my-small" / "config.json"
    whole = config.read_text()
    config.write_text(json.dumps(json.loads(whole) | {"id2label": {"0": "x", "1": "y", "2": "z"}}))
    assert "its labels are x, y, z" in run(LINE)[1]
    config.write_text(whole)
    (here / "my-small" / "tokenizer.json").unlink()
    assert "has no tokenizer" in run(LINE)[1]


def test_without_labels_agreement_is_promised(here: Path) -> None:
    texts = [line.split(",")[0] for line in (here / "others.csv").read_text().splitlines()[1:]]
    (here / "others.csv").write_text("\n".join(["text", *texts]) + "\n")
    code, result = run(LINE)
    assert code == 0, result
    assert "agreement with the last network is promised" in result
    for metric in ("mcc", "accuracy"):
        assert f"--metric {metric} needs" in run(f"{LINE} --metric {metric} --force")[1]


def test_ctrl_c_while_networks_are_timed_writes_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_sweep(monkeypatch)
    code, result = run(LINE.replace("v100=2", "cpu=1"))
    assert code == 130, result
    assert not (here / "both").exists()


def test_lengths_are_those_of_rows_from_the_whole_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, *lines = (here / "others.csv").read_text().splitlines()
    lines.sort(key=len)
    (here / "others.csv").write_text("\n".join([header, *lines]) + "\n")
    monkeypatch.setattr("isobatch.cluster.commands.cascade_run.LENGTH_ROWS", 20)
    read = list[str]()

    def timed_with(_: object, values: list[str], *__: object) -> None:
        read.extend(values)
        raise UserError("nothing is timed")

    monkeypatch.setattr("isobatch.cluster.commands.cascade_run.timed_candidate", timed_with)
    assert "nothing is timed" in run(LINE)[1]
    assert len(read) == 20
    assert max(map(len, read)) > len(lines[60])


def test_rows_that_ramps_were_trained_on_test_no_promise(here: Path) -> None:
    header, *lines = (here / "others.csv").read_text().splitlines()
    more = [f"{text.partition(',')[0]} {text}" for text in lines]
    (here / "others.csv").write_text("\n".join([header, *lines, *more]) + "\n")
    trained = {"data_hash": hash_of([here / "others.csv"]), "rows": 240, "seed": 3}
    save_ramps(here / "my-bert", ExitRules(notes=trained), {})
    code, result = run(LINE)
    assert code == 0, result
    left = "ramps were trained on other rows of others.csv, which are left out: 84 rows remain"
    assert left in " ".join(result.split())
    assert read_rules(here / "both" / "exits.json").notes["rows"] == 84
