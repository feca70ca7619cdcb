"""The wheel in an environment of its own, far from the checkout: the lines of the README and of tutorials.md run there.

Those that need a server run in tests/integration/test_readme.py and test_tutorials.py.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_lines import ROOT, SERVED, material, readme_lines, tutorial_lines

PACKAGES = ("profiles", "optimizer", "deployments", "cluster")
(CONTEXT,) = (
    line.split()[2:] for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("CONTEXT :=")
)

# Runs command lines one after the other, as `isobatch` would, and prints how each of them ended. Only what never ends
# by itself is cut short: `serve` and `deploy` where they would need a Ray. Plans are chosen in a moment.
DRIVER = """
import cluster, deployments, optimizer, profiles
import contextlib, dataclasses, functools, io, json, sys
import isobatch.cluster.bench.compare, isobatch.cluster.commands.deploy, isobatch.cluster.commands.serve
import isobatch.cluster.cascades, isobatch.cluster.commands.up, isobatch.cluster.simulator.explained
from isobatch.cluster.simulator import plan_choice
from isobatch.cluster.cli import main
from isobatch.cluster.serving.serve_file import serve_file

isobatch.cluster.commands.serve.run = lambda content, *_: print("would serve", json.dumps(content))
isobatch.cluster.commands.deploy.run = lambda content, *_: print("would deploy", json.dumps(content))
isobatch.cluster.commands.up.PROFILE_BUDGET_S = 0.1
isobatch.cluster.bench.compare.STEPS, isobatch.cluster.cascades.SIMULATED = 1, 300
hasty = {"inputs": 100, "slos": 1, "last_inputs": 100, "last_slos": 1, "most": 500, "cell": 10}
for module, name in ((plan_choice, "DEFAULT_EFFORT"), (isobatch.cluster.simulator.explained, "EFFORT")):
    setattr(module, name, dataclasses.replace(getattr(module, name), **hasty))
isobatch.cluster.cascades.best_simulated = functools.partial(
    plan_choice.best_simulated, effort=plan_choice.DEFAULT_EFFORT
)
ended = []
for line in json.load(sys.stdin):
    sys.argv, said = ["isobatch", *line], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            code = repr(error)
    ended.append({"code": code, "said": said.getvalue()})
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "isobatch"]
assert cluster.OF_OTHERS and deployments.OF_OTHERS and optimizer.OF_OTHERS and profiles.OF_OTHERS
print(json.dumps({"ended": ended, "files": [module.__file__ for module in ours if module.__file__]}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what the images are built from. Neither an older build nor this one changes the checkout."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in CONTEXT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    _pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(out), str(copy))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `bin` of an environment that holds the wheel. A .pth file leads to the packages of others.

    Python does not read the .pth files that lie there, by which the tests' own environment finds the checkout. Beside
    the wheel there are packages of others that have the names of our folders.
    """
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    _pip("--python", str(python), "install", "--no-compile", "--no-deps", "--no-index", str(wheel))
    purelib = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(purelib.strip()) / "others.pth").write_text("\n".join(sorted(others)) + "\n")
    for name in PACKAGES:
        (Path(purelib.strip()) / f"{name}.py").write_text("OF_OTHERS = True\n")
    return home / "bin"


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    subprocess.run(command, check=True, capture_output=True, text=True, env=_without_ours())


def _without_ours() -> dict[str, str]:
    """The environment without variables by which Python would find the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(installed: Path, folder: Path, lines: list[list[str]]) -> dict[str, Any]:
    """In one process, since imports take longer than all that these lines do."""
    done = subprocess.run(
        [installed / "python", "-I", "-c", DRIVER], input=json.dumps(lines), cwd=folder, capture_output=True, text=True,
        env=_without_ours() | {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "80"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    there = set(zipfile.ZipFile(wheel).namelist())
    files = {
        f"isobatch/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file()
    }
    assert {name for name in files if "__pycache__" not in name} <= there


@pytest.mark.long
def test_every_command_runs_installed(installed: Path, tmp_path: Path) -> None:
    helps = [[name, "--help"] for name in SERVED]
    shown = [*readme_lines(""), *tutorial_lines("")]
    real = [line for number, line in enumerate(shown) if line[0] not in SERVED and line not in shown[:number]]
    lines = [*helps, *real, ["serve"], ["serve", "reviews.csv"], ["serve", "nowhere.yaml"]]
    result = run(installed, material(tmp_path), lines)
    outcome = {" ".join(line): ended for line, ended in zip(lines, result["ended"], strict=True)}
    for line in (*helps, *real, ["serve"]):
        ended = outcome[" ".join(line)]
        if line == ["doctor"]:  # what it finds here is this machine's business
            assert ended["code"] in (0, 1), ended
            continue
        assert ended["code"] == 0, (line, ended)
    assert not [line for line in real if "…" in outcome[" ".join(line)]["said"]], "a table is cut off at 80 columns"
    assert "would serve" in outcome["serve my-bert-ee --plan plan.json --profile profile.json"]["said"]
    assert "would deploy" in outcome["deploy serve.yaml --address auto"]["said"]
    assert "cluster/demo/plan.json" in outcome["serve"]["said"]
    for wrong, reason in (
        ("serve reviews.csv", "is not a Serve file"),
        ("serve nowhere.yaml", "no such file; 'isobatch serve MODEL --out nowhere.yaml' writes one"),
    ):
        assert outcome[wrong]["code"] == 2
        assert reason in outcome[wrong]["said"]
    made = ("my-bert-ee/exits.json", "profile.json", "plan.json", "simulation.png", "bench.json")
    for name in made:
        assert (tmp_path / name).stat().st_size > 0, name
    assert {Path(file).is_relative_to(installed.parent) for file in result["files"]} == {True}


def test_the_command_itself_is_there(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "isobatch", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "isobatch 0.1.0\n"
