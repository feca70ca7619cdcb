"""What the tree promises to whoever reads it."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERNS = {"experiments/results/NAME.json", "experiments/NAME/run.py"}
PRODUCT = ("profiles", "optimizer", "deployments", "cluster")
PACKAGES = (*PRODUCT, "experiments")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def public_classes(packages: tuple[str, ...] = PACKAGES) -> dict[str, list[str]]:
    """Where each name is, of all classes at the top of a module."""
    found = defaultdict(list)
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def aliases() -> dict[str, list[str]]:
    """Where each name is that stands for a type, at the top of a module of the product."""
    found = defaultdict(list)
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in parsed(path).body:
                targets = node.targets if isinstance(node, ast.Assign) else []
                for name in (each.id for each in targets if isinstance(each, ast.Name)):
                    if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                        found[name].append(str(path.relative_to(ROOT)))
    return found


def test_no_two_public_classes_have_the_same_name() -> None:
    assert not {name: files for name, files in public_classes().items() if len(files) > 1}


def test_no_name_of_a_type_is_that_of_a_class_too() -> None:
    classes = public_classes(PRODUCT)
    assert not {name: [*files, *classes[name]] for name, files in aliases().items() if name in classes}


def test_no_test_module_imports_another() -> None:
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(parsed(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else names
            wrong += [(path.name, name) for name in names if ".test_" in name and name.startswith("tests.")]
    assert not wrong, "what test modules share belongs to tests/helpers"


def test_the_pages_name_only_files_that_there_are() -> None:
    named = re.compile(rf"`((?:{'|'.join(PACKAGES)}|tests|docs)/[\w./]+)`")
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [(page.name, path) for page in pages for path in named.findall(page.read_text())]
    assert not [(page, path) for page, path in found if path not in PATTERNS and not (ROOT / path).exists()]


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
    found = [(path.name, name) for path in [*pages, *sources] for name in whole.findall(path.read_text())]
    found += [(page.name, name) for page in pages for name in last.findall(page.read_text())]
    assert not [(where, name) for where, name in found if name not in ends | PATTERNS]


# These say that something was said or done, and not what it is: a name says what a value holds.
EMPTY_NAMES = {"told", "said", "found", "settled", "meant", "played"}


def _names(path: Path) -> set[str]:
    """All functions, classes, arguments, and what is assigned."""
    names = set()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return {name.strip("_").lower() for name in names}


def test_names_say_what_they_hold() -> None:
    sources = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    assert not {str(path): empty for path in sources if (empty := EMPTY_NAMES & _names(path))}
