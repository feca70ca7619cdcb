"""What `isobatch doctor` finds wrong, each by breaking it."""

import os
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import onnxruntime
import pytest
from typer.testing import CliRunner

from experiments.shared.ports import free_port
from isobatch.cluster.cli import app
from isobatch.cluster.commands import doctor
from tests.helpers.asking import eventually


def found(what: str) -> doctor.Finding:
    return next(each for each in doctor.findings() if each.what == what)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it takes longer than all the rest."""
    monkeypatch.setattr(doctor, "LOOKS", {name: look for name, look in doctor.LOOKS.items() if name != "ray"})


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()  # none that systems give to whoever asks
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(doctor, "PORTS", {port: "--port"})
        assert found("ports").wrong == f"{port} is taken (--port names another)"
    assert eventually(lambda: not found("ports").wrong)  # a process that is just being started still holds it


def test_two_packages_of_onnx_runtime_overwrite_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"onnxruntime-gpu": "1.27"}

    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(doctor, "version", version)
    assert (found("onnx runtime").result, found("onnx runtime").wrong) == ("onnxruntime-gpu 1.27", "")
    there["onnxruntime"] = "1.28"
    assert "onnxruntime 1.28 and onnxruntime-gpu 1.27 overwrite each other" in found("onnx runtime").wrong
    there.clear()
    assert "isobatch[cpu]" in found("onnx runtime").result


def test_a_cache_that_cannot_be_written_and_memory_that_is_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "LEAST_FREE_BYTES", 1)
    assert found("cache").wrong == ""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be written: Not a directory" in found("cache").wrong
    monkeypatch.setattr(doctor, "SHARED", tmp_path)
    monkeypatch.setattr(doctor, "LEAST_SHARED_BYTES", 1 << 60)
    assert "are wanted" in found("shared memory").wrong


def test_the_command_says_a_line_each_and_its_exit_code_says_whether_all_is_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    well, wrong = ("fine", ""), ("", "broken: mend it")
    monkeypatch.setattr(doctor, "LOOKS", {"one": lambda: well})
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.output.split()) == (0, ["ok", "one:", "fine"])
    monkeypatch.setattr(doctor, "LOOKS", {"one": lambda: well, "two": lambda: wrong})
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert result.output.splitlines()[1] == "fail two: broken: mend it"


def test_gpus_are_read_from_the_driver_and_a_driver_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def driver(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    driver("echo 'NVIDIA L4, 570.86.15, 8.9'")
    assert doctor.gpus_by_driver() == [doctor.Gpu("NVIDIA L4", "570.86.15", "8.9")]
    assert "NVIDIA L4 is here, but this torch is a CPU build" in found("devices").wrong
    assert found("onnx runtime").wrong == "its CUDA libraries do not load: backend onnx has no GPU"
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "this is a CPU build, but there is a GPU" in found("onnx runtime").wrong
    driver("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert found("devices").wrong == "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"
