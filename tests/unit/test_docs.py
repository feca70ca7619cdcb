"""Documentation that runs: every docstring's examples, and the promises that the tree makes about itself."""

import doctest
import itertools
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from experiments.shared import results_page
from experiments.shared.version import DIGITS, code_of
from isobatch.cluster.controller.config import ControllerConfig
from isobatch.deployments.config import AppConfig
from isobatch.deployments.decoding.config import DecoderConfig
from tests.helpers import arguments_page

ROOT = Path(__file__).parents[2]
PARTS = [f"isobatch/{part}" for part in ("profiles", "optimizer", "deployments", "cluster")]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in (*PARTS, "experiments")
    for path in (ROOT / folder).rglob("*.py")
)


# Run by a Python of its own, which has what ours has not.
FOREIGN = {"experiments.peers.litserve_peer"}


HELPERS = [arguments_page.__name__]


@pytest.mark.parametrize("module", [*(module for module in MODULES if module not in FOREIGN), *HELPERS])
def test_the_examples_in_docstrings_run(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linecache.checkcache", lambda *_: None)  # doctest would look at every file, for every example
    assert doctest.testmod(import_module(module)).failed == 0


def test_each_package_is_found_inside_the_checkout_from_anywhere() -> None:
    code = "import isobatch, experiments; print(isobatch.__path__[0], experiments.__path__[0], sep='\\n')"
    result = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True).stdout
    assert [Path(line).resolve() for line in result.splitlines()] == [ROOT / "isobatch", ROOT / "experiments"]


def test_the_page_of_arguments_has_every_field_as_it_is() -> None:
    assert arguments_page.PAGE.read_text() == arguments_page.page(), "run: make arguments"


def test_the_schemas_of_files_are_as_the_code() -> None:
    kept = {path.name: path.read_text() for path in arguments_page.SCHEMAS.glob("*.json")}
    assert kept == arguments_page.schemas(), "run: make arguments"


def test_every_yaml_in_the_docs_is_valid_and_its_fields_are_known() -> None:
    known = {name for config in (AppConfig, DecoderConfig, ControllerConfig) for name in config.model_fields}
    for page in (ROOT / "docs").glob("*.md"):
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            content = yaml.safe_load(dedent(block))
            for application in content if isinstance(content, list) else content.get("applications", [content]):
                assert application.get("args", {}).keys() <= known, f"{page.name}: {block}"


@pytest.fixture(scope="module")
def kept() -> results_page.Kept:
    """All figures that are shown; finding out which are outdated takes seconds."""
    return results_page.shown()


def test_the_pages_of_results_say_what_the_benchmarks_have_kept(kept: results_page.Kept) -> None:
    text = results_page.PAGE.read_text()
    assert results_page.page(text, kept) == text, "run: make results"
    assert results_page.FIGURES.read_text().startswith(results_page.figures(kept)), "run: make results"


def test_figures_in_the_readme_are_those_of_a_benchmark_that_it_names_on_todays_code(kept: results_page.Kept) -> None:
    sections = re.split(r"\n(?=- |\n|#)", (results_page.PAGE.parents[1] / "README.md").read_text())
    for section in sections:
        claims = [claim.replace(" on=", "@") for claim in re.findall(r"`make bench-([\w =]+)`", section)]
        values = [value for claim in claims for value in kept.get(claim, {}).values()]
        for figure in re.findall(r"(?<!Python )\b\d+\.\d\d\b|\b\d+(?= texts/s)", section):
            decimals = len(figure.partition(".")[2])
            assert figure in {f"{value:.{decimals}f}" for value in values}, f"{figure} in: {section}"


def test_the_page_of_results_is_short() -> None:
    assert len(results_page.PAGE.read_text().splitlines()) <= 150


def test_a_missed_aim_is_on_the_page_of_results_however_good_the_others_are() -> None:
    soak, tcb = {"minutes": 60.0, "lost": 1.0, "wrong": 0.0}, {"slots_speedup_10_rows": 1.018}
    kept: results_page.Kept = {"soak": soak, "tcb": tcb, "chaos": {}}
    page = "\n".join(results_page.summary(kept))
    assert "| `soak` | 2 of 3 | requests without an answer, though asked again for 10 s: 1, aim ≤ 0 |" in page
    assert "| slots, of 10 rows of 400 tokens | 1.18 | **1.018** | `bench-tcb` |" in page
    assert (
        "| requests without an answer in these faults, though asked again for 10 s | not measured | ≤ 0 | `chaos` |"
        in page
    )


def test_figures_of_code_that_has_changed_since_are_hidden_and_named() -> None:
    kept: results_page.Kept = {"tcb": {"slots_speedup_10_rows": 1.018}}
    page = "\n".join(results_page.summary(kept))
    assert "| `bench-sim` |" not in page
    assert "`bench-sim`" in page[page.index("Not shown") :]


def test_benchmarks_reach_the_product() -> None:
    result = code_of("serve")
    assert {"deployments/app.py", "deployments/dispatch/dispatcher.py", "optimizer/plan.py"} <= set(result)
    assert "optimizer/goals/latency.py" in result, "the package imports all its files"


@pytest.mark.parametrize(("share", "hidden"), [(0.0, False), (0.29, False), (0.31, True)])
def test_a_claim_is_outdated_when_too_many_of_its_functions_have_changed(share: float, hidden: bool) -> None:
    now = code_of("forecast")
    count = sum(map(len, now.values())) // DIGITS
    numbers = itertools.count()

    def before(marks: str) -> str:
        parts = [marks[start : start + DIGITS] for start in range(0, len(marks), DIGITS)]
        return "".join("*" * DIGITS if next(numbers) < share * count else part for part in parts)

    code = " ".join(f"{path}={before(marks)}" for path, marks in now.items())
    assert results_page.is_outdated("forecast", {"code": code}) == hidden


def test_a_claim_whose_code_was_not_noted_is_outdated() -> None:
    assert results_page.is_outdated("forecast", {})
