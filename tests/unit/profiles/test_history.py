from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.profiles.errors import UserError
from isobatch.profiles.journal import Journal
from isobatch.profiles.windows import History, Window


def window_of(index: int) -> Window:
    return Window(120.0 * index, 120.0, index, (index, 1))


def filled(path: Path, count: int, keep: int = 100) -> History:
    history = History(path, keep)
    for index in range(count):
        history.append(window_of(index))
    return history


def test_what_was_appended_is_there_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path / "h", 5)
    assert History(tmp_path / "h").windows == tuple(window_of(index) for index in range(5))


@given(cut=st.integers(1, 60))
def test_a_crash_during_a_write_loses_that_window_only(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("history") / "h"
    filled(path, 3)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -min(cut, last)])
    after = History(path)
    # Cutting only the newline leaves a whole window.
    assert after.windows[:2] == (window_of(0), window_of(1))
    assert len(after.windows) + after.damaged in (2, 3)
    after.append(window_of(7))
    assert History(path).windows == (*after.windows[:-1], window_of(7))


def test_noise_in_the_middle_is_skipped_and_counted(tmp_path: Path) -> None:
    filled(tmp_path / "h", 3)
    lines = (tmp_path / "h").read_bytes().splitlines(keepends=True)
    (tmp_path / "h").write_bytes(lines[0] + b'\x00\xff{"start_s": 1}\n[1]\n' + lines[2])
    history = History(tmp_path / "h")
    assert history.windows == (window_of(0), window_of(2))
    assert history.damaged == 2


def test_a_file_of_another_version_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "h").write_text('{"v": 7, "from": 0}\n')
    with pytest.raises(UserError, match=r"h is of schema version 7, this isobatch reads 1"):
        History(tmp_path / "h")


def test_the_file_is_bounded_and_keeps_the_latest(tmp_path: Path) -> None:
    history = filled(tmp_path / "h", 95, keep=10)
    assert history.windows == tuple(window_of(index) for index in range(85, 95))
    assert len((tmp_path / "h").read_bytes().splitlines()) < 20
    assert History(tmp_path / "h", keep=10).windows == history.windows
    assert [path.name for path in tmp_path.iterdir()] == ["h"]


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    journal = Journal(folder / "exits.jsonl", Window.read, keep=2)
    folder.rmdir()
    windows = [Window(float(number), 120.0, 10, (6, 4)) for number in range(5)]
    for window in windows:
        journal.append(window)
    assert journal.entries == tuple(windows[-2:])
    assert len(caplog.records) == 1
    folder.mkdir()
    journal.append(windows[0])
    assert Journal(folder / "exits.jsonl", Window.read, keep=2).entries[-1] == windows[0]
