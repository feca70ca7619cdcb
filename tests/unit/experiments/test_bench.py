"""A result says under which conditions, and by which code, it was measured."""

import json
from pathlib import Path

from experiments.bench import Conditions, write
from experiments.shared.machine import computes_bfloat16, processor, processor_flags
from experiments.shared.version import changed, code_of

TREE = {
    "experiments/claim/run.py": "from isobatch.profiles import a\nimport optimizer.b\nPATH = 'cluster.d:build'\n",
    "profiles/__init__.py": "",
    "profiles/a.py": 'import json\nFACTS = "facts.csv"\n',
    "profiles/facts.csv": "1,2\n",
    "optimizer/b.py": "def c() -> int:\n    return 1\n",
    "cluster/d.py": "import numpy\n",
    "deployments/unused.py": "",
}


def test_a_result_has_its_processor_commit_load_and_time(tmp_path: Path) -> None:
    kept = json.loads(write("real", {"ratio": 0.123456789}, Conditions(0.25, "0f3a91c2+"), tmp_path).read_text())
    assert (kept["figures"], kept["commit"]) == ({"ratio": 0.12346}, "0f3a91c2+")
    assert kept["machine"]["load"] == 0.25
    assert kept["seconds"] >= 0
    assert {"processor", "flags", "cores", "python", "torch"} <= set(kept["machine"])


def test_flags_are_those_by_which_batches_are_cheap(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: A Processor\nflags\t\t: fpu avx2 avx512f avx512_bf16\n")
    assert processor(cpuinfo) == "A Processor"
    assert processor_flags(cpuinfo) == ["avx512", "bfloat16", "avx2"]
    assert computes_bfloat16(cpuinfo)
    assert processor_flags(tmp_path / "none") == []
    assert not computes_bfloat16(tmp_path / "none")


def test_all_that_a_benchmark_reaches_counts_and_nothing_else() -> None:
    assert list(code_of("claim", TREE.get)) == sorted(set(TREE) - {"deployments/unused.py"})


def test_comments_docstrings_and_layout_are_no_change_but_code_and_facts_are() -> None:
    before = code_of("claim", TREE.get)
    same = TREE | {"optimizer/b.py": 'def c() -> int:\n    """One."""\n\n    return 1  # always\n'}
    assert changed(before, code_of("claim", same.get)) == []
    other = TREE | {"optimizer/b.py": "def c() -> int:\n    return 2\n", "profiles/facts.csv": "1,3\n"}
    assert changed(before, code_of("claim", other.get)) == ["optimizer/b.py", "profiles/facts.csv"]


def test_the_name_of_the_package_around_the_product_is_no_change() -> None:
    run, first = "experiments/claim/run.py", "deployments/__init__.py"
    imports = [
        "from experiments.shared import d",
        "from isobatch.deployments.b import c",
        "from isobatch.profiles import a",
    ]
    before = {run: "\n".join(sorted(line.replace("isobatch.", "") for line in imports)), first: '"""About it."""\n'}
    refusal = before[first] + "if __name__ != 'isobatch.deployments':\n    raise ImportError('another name')\n"
    found = code_of("claim", (TREE | {run: "\n".join(imports), first: refusal}).get)
    assert code_of("claim", (TREE | before).get) == found
    assert {"profiles/a.py", first} <= set(found)


def test_benchmarks_reach_the_product() -> None:
    found = code_of("serve")
    assert {"deployments/app.py", "deployments/dispatch/dispatcher.py", "optimizer/plan.py"} <= set(found)
    assert "optimizer/goals/latency.py" in found, "the package imports all its files"
