"""A tiny network that the command has given ramps, for the tests of one kind of network."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from numpy.typing import NDArray

from isobatch.deployments.prepare import pipeline
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exit_table import outcome
from tests.helpers.commands import done


def command(*arguments: object) -> Result:
    """The result of a command of `isobatch` that succeeds. Raises the command's error."""
    return done(*arguments, "--device", "cpu")


def prepare_network(place: Path, network: Path, data: Path, most_lost: str, *more: str) -> None:
    """Write it to `place`/out, without a picture, and what the command prints to `place`/output.txt."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patched.setattr(pipeline, "draw_exits", lambda _, path: path.touch())
        arguments = ("--data", data, "--out", place / "out", "--max-accuracy-loss", most_lost)
        output = command("prepare", network, *arguments, *more).output
    (place / "output.txt").write_text(" ".join(output.split()))


def check_exits(folder: Path, answers: Sequence[Any], num_blocks: int) -> dict[str, Any]:
    """Check that the tested inputs leave where exits.json and the exit table say, and that the promise fits to what
    they lose. Returns exits.json."""
    rules: dict[str, Any] = json.loads((folder / "exits.json").read_text())
    blocks: NDArray[np.int64] = np.array([each.exit_block for each in answers])
    assert (blocks < num_blocks - 1).any()
    for ramp in rules["ramps"]:
        assert ramp["survival"] == pytest.approx((blocks > ramp["block"]).mean())
    assert rules["mean_depth_share"] == pytest.approx((blocks + 1).mean() / num_blocks)
    promise, evidence = rules["promise"], Evidence.read(folder / EVIDENCE)
    chosen = evidence.nearest({each["block"]: each["threshold"] for each in rules["ramps"]})
    assert (evidence.test.places(chosen) == blocks).all()
    assert outcome(evidence.test, chosen, promise["metric"]).lost.mean == pytest.approx(promise["lost"], abs=1e-6)
    assert promise["lost"] < promise["bound"] <= promise["max_loss"]
    return rules
