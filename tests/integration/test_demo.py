"""What the shipped demo must show: a real exit curve at little loss, that moves deeper as inputs get harder.

It is also what processes compute that share a device: one of this machine's cores.
"""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.demos.quality import Quality, quality_of
from isobatch.cluster.cli import app
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.models import TorchModel, load
from isobatch.profiles.files import Profile
from isobatch.profiles.files import load as load_profile
from isobatch.profiles.sweep import whole_s


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return load(demo_directory())


@pytest.fixture(scope="module")
def quality(model: TorchModel) -> Quality:
    return quality_of(model, seed=23)


def test_it_shows_here_and_now_all_that_a_demo_must(quality: Quality) -> None:
    """On other inputs than those that it was chosen by, in this processor's arithmetic."""
    assert quality.shortcomings() == []


def profiled(out: Path, *more: str) -> Profile:
    command = ["profile", "demo", "--out", str(out), "--device", "cpu", "--timing-s", "0.1", "--largest", "2", *more]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return load_profile(out)


@pytest.mark.long
def test_what_sharing_costs_is_measured_by_processes_on_the_same_core(tmp_path: Path) -> None:
    known = profiled(tmp_path / "profile.json", "--together", "2")
    assert known.kinds == ("cpu", "cpu/2")
    own, shared = known.table("cpu"), known.table("cpu/2")
    assert shared.batch_sizes == own.batch_sizes
    # how much longer launches take together is not asserted: others compute on these cores, and slow both
    assert not np.array_equal(whole_s(shared), whole_s(own))
    assert any(
        note.startswith("cpu/2: launches at once take longer than alone, by batch size: ") for note in known.notes
    )
    again = profiled(tmp_path / "profile.json")
    assert again.kinds == ("cpu",), "what was measured with other times does not stay beside new ones"
