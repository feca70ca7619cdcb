"""Claim: nodes may vanish, silently too, and come back, and no request is lost; several fronts fill batches as one;
nodes that Ray can rent come when more is asked, and go again; a mixed fleet keeps what its plan promises; links that
are declared slow are avoided.

The nodes that vanish are on this machine, at addresses of their own in a network of their own (`unshare`, Linux), so
that the way to one of them can be cut: what is sent there vanishes without an error.

It is measured in parts, fronts and faults in several. What a part has found is kept (`~/.cache/isobatch/bench-cluster`)
until its code is another or its file is deleted, so a run that was broken off goes on where it was. `python -m
experiments.bench cluster parts=link` measures one part alone; `parts=nodes faults=20` the first of its faults.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.chaos.run import Round, figures_of
from experiments.cluster import fleets, fronts, growing
from experiments.cluster.nodes import CUT
from experiments.shared.kept_parts import kept, place_of

FAULTS, TOGETHER = 100, 20  # faults in all, and those of one application


def measure(parts: str = "", faults: int = FAULTS) -> dict[str, float]:
    """`parts`: those that are measured, by their names; none: all. Neither those that were measured before."""
    todo: dict[str, Callable[[], dict[str, float]]] = {
        "fronts": _fronts,
        "growth": partial(_done, "growth", growing.measure, "growing"),
        "share": partial(_done, "share", fleets.four_nodes, "fleets"),
        "link": partial(_done, "link", fleets.slow_link, "fleets"),
        "nodes": partial(_nodes, faults),
    }
    figures = dict[str, float]()
    for part, work in todo.items():
        if not parts or part in parts.split():
            figures |= work()
    return figures


def _fronts() -> dict[str, float]:
    result = {each: _done(f"fronts {each}", partial(fronts.measure, each), "fronts") for each in fronts.FRONTS}
    return fronts.figures(result)


def _nodes(faults: int) -> dict[str, float]:
    struck = [
        Round(**each)
        for seed in range(-(-faults // TOGETHER))
        for each in _done(f"nodes {seed}", partial(_struck, min(TOGETHER, faults - seed * TOGETHER), seed), "nodes")
    ]
    if bad := [each.sentence for each in struck if each.lost or each.wrong or each.failed]:
        raise RuntimeError("requests were not answered as they should be: " + "; ".join(bad))
    figures = {f"node_{name}" if name == "faults" else name: value for name, value in figures_of(struck).items()}
    cut_s = [each.recovery_s for each in struck if each.what == CUT]
    return figures | {"partition_recovery_s": max(cut_s, default=0.0)}


def _struck(faults: int, seed: int) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        words = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-m", "experiments.cluster.nodes"]
        subprocess.run([*words, str(out), str(faults), str(seed)], check=True)
        result: list[dict[str, Any]] = json.loads(out.read_text())
    return result


def _done(part: str, work: Callable[[], Any], module: str) -> Any:
    return kept(place_of("cluster", part, module=module).with_suffix(".json"), work)
