"""What is checked before a Ray is started, what is shown while it starts, and what is left after: nothing."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from inspect import getsource
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments.shared.machine import free_port
from isobatch.cluster import cli
from isobatch.cluster.commands.serve import _end_at_once, progress_printer
from isobatch.cluster.serving import applications, local, ports
from isobatch.cluster.serving.haproxy import short_temporary
from isobatch.cluster.serving.local import (
    LocalRay,
    attached,
    check_place,
    kept,
    prepare_environment,
    running_cluster,
    while_serving,
)
from isobatch.cluster.serving.ports import check_port, claimed, held_ports, is_claimed, is_free
from isobatch.deployments.processes import descendants, is_running
from isobatch.profiles.errors import UserError
from tests.helpers.asking import eventually
from tests.helpers.commands import ran
from tests.helpers.serving import marked

ROOT = Path(__file__).parents[3]
NEW = ["Starting Ray", "Starting isobatch 0/1", "Starting isobatch 1/1"]
STEPS = [*NEW[:2], *NEW[1:]]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No note of a Ray that others run on this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def test_a_serve_that_is_stopped_during_a_deployment_is_told_in_a_sentence() -> None:
    from ray.exceptions import ActorDiedError

    with pytest.raises(UserError, match="Serve ended on the cluster at auto: if nobody"), while_serving("auto"):
        raise ActorDiedError


UNTIL_RAY_ENDS = """
import sys, time
from isobatch.cluster.serving import local
local.REACHED_WITHIN_S = 0.5
local.end_with_ray(sys.argv[1], "auto")
print("begun", flush=True)
time.sleep(600)
"""


def test_a_command_that_waits_for_a_ray_that_has_ended_ends_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        command = [sys.executable, "-c", UNTIL_RAY_ENDS, f"127.0.0.1:{gcs.getsockname()[1]}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "begun\n"
        gcs.accept()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error == "error: Ray ended on the cluster at auto: if nobody stopped it, try again\n"


def test_a_ray_that_is_not_there_is_told_at_once() -> None:
    place = f"127.0.0.77:{free_port('127.0.0.77')}"
    with pytest.raises(UserError, match=f"no Ray can be reached at {place} .nobody listens there."), attached(place):
        pass


def test_further_nodes_have_virtual_devices_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would find this machine's GPUs once more on each."""
    commands = list[list[str]]()
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379"))
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    monkeypatch.setattr(local, "nodes", lambda: [{"CPU": 2.0}, {"t4": 2.0}])
    local.join([local.LocalNode(devices={"t4": 2})], tmp_path, 1.0)
    (words,) = commands
    assert json.loads(words[words.index("--resources") + 1]) == {"t4": 2}
    assert words[words.index("--num-gpus") + 1] == "0"


def test_a_taken_port_is_named() -> None:
    host = "127.0.0.77"  # where no other test listens, and from which none connects
    with socket.create_server((host, free_port(host))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of 127\.0\.0\.77 cannot be used.*--port"):
            check_place(host, port)
    assert eventually(lambda: is_free(host, port))  # a process that is just being started still holds it
    check_place(host, port)
    for host in ("192.0.2.77", "nowhere.invalid"):
        with pytest.raises(UserError, match=f"port 8000 of {host} cannot be used .*: name an address of this machine"):
            check_place(host, 8000)
    with pytest.raises(UserError, match=r"host ::1: .* which is never ::1: listen on 127\.0\.0\.1"):
        check_place("::1", port)


def test_a_full_folder_of_ray_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # Ray writes there even if Python chooses another folder
    check_place("127.0.0.1", free_port())
    monkeypatch.setattr(local, "LEAST_FREE_BYTES", 1 << 62)
    with pytest.raises(UserError, match=f"{tmp_path}, where Ray writes, is full: .* RAY_TMPDIR=DIR"):
        check_place("127.0.0.1", free_port())


def test_two_servers_that_start_at_once_do_not_share_a_port() -> None:
    """HAProxy would let them: it listens seconds later, on a port that others may use, too."""
    http, grpc, other = (("127.0.0.79", 8000 + number) for number in range(3))
    with claimed([http, grpc]):
        assert [is_claimed(*address) for address in (http, grpc, other)] == [True, True, False]
        with pytest.raises(UserError, match=r"another .*serve. .* port 8001 of 127\.0\.0\.79"), claimed([other, grpc]):
            pass
        with claimed([other]):
            pass
    assert [is_claimed(*address) for address in (http, grpc, other)] == [False] * 3
    with claimed([("localhost", 8003)]):
        assert is_claimed("127.0.0.1", 8003)


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_a_server_on_all_addresses_shares_its_port_with_none_that_starts_at_once(everywhere: str) -> None:
    for first, second in ((everywhere, "127.0.0.79"), ("127.0.0.79", everywhere)):
        with claimed([(first, 8004)]):
            with (
                pytest.raises(UserError, match=f"another .*serve. .* port 8004 of {second}"),
                claimed([(second, 8004)]),
            ):
                pass
            assert not is_claimed(second, 8005)
        assert not is_claimed(second, 8004)


def test_only_the_process_that_is_given_a_held_port_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    host = "127.0.0.78"
    with held_ports(1, host) as (port,):
        monkeypatch.setattr(ports, "OTHER_PORTS", range(port, port + 2))
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # HAProxy's way, and that of Serve's own proxy
            with socket.socket() as server, socket.socket() as client:
                server.setsockopt(socket.SOL_SOCKET, option, 1)
                server.bind((host, port))
                server.listen()
                client.connect((host, port))
                client.close()  # before its server, whose side would keep the port for a minute
                server.accept()[0].close()
                assert free_port(host) == port + 1
        assert free_port(host) == port + 1
    monkeypatch.setattr(ports, "OTHER_PORTS", [port])
    with held_ports(1, host) as again:
        assert again == [port]


def test_the_folder_of_sockets_is_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    for short in ("/tmp", "/tmp/of/me/alone"):
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert short_temporary() == "/tmp"
        assert "RAY_TMPDIR" not in os.environ
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert short_temporary() == "/tmp"
    assert os.environ["RAY_TMPDIR"] == "/tmp"
    for odd in ("/tmp/a b", "/tmp/\u30c6\u30b9\u30c8"):  # which HAProxy cannot read, and 14 bytes long
        monkeypatch.setattr(tempfile, "tempdir", odd)
        assert short_temporary() == "/tmp"
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(UserError, match=r"RAY_TMPDIR is '.*x'.*at most 35"):
        short_temporary()


def test_systemd_deletes_nothing_old_in_the_folder_of_a_server(tmp_path: Path) -> None:
    """It tries to lock each folder whose old files it would delete, and leaves those that others have locked."""
    systemd = os.open(tmp_path, os.O_RDONLY)
    try:
        with kept(tmp_path), kept(tmp_path / "missing"), pytest.raises(BlockingIOError):
            fcntl.flock(systemd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(systemd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(systemd)


def test_a_server_whose_folder_is_gone_stops_in_order_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[str]()
    for name, instead in {
        "adopt_orphans": lambda: None,
        "bound_to_us": lambda folder: {},
        "prepare_environment": lambda *_: None,
        "short_temporary": lambda: str(tmp_path),
        "nodes": list,
        "leave_nothing": lambda: None,
    }.items():
        monkeypatch.setattr(local, name, instead)
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="here"))
    monkeypatch.setattr("ray.is_initialized", lambda: looks.append("the stop begins"))
    monkeypatch.setattr("ray.serve.start", lambda **_: None)
    with local.local_ray({}) as started:
        started.settle()
        started.folder.rmdir()
        looks.clear()
    assert looks == ["the stop begins"]


def test_others_cannot_read_the_token_that_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy() | {"HOME": str(tmp_path)})
    (tmp_path / ".ray").mkdir(mode=0o755)
    prepare_environment(str(tmp_path), (1, 2, 3))
    assert (tmp_path / ".ray").stat().st_mode & 0o777 == 0o700


def test_a_note_of_a_cluster_counts_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert running_cluster() is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", free_port())) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert running_cluster() == address
    assert running_cluster() is None
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(UserError, match=r"already running at head:6379.*: unset RAY_ADDRESS, which names it, or"):
        check_place("127.0.0.1", 8000)


def test_serve_refuses_in_one_line_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those who run the tests have handlers of their own

    def refusal(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["isobatch", "serve", str(tmp_path), "--grpc-port", "0", *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        error = capsys.readouterr().err
        assert (ended.value.code, error.count("\n")) == (2, 1), error
        return error

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 cannot be used" in refusal("--port", str(port))
    twice = str(free_port())
    assert f"--metrics-port {twice} is that of HTTP or gRPC" in refusal("--port", twice, "--metrics-port", twice)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "already running at 10.0.0.1:6379" in refusal()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    assert "OTEL_TRACES_EXPORTER is 'zipkin': there are: none, otlp, console" in refusal()


def test_a_file_with_applications_of_other_programs_alone_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as a test without Ray can see: up to the last check before its start."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those who run the tests have handlers of their own
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    file = tmp_path / "serve.yaml"
    file.write_text("applications: [{name: other, import_path: 'shop:app'}]")
    with pytest.raises(UserError, match="already running at"):
        ran("serve", str(file))


def test_an_orphan_is_adopted_and_ended_and_zombies_of_orphans_are_removed(tmp_path: Path) -> None:
    (tmp_path / "haproxy").symlink_to(shutil.which("sleep") or "")
    script = f"""
import os, subprocess, time
from pathlib import Path
from isobatch.deployments.processes import adopt_orphans, descendants, end_descendants, is_running, reap
adopt_orphans()
# A shell that starts a sleeper which ignores SIGTERM, tells its number, and goes away.
told = subprocess.check_output(["sh", "-c", "trap '' TERM; sleep 60 >/dev/null & echo $!"], text=True)
assert descendants(os.getpid()) == [int(told)], descendants(os.getpid())
end_descendants(patience_s=0.1)
assert descendants(os.getpid()) == []
own = subprocess.Popen(["sleep", "0"])
orphan = int(subprocess.check_output(["sh", "-c", "{tmp_path}/haproxy 0.2 >/dev/null & echo $!"], text=True))
while is_running(orphan) or is_running(own.pid):
    time.sleep(0.01)
assert Path(f"/proc/{{orphan}}").exists()
reap("haproxy")
assert not Path(f"/proc/{{orphan}}").exists()
assert own.wait() == 0
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)


def test_a_process_whose_name_is_cut_within_a_letter_is_known_too() -> None:
    """Linux keeps 15 bytes of a name, here of 17."""
    script = "open('/proc/self/comm', 'wb').write(b'ab' + 5 * b'\\xe6\\x97\\xa5'); print('named', flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True) as named:
        assert named.stdout.readline() == "named\n"
        assert named.pid in descendants(os.getpid())
        assert is_running(named.pid)
        named.communicate("\n")


def test_a_ray_whose_main_process_has_ended_does_not_run_though_its_gcs_does(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gcs, subprocess.Popen(["sleep", "60"]) as raylet:
        ray = LocalRay(f"127.0.0.1:{gcs.getsockname()[1]}", tmp_path, Future(), raylet.pid)
        assert ray.alive()
        raylet.kill()
        assert eventually(lambda: not ray.alive()), "a zombie does not run"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ports_are_looked_for_at_addresses_of_ipv6_too() -> None:
    with socket.create_server(("::1", free_port("::1")), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of ::1 cannot be used .Address already in use"):
            check_port("::1", port, "--grpc-port")
    assert eventually(lambda: is_free("::1", port))  # a process that is just being started still holds it


@pytest.mark.parametrize(("terminal", "one_line", "new_lines"), [(True, STEPS, []), (False, [], NEW)])
def test_a_terminal_has_one_line_and_a_log_all_new(terminal: bool, one_line: list[str], new_lines: list[str]) -> None:
    shown, log = list[str](), list[str]()
    show_progress = progress_printer(Console(file=StringIO(), force_terminal=terminal), shown.append, log.append)
    for step in STEPS:
        show_progress(step)
    assert (shown, log) == (one_line, new_lines)


def test_a_server_that_ends_at_once_shows_the_cursor_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The line that changes while it starts or stops hides it."""
    codes = list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr("isobatch.cluster.serving.local.leave_nothing", lambda patience_s: None)
    for terminal, shown in ((True, "\x1b[?25h\n"), (False, "")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        _end_at_once(signal.SIGINT, None)
        assert capfd.readouterr().out == shown
    assert codes == [130, 130]


def test_a_start_that_takes_too_long_says_what_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applications, "_applications", dict)
    with pytest.raises(UserError, match=r"not ready after 0 s \(isobatch: NOT_STARTED\).* more time \(--patience-s\)"):
        applications._wait_until_running(["isobatch"], [], 0.0, lambda what: None)


def test_a_cluster_that_refuses_this_token_is_told_after_few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.node import Node

    attempts, name = [], "RAY_gcs_server_port_wait_time_s"

    def refused(**_: object) -> None:
        attempts.append(os.environ[name])
        raise ConnectionError("InvalidAuthToken")

    # As after  eval "$(isobatch environment)": a node waits two minutes for its head.
    monkeypatch.setattr(os, "environ", os.environ.copy() | {name: "120"})
    monkeypatch.setattr("ray.init", refused)
    with (
        pytest.raises(UserError, match=r"at auto \(InvalidAuthToken\): .* with its token in ~/\.ray"),
        attached("auto"),
    ):
        pass
    assert attempts == ["5"]
    assert "num_retries = max(1, int(gcs_wait_override))" in (source := getsource(Node)), "what Ray reads it for"
    assert f'os.environ.get("{name}")' in source


STARTS_ONE_THAT_LEAVES = """
import os, subprocess, sys, time
from pathlib import Path
from isobatch.deployments.processes import adopt_orphans, bound_to_us, end_descendants
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
            assert process.stdout.readline() == "started\n"
            assert marked(mark)
            process.kill()
        assert eventually(lambda: not marked(f"{mark}\0"))
        assert eventually(lambda: not folder.exists())
        assert stranger.poll() is None
        assert beside.exists()
        stranger.kill()
