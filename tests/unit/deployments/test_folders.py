"""The hashes of a checkpoint's files."""

from hashlib import sha256
from pathlib import Path

import pytest

from isobatch.deployments.folders import content_of


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


PLAIN = {"model.safetensors": "weights", "config.json": "{}", "exits.json": "rules", "tokenizer.json": "words"}
CASCADE = {
    "cascade.json": "levels",
    "exits.json": "rules",
    "level-0/model.safetensors": "small",
    "level-0/config.json": "{}",
    "level-1/model.safetensors": "large",
}


def test_the_content_of_a_checkpoint_is_all_that_its_answers_depend_on(tmp_path: Path) -> None:
    assert content_of(written(tmp_path, PLAIN)) == sha256(b"{}rulesweights").hexdigest()[:16]
    assert content_of(tmp_path / "nowhere") == ""


@pytest.mark.parametrize("name", CASCADE)
def test_the_content_of_a_cascade_is_that_of_all_its_levels(tmp_path: Path, name: str) -> None:
    one, other = written(tmp_path / "one", CASCADE), written(tmp_path / "other", CASCADE | {name: "otherwise"})
    assert content_of(one) != content_of(other)
    assert content_of(one) == content_of(written(tmp_path / "same", CASCADE))
