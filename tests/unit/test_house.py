"""What the tree promises to whoever reads it."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERNS = {"experiments/results/NAME.json", "experiments/NAME/run.py"}
PACKAGES = ("profiles", "optimizer", "deployments", "cluster", "experiments")


def public_classes() -> dict[str, list[str]]:
    """Where each name is, of all classes at the top of a module."""
    found = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_no_two_public_classes_have_the_same_name() -> None:
    assert not {name: files for name, files in public_classes().items() if len(files) > 1}


def test_no_test_module_imports_another() -> None:
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else names
            wrong += [(path.name, name) for name in names if ".test_" in name and name.startswith("tests.")]
    assert not wrong, "what test modules share belongs to tests/helpers"


def test_the_pages_name_only_files_that_there_are() -> None:
    named = re.compile(rf"`((?:{'|'.join(PACKAGES)}|tests|docs)/[\w./]+)`")
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [(page.name, path) for page in pages for path in named.findall(page.read_text())]
    assert not [(page, path) for page, path in found if path not in PATTERNS and not (ROOT / path).exists()]


def test_modules_that_are_named_in_pages_and_sources_exist() -> None:
    """In pages by their last part, too (`driver.py`), as in tables on one folder."""
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts}
    ends = {end for module in modules for end in (module, module.rpartition("/")[2])}
    whole, last = re.compile(rf"\b((?:{'|'.join(PACKAGES)}|tests)/[\w/]+\.py)\b"), re.compile(r"`(\w+\.py)`")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = [(path.name, name) for path in [*pages, *sources] for name in whole.findall(path.read_text())]
    found += [(page.name, name) for page in pages for name in last.findall(page.read_text())]
    assert not [(where, name) for where, name in found if name not in ends | PATTERNS]
