"""What was started ends with us, whatever happens to us."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.asking import eventually
from tests.helpers.serving import marked

STARTS_ONE_THAT_LEAVES = """
import os, subprocess, sys, time
from pathlib import Path
from isobatch.cluster.serving.processes import adopt_orphans, bound_to_us, end_descendants
adopt_orphans()
os.environ |= bound_to_us(Path(sys.argv[1]))
if "again" in sys.argv:
    end_descendants(0.1)
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("attempt", ["first", "again"])
def test_what_is_killed_takes_with_it_what_it_started_and_its_folder(tmp_path: Path, attempt: str) -> None:
    """Also where a first attempt had failed, and what it left was ended."""
    folder, beside = tmp_path / "of it", tmp_path / "of it too"
    for each in (folder, beside):
        each.mkdir()
    mark, other = f"ISOBATCH_FOLDER={folder}", {"ISOBATCH_FOLDER": str(beside)}
    command = [sys.executable, "-c", STARTS_ONE_THAT_LEAVES, str(folder), attempt]
    with subprocess.Popen(["sleep", "600"], env=other) as stranger:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline() == "started\n"
            assert marked(mark)
            process.kill()
        assert eventually(lambda: not marked(f"{mark}\0"))
        assert eventually(lambda: not folder.exists())
        assert stranger.poll() is None
        assert beside.exists()
        stranger.kill()
