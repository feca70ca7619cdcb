"""What the tree promises to whoever reads it."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERNS = {"experiments/results/NAME.json"}
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
