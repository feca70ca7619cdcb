"""Hashes the code of a benchmark: every function and class of the modules that it reaches by imports.

Comments, docstrings and layout do not count, since they do not change figures. Modules that are named in strings
("isobatch.deployments.app:build") and data files beside a module that names them count, too.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("profiles", "optimizer", "deployments", "cluster", "experiments", "tests")
# "isobatch." before a package of the product, which does not change figures.
OURS = re.compile(rf"\bisobatch\.(?=(?:{'|'.join(PACKAGES)})\b)")
MODULE = re.compile(rf"^(?:isobatch\.)?((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?::\w+)?$")
DIGITS = 4  # of the hash of a function, of a class without its functions, or of the rest of a module
FACTS = re.compile(r"^[\w./-]+\.(?:csv|json|yaml)$")

Read = Callable[[str], str | None]  # the text of a file of the tree by its path; None: there is no file


def from_tree(path: str) -> str | None:
    file = ROOT / path
    return file.read_text() if file.is_file() else None


def code_of(claim: str, read: Read = from_tree) -> dict[str, str]:
    """The hashes of each module of a benchmark, by its path. "decoding@amx" is `decoding` on another
    machine."""
    name = claim.partition("@")[0]
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / name).glob("test_*.py"))
    return code_behind(f"experiments/{name}/run.py", *tests, read=read)


def code_behind(*paths: str, read: Read = from_tree) -> dict[str, str]:
    """The hashes of these modules and of all modules that they reach, by path."""
    result: dict[str, str] = {}
    waiting, known = list(paths), set(paths)
    while waiting:
        path = waiting.pop()
        if (text := read(path)) is None:
            continue
        result[path], reached = _module(path, text) if path.endswith(".py") else (_hash(text), set[str]())
        waiting += reached - known
        known |= reached
    return dict(sorted(result.items()))


def changed(kept: dict[str, str], now: dict[str, str]) -> list[str]:
    """The modules of `now` that are changed or new.

    >>> changed({"a.py": "1", "b.py": "2", "gone.py": "5"}, {"a.py": "1", "b.py": "3", "c.py": "4"})
    ['b.py', 'c.py']
    """
    return [path for path, marks in now.items() if kept.get(path) != marks]


def changes(kept: dict[str, str], now: dict[str, str]) -> tuple[int, int]:
    """The number of parts of `now` that are changed or new, and of all its parts.

    >>> changes({"a.py": "11112222", "gone.py": "5555"}, {"a.py": "222233334444", "c.py": "5555"})
    (3, 4)
    """
    before, after = _parts(kept), _parts(now)
    return (after - before).total(), after.total()


def _parts(marks: dict[str, str]) -> Counter[tuple[str, str]]:
    return Counter(
        (path, each[start : start + DIGITS]) for path, each in marks.items() for start in range(0, len(each), DIGITS)
    )


@cache
def _module(path: str, text: str) -> tuple[str, set[str]]:
    """The hashes of a module, and the files that it may reach. Cached, since most benchmarks reach the same modules."""
    tree = ast.parse(text)
    return "".join(map(_hash, _divided(tree))), set(_reached(tree, path))


def _divided(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    """The functions of a module or class, each as text, and then everything else in it."""
    rest = list[ast.stmt]()
    for each in _counted(node, node.body):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield _meant(each)
        elif isinstance(each, ast.ClassDef):
            yield from _divided(each)
        else:
            rest.append(each)
    if isinstance(node, ast.ClassDef):
        head = [node.name, *map(_meant, (node.bases, node.keywords, node.decorator_list))]
        yield " ".join(["class", *head, _meant(rest)])
    else:
        yield _meant(rest)


def _reached(tree: ast.AST, path: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield from _files(each.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from _files(node.module)
            for each in node.names:
                yield from _files(f"{node.module}.{each.name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if named := MODULE.match(node.value):
                yield from _files(named[1])
            elif FACTS.match(node.value):
                yield f"{path.rpartition('/')[0]}/{node.value}"
        elif isinstance(node, ast.Name) and node.id == "iter_modules":  # a package that imports all its files
            folder = path.rpartition("/")[0]
            yield from (f"{folder}/{file.name}" for file in (ROOT / folder).glob("*.py"))


def _files(module: str) -> Iterator[str]:
    """The possible files of our module, and of its packages, which are imported before it."""
    parts = module.removeprefix("isobatch.").split(".")
    if parts[0] in PACKAGES:
        yield "/".join(parts) + ".py"
        for size in range(1, len(parts) + 1):
            yield "/".join(parts[:size]) + "/__init__.py"


def _meant(node: Any) -> str:
    """A syntax tree as text, without docstrings, and the same in every version of Python."""
    if isinstance(node, ast.AST):
        fields = [
            f" {name}={_meant(_counted(node, value) if name == 'body' else value)}"
            for name in node._fields
            if (value := getattr(node, name, None)) not in (None, []) and name not in ("kind", "type_comment")
        ]
        return f"({type(node).__name__}{''.join(fields)})"
    if isinstance(node, list):
        return "".join(map(_meant, node))
    return OURS.sub("", repr(node))


def _counted(node: ast.AST, body: Any) -> Any:
    """The statements that count: no docstring, no refusal of a module's second name, and imports in sorted order."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        body = body[1:] if ast.get_docstring(node, clean=False) is not None else body
    if not isinstance(node, ast.Module):
        return body
    body = [each for each in body if not (isinstance(each, ast.If) and isinstance(each.body[0], ast.Raise))]
    ordered = iter(sorted(filter(_is_ours, body), key=lambda each: OURS.sub("", each.module)))
    return [next(ordered) if _is_ours(each) else each for each in body]


def _is_ours(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and OURS.sub("", node.module or "").split(".")[0] in PACKAGES


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:DIGITS]
