"""The wheel in an environment of its own, far from the checkout: every command of the README runs there."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import venv
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from isobatch.cluster.controller.status import status_of
from tests.helpers.command_lines import ROOT, SMALL, material, readme_lines
from tests.helpers.fluid_application import MEDIUM, Fluid, control_loop, first_plan, question

PACKAGES = ("profiles", "optimizer", "deployments", "cluster")

# Runs command lines one after the other, as `isobatch` would, and prints how each of them ended. Only what never ends
# by itself is cut short: `serve` and `deploy` where they would need a Ray, `status --watch` after
# it has shown everything once.
DRIVER = """
import contextlib, io, json, sys, types
import isobatch.cluster.commands.deploy, isobatch.cluster.commands.serve, isobatch.cluster.commands.status
from isobatch.cluster.cli import main
from isobatch.cluster.serving.serve_file import serve_file

def interrupt(seconds):
    raise KeyboardInterrupt

isobatch.cluster.commands.serve.run = lambda content, *_: print("would serve", json.dumps(content))
isobatch.cluster.commands.deploy.run = lambda content, *_: print("would deploy", json.dumps(content))
isobatch.cluster.commands.status.time = types.SimpleNamespace(sleep=interrupt)
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
print(json.dumps({"ended": ended, "files": [module.__file__ for module in ours if module.__file__]}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that neither an older build nor this one leaves anything in the checkout."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "isobatch", copy / "isobatch", symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    _pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(out), str(copy))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `bin` of an environment that holds the wheel. A .pth file leads to the packages of others.

    Python does not read the .pth files that lie there, by which the tests' own environment finds the checkout.
    """
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    purelib = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(purelib.strip()) / "others.pth").write_text("\n".join(sorted(others)) + "\n")
    return home / "bin"


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    subprocess.run(command, check=True, capture_output=True, text=True)


class Answers(BaseHTTPRequestHandler):
    """Somebody who answers requests, and who looks like a controller to `isobatch status`."""

    protocol_version = "HTTP/1.1"
    status: bytes

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b'{"outputs": []}')

    def do_GET(self) -> None:
        self._answer(self.status)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    asked = question(MEDIUM)
    loop = control_loop(Fluid(asked, first_plan(asked)))
    texts = {"name": "inputs", "datatype": "BYTES", "shape": [-1, 1]}  # as `isobatch load` asks for it
    network = {"model": "toy", "inputs": [texts]}
    Answers.status = json.dumps({"application": "toy", **status_of(loop, 0.0), "promise": "none", **network}).encode()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def run(installed: Path, folder: Path, lines: list[list[str]]) -> dict[str, Any]:
    """In one process, since imports take longer than all that these lines do."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [installed / "python", "-I", "-c", DRIVER], input=json.dumps(lines), cwd=folder, capture_output=True, text=True,
        env=environment | {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "80"},
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


def test_every_command_runs_installed(installed: Path, address: str, tmp_path: Path) -> None:
    helps = [[name, "--help"] for name in sorted(SMALL)]
    real = readme_lines(address)
    lines = [*helps, *real, ["serve"], ["serve", "reviews.csv"], ["serve", "nowhere.yaml"]]
    result = run(installed, material(tmp_path), lines)
    outcome = {" ".join(line): ended for line, ended in zip(lines, result["ended"], strict=True)}
    for line in (*helps, *real, ["serve"]):
        ended = outcome[" ".join(line)]
        watched = "--watch" in line
        if line == ["doctor"]:  # what it finds here is this machine's business
            assert ended["code"] in (0, 1), ended
            continue
        assert ended["code"] == (130 if watched else 0), (line, ended)
    assert not [line for line in real if "…" in outcome[" ".join(line)]["said"]], "a table is cut off at 80 columns"
    assert "sustains now" in outcome[f"status {address} --watch"]["said"]
    assert "would serve" in outcome["serve my-bert-ee --plan plan.json --profile profile.json"]["said"]
    assert "would deploy" in outcome["deploy serve.yaml --address auto"]["said"]
    assert "cluster/demo/plan.json" in outcome["serve"]["said"]
    for wrong, reason in (
        ("serve reviews.csv", "is not a Serve file"),
        ("serve nowhere.yaml", "no such directory or file"),
    ):
        assert outcome[wrong]["code"] == 2
        assert reason in outcome[wrong]["said"]
    for name in (
        "my-bert-ee/exits.json",
        "profile.json",
        "plan.json",
        "plan.png",
        "simulation.png",
        "load.json",
        "bench.json",
    ):
        assert (tmp_path / name).stat().st_size > 0, name
    assert {Path(file).is_relative_to(installed.parent) for file in result["files"]} == {True}


def test_the_command_itself_is_there(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "isobatch", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "isobatch 0.1.0\n"
