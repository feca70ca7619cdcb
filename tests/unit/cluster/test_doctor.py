"""What `isobatch doctor` finds wrong, each by breaking it."""

import os
import re
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import onnxruntime
import pytest
from packaging.version import Version
from typer.testing import CliRunner

from experiments.shared.machine import free_port
from isobatch.cluster.cli import app
from isobatch.cluster.commands import doctor
from isobatch.cluster.commands.doctor import gpu_obstacle
from isobatch.cluster.serving import capacity, serve_file
from isobatch.cluster.serving.capacity import Gpu, gpu_label, gpus_by_driver
from tests.helpers.asking import eventually

ROOT = Path(__file__).parents[3]


def found(what: str) -> doctor.Finding:
    return next(each for each in doctor.findings() if each.what == what)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it takes longer than all the rest."""
    monkeypatch.setattr(doctor, "LOOKS", {name: look for name, look in doctor.LOOKS.items() if name != "ray"})


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()  # none that systems give to whoever asks
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(serve_file, "PORT", port)
        assert found("ports").wrong.startswith(f"{port} is taken (--port names another)")
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


def test_an_unwritable_cache_and_short_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "LEAST_FREE_BYTES", 1)
    assert found("cache").wrong == ""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be written: Not a directory" in found("cache").wrong
    monkeypatch.setattr(doctor, "SHARED", tmp_path)
    monkeypatch.setattr(doctor, "LEAST_SHARED_BYTES", 1 << 60)
    assert "are wanted" in found("shared memory").wrong


@pytest.mark.parametrize(
    ("error", "wrong"),
    [(TypeError("Descriptors cannot be made"), "Descriptors cannot be made"), (KeyError(), "KeyError")],
)
def test_a_package_that_fails_in_its_own_way_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, error: Exception, wrong: str
) -> None:
    def fails() -> tuple[str, str]:
        raise error

    monkeypatch.setattr(doctor, "LOOKS", {"ray": fails})
    assert found("ray").wrong == wrong


def test_each_check_has_a_line_and_the_exit_code_sums_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    well, wrong = ("fine", ""), ("", "broken: mend it")
    monkeypatch.setattr(doctor, "LOOKS", {"one": lambda: well})
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.output.split()) == (0, ["ok", "one:", "fine"])
    monkeypatch.setattr(doctor, "LOOKS", {"one": lambda: well, "two": lambda: wrong})
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert result.output.splitlines()[1] == "fail two: broken: mend it"


def test_gpus_are_read_from_the_driver_if_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def driver(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    driver("echo 'NVIDIA L4, 570.86.15, 8.9'")
    assert gpus_by_driver() == [Gpu("NVIDIA L4", "570.86.15", "8.9")]
    assert gpu_label() == {"isobatch.io/kind": "l4"}
    assert "NVIDIA L4 is here, but this torch is a CPU build" in found("devices").wrong
    assert found("onnx runtime").wrong == "its CUDA libraries do not load: backend onnx has no GPU"
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "this is a CPU build, but there is a GPU" in found("onnx runtime").wrong
    driver("echo 'NVIDIA A100-SXM4-40GB, 580.95.05, 8.0'; echo 'NVIDIA A100-SXM4-40GB, 580.95.05, 8.0'")
    assert gpu_label() == {"isobatch.io/kind": "a100-40g"}
    driver("echo 'NVIDIA L4, 580.95.05, 8.9'; echo 'WARNING: infoROM is corrupted at gpu 0000:0A:00.0'")
    assert gpus_by_driver() == [Gpu("NVIDIA L4", "580.95.05", "8.9")]
    driver("echo 'NVIDIA L4, 580.95.05, 8.9'; echo 'Tesla T4, 580.95.05, 7.5'")
    assert gpu_label() is None
    driver("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert found("devices").wrong == "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"
    assert gpu_label() is None
    monkeypatch.setattr(capacity, "DRIVER_ANSWERS_WITHIN_S", 0.1)
    driver("exec sleep 60")
    assert found("devices").wrong == "nvidia-smi has not answered for 0.1 s: the driver hangs"
    assert gpu_label() is None


def test_the_images_of_clusters_have_the_driver_that_the_pinned_torch_needs() -> None:
    """The default build of torch 2.11 and newer is one for CUDA 13."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert Version("2.11") <= Version(pins["torch"]) < Version("3")
    drivers = [int(found) for found in re.findall(r"nvidia-(\d{3})\b", (ROOT / "cluster" / "gcp.yaml").read_text())]
    assert drivers
    for driver in drivers:
        assert not gpu_obstacle(Gpu("Tesla T4", f"{driver}.95.05", "7.5"), "13.0")
    assert gpu_obstacle(Gpu("Tesla T4", "570.86.15", "7.5"), "13.0")


def test_a_card_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "gpus_by_driver", list)
    monkeypatch.setattr(doctor, "CARDS", tmp_path)
    for name, vendor, of_class in (("a", "0x8086", "0x030000"), ("b", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{of_class}\n")
    assert found("devices").result.endswith("no GPU: networks run on the CPU")
    (tmp_path / "b" / "class").write_text("0x030200\n")
    assert found("devices").result.endswith("an NVIDIA card is here, but nvidia-smi is not: install its driver")
    assert not found("devices").wrong, "networks run on the CPU as well"


@pytest.mark.parametrize(("cuda", "column", "driver"), [("13.0", 2, 580), ("12.6", 3, 525)])
def test_the_page_says_of_each_card_what_is_checked(cuda: str, column: int, driver: int) -> None:
    lines = (ROOT / "docs" / "gpu.md").read_text().splitlines()
    heading, _, *cards = [line.strip("| ").split(" | ") for line in lines[: lines.index("## Names")] if line[:1] == "|"]
    assert heading[column].startswith(f"CUDA {cuda[:2]}: driver {driver} ")
    assert len(cards) == 7
    for names, capabilities, *works in cards:
        for capability in capabilities.split(", "):
            fits = not gpu_obstacle(Gpu(names, f"{driver}.10.01", capability), cuda)
            assert fits == (works[column - 2] != "no"), names
            assert gpu_obstacle(Gpu(names, f"{driver - 1}.10.01", capability), cuda), "the driver is older"
