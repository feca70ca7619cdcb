"""Documentation that runs: every docstring's examples, and the promises that the tree makes about itself."""

import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from experiments import headlines

ROOT = Path(__file__).parents[2]
PACKAGES = ("profiles", "optimizer", "deployments", "cluster", "experiments")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
)


# Run by a Python of its own, which has what ours has not.
FOREIGN = {"experiments.serve.litserve_stage"}


@pytest.mark.parametrize("module", [module for module in MODULES if module not in FOREIGN])
def test_the_examples_in_docstrings_run(module: str) -> None:
    assert doctest.testmod(import_module(module)).failed == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_found_inside_the_checkout_from_anywhere(package: str) -> None:
    code = f"import {package}; print({package}.__path__[0])"
    found = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).resolve() == ROOT / package


def test_the_page_of_results_says_what_the_benchmarks_have_kept() -> None:
    text = headlines.PAGE.read_text()
    assert headlines.page(text) == text, "run: make results"
