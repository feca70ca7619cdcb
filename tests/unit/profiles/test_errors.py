"""A file that the user named and that cannot be used is one line, which says which file and why."""

from pathlib import Path

import pytest

from isobatch.profiles.errors import UserError, read_text


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_text(tmp_path / "absent.json")
    assert str(caught.value) == f"cannot read {tmp_path / 'absent.json'}: No such file or directory"


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x89\xff\x00weights")
    with pytest.raises(UserError) as caught:
        read_text(path)
    assert str(caught.value) == f"{path} is not a text file (UTF-8)"
