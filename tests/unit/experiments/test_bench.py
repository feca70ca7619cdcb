"""A result records the code by which it was measured."""

from functools import partial
from math import sqrt
from signal import SIGKILL, raise_signal

import pytest

from experiments.shared.live import in_own_process
from experiments.shared.version import changed, changes, code_of
from isobatch.profiles.errors import UserError

TREE = {
    "experiments/claim/run.py": "from isobatch.profiles import a\nimport optimizer.b\nPATH = 'cluster.d:build'\n",
    "profiles/__init__.py": "",
    "profiles/a.py": 'import json\nFACTS = "facts.csv"\n',
    "profiles/facts.csv": "1,2\n",
    "optimizer/b.py": "def c() -> int:\n    return 1\n",
    "cluster/d.py": "import numpy\n",
    "deployments/unused.py": "",
}


def test_all_that_a_benchmark_reaches_counts_and_nothing_else() -> None:
    assert list(code_of("claim", TREE.get)) == sorted(set(TREE) - {"deployments/unused.py"})
    assert code_of("claim@othermachine", TREE.get) == code_of("claim", TREE.get)


def test_comments_docstrings_and_layout_are_no_change_but_code_and_facts_are() -> None:
    before = code_of("claim", TREE.get)
    same = TREE | {"optimizer/b.py": 'def c() -> int:\n    """One."""\n\n    return 1  # always\n'}
    assert changed(before, code_of("claim", same.get)) == []
    other = TREE | {"optimizer/b.py": "def c() -> int:\n    return 2\n", "profiles/facts.csv": "1,3\n"}
    assert changed(before, code_of("claim", other.get)) == ["optimizer/b.py", "profiles/facts.csv"]


def test_each_function_of_a_module_or_class_counts_for_itself() -> None:
    text = (
        "LIMIT = 1\n\nclass C:\n    A = 1\n\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"
    )
    before = code_of("claim", (TREE | {"optimizer/b.py": text}).get)
    total = 9  # five other modules with one part each, and f, g, the rest of C, and LIMIT
    assert changes(before, before) == (0, total)
    for old, new in (("return 2", "return 3"), ("A = 1", "A = 2"), ("class C", "class C(int)"), ("LIMIT", "MOST")):
        after = code_of("claim", (TREE | {"optimizer/b.py": text.replace(old, new)}).get)
        assert changes(before, after) == (1, total), old


def test_a_process_that_is_killed_ends_its_measurement_with_a_sentence() -> None:
    assert in_own_process(partial(sqrt, 9.0)) == 3.0
    with pytest.raises(UserError, match=r"^the process that measures was killed"):
        in_own_process(partial(raise_signal, SIGKILL))
