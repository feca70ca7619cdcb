"""Claim: nodes that fall silent cost no request, and two fronts fill batches as one front does.

`make bench-chaos` kills nodes; here the network to a node ends without an error. Nodes are processes of this machine
with addresses of their own in a network namespace (`unshare`, Linux), where the route to one of them can be removed.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.chaos.run import Round, figures_of
from experiments.cluster import fronts
from experiments.cluster.nodes import CUT

FAULTS = 30


def measure(parts: str = "fronts nodes", faults: int = FAULTS) -> dict[str, float]:
    figures = fronts.measure() if "fronts" in parts else {}
    return figures | _nodes(faults) if "nodes" in parts else figures


def _nodes(faults: int) -> dict[str, float]:
    struck = _struck(faults)
    if bad := [each.sentence for each in struck if each.lost or each.wrong or each.failed]:
        raise RuntimeError("requests were not answered as they should be: " + "; ".join(bad))
    cut_s = [each.recovery_s for each in struck if each.what == CUT]
    return figures_of(struck) | {"node_faults": float(len(struck)), "partition_recovery_s": max(cut_s, default=0.0)}


def _struck(faults: int) -> list[Round]:
    with TemporaryDirectory() as folder:
        out = Path(folder, "rounds.json")
        words = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-m", "experiments.cluster.nodes"]
        subprocess.run([*words, str(out), str(faults)], check=True)
        return [Round(**each) for each in json.loads(out.read_text())]
