"""A tiny checkpoint with data, and the command `isobatch prepare`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobatch.cluster import cli
from isobatch.deployments.prepare import pipeline
from tests.helpers.tiny_networks import NUM_LABELS, hugging_face
from tests.helpers.tiny_tokenizers import WORDS, save_tokenizer

COUNT = 120

Run = Callable[..., int]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "isobatch" / "features"


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all the rest on so small a network."""
    monkeypatch.setattr(pipeline, "draw_exits", lambda _, path: path.touch())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "network"
    hugging_face("bert").save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder


def reviews(path: Path, labelled: bool = True) -> Path:
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(WORDS, random.integers(1, 12))) for _ in range(COUNT)]
    labels = random.integers(NUM_LABELS, size=COUNT)
    table = [f"{text},{label}" if labelled else text for text, label in zip(lines, labels, strict=True)]
    path.write_text("\n".join(["text,label" if labelled else "text", *table]) + "\n")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def asked(checkpoint: Path, tmp_path: Path, out: Path) -> tuple[object, ...]:
    """What the command must be told: a network, labelled rows, and where to write."""
    return checkpoint, "--data", reviews(tmp_path / "a.csv"), "--out", out


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command as a user types it: its exit code."""

    def typed(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["isobatch", "prepare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0)

    return typed


Refusal = Callable[..., str]


@pytest.fixture
def refusal(run: Run, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """What is said where the command cannot do what was asked, and ends with exit code 2."""

    def said(*arguments: object) -> str:
        capsys.readouterr()
        assert run(*arguments) == 2
        return capsys.readouterr().err.strip()

    return said


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """Without line breaks."""
    return " ".join(capsys.readouterr().out.split())


def rules_in(folder: Path) -> dict[str, Any]:
    rules: dict[str, Any] = json.loads((folder / "exits.json").read_text())
    return rules
