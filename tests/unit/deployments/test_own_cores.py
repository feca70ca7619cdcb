"""Which cores replicas compute on, and that all other threads of their Ray leave these cores."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread, get_native_id

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.own_cores import LEFT_SHARE, OwnCores, as_computing, divided, own_cores, usable_cores
from isobatch.deployments.processes import parent_of

# A process that starts another one, as Ray's process of a node does; both end when their input does.
STARTER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=sys.stdin)
print(child.pid, flush=True)
child.wait()
"""
needs = st.lists(st.integers(0, 8), max_size=8)
several = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be divided")


@given(st.sets(st.integers(0, 63), min_size=1), needs)
def test_all_replicas_get_as_many_cores_as_they_need_or_none_gets_its_own(cores: set[int], needs: list[int]) -> None:
    own, others = divided(cores, needs)
    of_those_in_need = [each for each, need in zip(own, needs, strict=True) if need]
    if others == cores:
        assert all(each == cores for each in own)
        assert not of_those_in_need or sum(needs) > (1 - LEFT_SHARE) * len(cores)
    else:
        assert [len(each) for each in of_those_in_need] == [need for need in needs if need]
        assert sorted(core for each in (*of_those_in_need, others) for core in each) == sorted(cores)
        assert len(others) >= LEFT_SHARE * len(cores)


def test_replicas_that_share_compute_beside_everything_else() -> None:
    own, others = divided(range(8), [0, 2, 0])
    assert own == [others, frozenset({6, 7}), others]


@contextmanager
def a_node() -> Iterator[tuple[int, int]]:
    """A process and its child."""
    with subprocess.Popen([sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        assert node.stdout
        yield node.pid, int(node.stdout.readline())
        node.communicate()


@contextmanager
def a_computing_thread() -> Iterator[int]:
    """The number of a thread of this process that computes."""
    started, over, numbers = Event(), Event(), list[int]()

    def compute() -> None:
        with as_computing():
            numbers.append(get_native_id())
            started.set()
            over.wait()

    thread = Thread(target=compute)
    thread.start()
    started.wait()
    yield numbers[0]
    over.set()
    thread.join()


@several
def test_only_the_threads_that_compute_use_a_replicas_cores(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    with a_node() as node, a_computing_thread() as thread:
        own = OwnCores(tmp_path, 1, cores, node[0])
        own.pin_threads()
        assert os.sched_getaffinity(thread) == {max(cores)}
        assert [os.sched_getaffinity(process) for process in node] == [cores - {max(cores)}] * 2
        own.close()
        assert [os.sched_getaffinity(process) for process in node] == [cores] * 2


@several
def test_a_replica_shares_again_as_soon_as_another_one_needs_too_many_cores(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    with a_node() as node, a_computing_thread() as thread:
        first = OwnCores(tmp_path, 1, cores, node[0])
        first.pin_threads()
        second = OwnCores(tmp_path, len(cores), cores, node[0])
        first.pin_threads()
        assert os.sched_getaffinity(thread) == os.sched_getaffinity(node[0]) == cores
        second.close()
        first.pin_threads()
        assert os.sched_getaffinity(thread) == {max(cores)}
        first.close()


def test_what_a_killed_replica_left_is_forgotten(tmp_path: Path) -> None:
    script = f"""
import os
from pathlib import Path
from isobatch.deployments.own_cores import OwnCores
kept = OwnCores(Path({str(tmp_path)!r}), 1, [0, 1], 0)
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    left = list(tmp_path.iterdir())
    own = OwnCores(tmp_path, 0, os.sched_getaffinity(0), os.getpid())
    own.pin_threads()
    assert [path.exists() for path in left] == [False]
    own.close()


@pytest.mark.parametrize("is_folder", [True, False])
def test_another_user_of_the_machine_keeps_no_replica_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool
) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    blocking = tmp_path / f"isobatch-cores-{other}"
    blocking.mkdir() if is_folder else blocking.touch()
    assert own_cores(1, len(os.sched_getaffinity(parent_of(os.getppid())))) is None


def test_a_thread_that_computes_does_not_wait_for_the_interpreter_as_long_as_python_lets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    intervals_s = list[float]()
    monkeypatch.setattr(sys, "setswitchinterval", intervals_s.append)
    with as_computing():
        assert 0 < intervals_s[0] < 0.001


@pytest.mark.parametrize("name", [b"worker", 4 * b"\xe6\x97\xa5" + b"ab\xe6"])
def test_a_thread_has_its_name_back_when_it_no_longer_computes(name: bytes) -> None:
    """Linux keeps 15 bytes of a name, so the last letter may be incomplete."""
    comm = Path("/proc/thread-self/comm")
    before = comm.read_bytes()
    comm.write_bytes(name)
    try:
        with as_computing():
            assert comm.read_text().strip() == "isobatch-launch"
        assert comm.read_bytes().strip() == name
    finally:
        comm.write_bytes(before)


@several
@pytest.mark.parametrize(
    ("limit", "most"), [("100000 100000\n", 1), ("50000 100000\n", 1), ("150000 100000\n", 1), ("max 100000\n", 1024)]
)
def test_a_container_has_as_many_cores_as_its_limit_says(tmp_path: Path, limit: str, most: int) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(limit)
    assert usable_cores(path) == min(most, len(os.sched_getaffinity(0)))


@several
def test_only_cores_that_this_process_may_use_count(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert usable_cores(tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, cores)
