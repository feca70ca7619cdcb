"""The command lines that README.md and docs/ show, and small material to run them on."""

import os
import re
import shlex
from pathlib import Path

import numpy as np

from tests.helpers.tiny_tokenizers import WORDS, save_tokenizer

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"  # where the README's server runs

# These options are appended to a line, so that it measures or searches for a moment instead of a minute.
SMALL = {
    "prepare": "--max-rows 60",
    "deploy": "",
    "dashboards": "",
    "doctor": "",
    "environment": f"--folder /tmp/isobatch-{os.getuid()}",  # sockets need a short path
    "evaluate": "--device cpu --max-rows 20",
    "cascade": "--device cpu --max-rows 60 --timing-s 0.1 --largest 4 --slo-ms 10000 --devices cpu=1",
    "profile": "--device cpu --tokens 6 --largest 4 --timing-s 0.1",
    "plan": "--no-simulation",
    "predict": "--device cpu",
    "explain": "--max-batch 4 --picture steps.png",
    "tune": "--gap 0.1 --no-simulation",
    "simulate": "--hours 0.0002",
    "serve": "",
    "kubernetes": "",
    "load": "--seconds 0.2",
    "status": "",
    "up": "",
    "bench": "--device cpu --backend torch --slo-ms 250 --seconds 0.1 --timing-s 0.1 --largest 4 --max-rows 50",
}


SERVED = ("load", "status")  # commands that need a server


def lines(page: Path) -> list[list[str]]:
    """The words of every line `isobatch ...` in the code blocks of a page, without `isobatch` and the comment."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    shown = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in shown if line.startswith("isobatch ")]


def readme_lines(address: str) -> list[list[str]]:
    """The README's lines, shortened, and against a server at this address."""
    return _small(ROOT / "README.md", address)


def tutorial_lines(address: str) -> list[list[str]]:
    return _small(ROOT / "docs" / "tutorials.md", address)


def _small(page: Path, address: str) -> list[list[str]]:
    small = [[*line, *SMALL[line[0]].split()] for line in lines(page)]
    return [[word.replace(ADDRESS, address) for word in line] for line in small]


def material(folder: Path) -> Path:
    """Write the files that the README's lines read, except those that earlier lines write."""
    from tests.helpers.tiny_networks import hugging_face

    for name, family in (("my-bert", "bert"), ("my-small", "electra")):
        hugging_face(family).save_pretrained(folder / name)
        save_tokenizer(folder / name)
    for seed, name in enumerate(("reviews.csv", "others.csv")):
        random = np.random.default_rng(seed)
        texts = [" ".join(random.choice(WORDS, random.integers(1, 12))) for _ in range(120)]
        rows = [f"{text},{random.integers(3)}" for text in texts]
        (folder / name).write_text("\n".join(["text,label", *rows]) + "\n")
    (folder / "bodies.jsonl").write_text('{"inputs": "a good film"}\n{"inputs": ["a dull film", "a bad film"]}\n')
    entries = [
        f"  - {{name: {name}, profile: profile.json, model: my-bert-ee, slo_ms: 1000}}"
        for name in ("reviews", "queries")
    ]
    (folder / "fleet.yaml").write_text("\n".join(["devices: {cpu: 2}", "applications:", *entries]) + "\n")
    return folder
