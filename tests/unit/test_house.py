"""What the tree promises to whoever reads it."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.helpers.house import circles

ROOT = Path(__file__).parents[2]
PATTERNS = {"experiments/results/NAME.json", "experiments/NAME/run.py"}
PRODUCT = ("profiles", "optimizer", "deployments", "cluster")
PACKAGES = (*PRODUCT, "experiments")


# These say that something was said or done, and not what it is: a name says what a value holds.
EMPTY_NAMES = {"told", "said", "found", "settled", "meant", "played"}


NAMING = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.arg, ast.Name, ast.Attribute, ast.ImportFrom, ast.Import,
)  # fmt: skip


class Facts(NamedTuple):
    """Of a file; its syntax tree is not kept, as those of all files would make every later test slower."""

    classes: list[str]  # at the top, and public
    aliases: list[str]  # names at the top that stand for a type
    imports: set[str]
    names: set[str]  # of all functions, classes, arguments, and what is assigned


@cache
def facts_of(path: Path) -> Facts:
    tree = ast.parse(path.read_text())
    facts = Facts(
        [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")],
        [
            name.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for name in node.targets
            if isinstance(name, ast.Name) and re.fullmatch(r"[A-Z]\w*[a-z]\w*", name.id)
        ],
        set(),
        set(),
    )
    for node in ast.walk(tree):
        match node if isinstance(node, NAMING) else None:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                facts.names.add(name.strip("_").lower())
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                facts.names.add(name.strip("_").lower())
            case ast.ImportFrom(module=str(name)):
                facts.imports.add(name)
            case ast.Import(names=names):
                facts.imports.update(each.name for each in names)
    return facts


def sources(folders: Iterable[str]) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_two_public_classes_have_the_same_name_nor_that_of_another_type() -> None:
    files = defaultdict(list)
    for path in sources(PACKAGES):
        for name in facts_of(path).classes:
            files[name].append(path)
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}
    of_product = {name for name, (path,) in files.items() if path.relative_to(ROOT).parts[0] in PRODUCT}
    assert not {name for path in sources(PRODUCT) for name in facts_of(path).aliases} & of_product


def test_no_modules_of_the_product_import_each_other_in_a_circle() -> None:
    assert circles(PRODUCT) == [], "inside functions, too; types alone are imported under TYPE_CHECKING"


def test_no_test_module_imports_another() -> None:
    imports = [(path.name, name) for path in sources(["tests"]) for name in facts_of(path).imports]
    wrong = [(path, name) for path, name in imports if ".test_" in name and name.startswith("tests.")]
    assert not wrong, "what test modules share belongs to tests/helpers"


def test_the_pages_name_only_files_that_there_are() -> None:
    named = re.compile(rf"`((?:{'|'.join(PACKAGES)}|tests|docs)/[\w./]+)`")
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    result = [(page.name, path) for page in pages for path in named.findall(page.read_text())]
    assert not [(page, path) for page, path in result if path not in PATTERNS and not (ROOT / path).exists()]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_to_a_file_and_a_heading() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    broken = []
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            outside = page.parent.name == "docs" and not target.resolve().is_relative_to(page.parent)  # as in the site
            if outside or not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append((page.name, link))
    assert not broken


def test_the_site_has_every_page() -> None:
    pages = re.findall(r'"([\w-]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(pages) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_modules_that_are_named_in_pages_and_sources_exist() -> None:
    """In pages by their last part, too (`driver.py`), as in tables on one folder."""
    folders = (*PACKAGES, "tests")
    modules = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    ends = {end for module in modules for end in (module, module.rpartition("/")[2])}
    whole, last = re.compile(rf"\b((?:{'|'.join(PACKAGES)}|tests)/[\w/]+\.py)\b"), re.compile(r"`(\w+\.py)`")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    result = [(path.name, name) for path in [*pages, *sources] for name in whole.findall(path.read_text())]
    result += [(page.name, name) for page in pages for name in last.findall(page.read_text())]
    assert not [(where, name) for where, name in result if name not in ends | PATTERNS]


def test_names_say_what_they_hold() -> None:
    assert not {str(path): empty for path in sources(PRODUCT) if (empty := EMPTY_NAMES & facts_of(path).names)}
