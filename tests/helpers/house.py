"""Prints how large the house is: `make house`."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).parents[2]
PRODUCT = ("profiles", "optimizer", "deployments", "cluster")
DESIGN = ROOT / "docs" / "design.md"
# Words of the product that writes texts; `bytes.decode`, the decoders of JSON and MessagePack, and the head of ViTPose
# (`use_simple_decoder`) are others.
OF_DECODERS = re.compile(r"(?<!msgpack.)(?<!json.)(?<!simple_)decod(?:er|ing)", re.IGNORECASE)


def main() -> None:
    folders = (*PRODUCT, "experiments", "tests")
    lines = {folder: _lines(sources(folder)) for folder in folders}
    for folder, count in lines.items():
        print(f"{count:8,}  lines of {folder}/")
    print(f"{sum(lines[folder] for folder in PRODUCT):8,}  lines of product")
    pages = {page.name: len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")}
    print(f"{sum(pages.values()):8,}  words in {len(pages)} pages of docs")
    for name in ("README.md", "CHANGELOG.md"):
        print(f"{len((ROOT / name).read_text().split()):8,}  words of {name}")
    print(f"{len(circles(PRODUCT)):8}  circles of imports")
    ignored = (ROOT / "pyproject.toml").read_text().count(" -> ")
    print(f"{ignored:8}  imports that the layers of pyproject.toml leave out")
    decoders = [path for folder in PRODUCT for path in sources(folder) if OF_DECODERS.search(path.read_text())]
    beside = [path for path in decoders if "decoding" not in path.parts]
    print(f"{len(decoders):8}  files that name decoders, {len(beside)} of them outside deployments/decoding")
    for question, files in where_is():
        print(f"{len(files):8}  files: {question}")


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def where_is() -> list[tuple[str, list[str]]]:
    """The questions of docs/design.md with the files that answer them."""
    _, _, table = DESIGN.read_text().partition("## Where is")
    rows = re.findall(r"^\| ([^|]+) \| (.*`[^|]+`.*) \|$", table.partition("\n## ")[0], re.M)
    return [(question, re.findall(r"`([^`]+\.py)`", files)) for question, files in rows]


def circles(packages: Iterable[str]) -> list[list[str]]:
    """Modules that import each other in a circle of any length; imports inside functions count."""
    modules = {_module(path): path for package in packages for path in sources(package)}
    numbers = {name: number for number, name in enumerate(modules)}
    edges = [
        (numbers[name], numbers[imported])
        for name, path in modules.items()
        for imported in _imports(path)
        if imported in numbers
    ]
    rows, columns = np.array(edges).T
    graph = csr_matrix((np.ones(len(edges)), (rows, columns)), (len(numbers), len(numbers)))
    _, part = connected_components(graph, connection="strong")
    members = [[name for name, number in numbers.items() if part[number] == each] for each in np.unique(part)]
    return [names for names in members if len(names) > 1]


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return f"isobatch.{name}" if name.startswith(PRODUCT) else name


def _imports(path: Path) -> Iterable[str]:
    """What a file imports when it runs: not under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


if __name__ == "__main__":
    main()
