"""A result says under which conditions it was measured."""

import json
import subprocess
from io import StringIO
from math import inf
from pathlib import Path

from rich.console import Console

from experiments.bench import Conditions, commit_of_tree, table, write
from experiments.shared.machine import computes_bfloat16, processor, processor_flags
from experiments.shared.results_page import measure_stale, stale
from experiments.shared.version import code_of


def test_a_result_has_its_processor_commit_load_and_time(tmp_path: Path) -> None:
    kept = json.loads(write("real", {"ratio": 0.123456789}, Conditions(0.25, "0f3a91c2+"), tmp_path).read_text())
    assert (kept["figures"], kept["commit"]) == ({"ratio": 0.12346}, "0f3a91c2+")
    assert kept["machine"]["load"] == 0.25
    assert kept["seconds"] >= 0
    assert {"processor", "flags", "cores", "python", "torch"} <= set(kept["machine"])


def test_flags_are_those_by_which_batches_are_cheap(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: A Processor\nflags\t\t: fpu avx2 avx512f avx512_bf16\n")
    assert processor(cpuinfo) == "A Processor"
    assert processor_flags(cpuinfo) == ["avx512", "bfloat16", "avx2"]
    assert computes_bfloat16(cpuinfo)
    assert processor_flags(tmp_path / "none") == []
    assert not computes_bfloat16(tmp_path / "none")


def test_changes_of_the_tree_make_its_commit_uncertain(tmp_path: Path) -> None:
    def git(*asked: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *asked], check=True)

    assert commit_of_tree(tmp_path) == ""
    (tmp_path / "a.py").write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    clean = commit_of_tree(tmp_path)
    (tmp_path / "a.py").write_text("2\n")
    assert len(clean) == 8
    assert commit_of_tree(tmp_path) == clean + "+"


def test_figures_stand_beside_their_aims() -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(table("bound", {"promise_error_p90": 0.05, "plan_s_p50": 7.0}))
    missed, no_aim = (line for line in console.export_text(styles=True).splitlines() if "p90" in line or "p50" in line)
    assert "≤ 0.03" in missed
    assert "\x1b[1m" in missed
    assert "≤" not in no_aim


def test_old_results_are_measured_while_the_budget_lasts() -> None:
    at_s, took_s = 0.0, {"short": 10.0, "long": 100.0, "unknown": 15.0, "broken": 5.0}

    def measure(claim: str, within_s: float) -> bool:
        nonlocal at_s
        at_s += min(took_s[claim], within_s)
        return claim != "broken" and took_s[claim] <= within_s

    claims = [(10.0, "short"), (20.0, "broken"), (100.0, "long"), (inf, "unknown")]
    assert measure_stale(50.0, claims, measure, lambda: at_s) == ["broken", "long"]
    assert at_s == 30.0


def test_results_of_other_code_are_old_as_are_those_that_are_missing(tmp_path: Path) -> None:
    code = " ".join(f"{path}={mark}" for path, mark in code_of("forecast").items())
    for name, kept in (("forecast", {"code": code}), ("sim", {"code": "a.py=1", "seconds": 7})):
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    old = stale(tmp_path)
    assert old[0] == (7, "sim")
    assert (inf, "real") in old
    assert "forecast" not in [claim for _, claim in old]
