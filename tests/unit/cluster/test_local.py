"""What is checked before a Ray is started, and what is left after: nothing."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.haproxy import local_statistics
from cluster.local import check_place, free_port, running_cluster
from cluster.processes import descendants
from profiles.errors import UserError


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No note of a Ray that others run on this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def test_a_taken_port_is_named_and_another_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of 127\.0\.0\.1 cannot be used.*--port"):
            check_place("127.0.0.1", port)
        assert free_port(port) != port
    check_place("127.0.0.1", port)
    assert free_port(port) == port


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(UserError, match=r"port 8000 of 192\.0\.2\.77 cannot be used"):
        check_place("192.0.2.77", 8000)


def test_a_note_of_a_cluster_counts_only_while_somebody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert running_cluster() is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert running_cluster() == address
    assert running_cluster() is None
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(UserError, match=r"already running at head:6379.*'ray stop'"):
        check_place("127.0.0.1", 8000)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_orphan_is_adopted_and_ended(tmp_path: Path) -> None:
    script = f"""
import os, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from cluster.processes import adopt_orphans, descendants, end_descendants
adopt_orphans()
# A shell that starts a sleeper which ignores SIGTERM, tells its number, and goes away.
told = subprocess.check_output(["sh", "-c", "trap '' TERM; sleep 60 >/dev/null & echo $!"], text=True)
assert descendants(os.getpid()) == [int(told)], descendants(os.getpid())
end_descendants(patience_s=0.1)
assert descendants(os.getpid()) == []
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=20)


def test_descendants_do_not_count_the_process_itself() -> None:
    assert os.getpid() not in descendants(os.getpid())


def test_statistics_of_haproxy_are_for_this_machine_whatever_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "real").chmod(0o700)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "real"))
    config = tmp_path / "of a node.cfg"
    config.write_text("    bind :9101\n    bind *:8000\n    bind 10.0.0.1:8000\n  bind *:8404\n  bind *:84041\n")
    script = local_statistics(tmp_path, ("8404", "9101"))
    assert subprocess.check_output([script, "-db", "-f", config], text=True) == f"-db -f {config}\n"
    assert [line.split()[1] for line in config.read_text().splitlines()] == [
        "127.0.0.1:9101",
        "*:8000",
        "10.0.0.1:8000",
        "127.0.0.1:8404",
        "*:84041",
    ]
