import os
import subprocess
import sys
from codecs import BOM_UTF8
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.planner.networks import distilbert
from isobatch.profiles.curves import curve_table
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, load, save, write_whole
from isobatch.profiles.latency import LatencyTable

V100 = datasheet_table(distilbert(), "v100")
PROFILE = Profile("distilbert", (V100,), ExitProfile.from_counts([50, 30, 20, 0, 0, 0]), ("a note",))


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    save(PROFILE, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_a_file_that_an_editor_began_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(PROFILE, path)
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    assert load(path) == PROFILE


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"schema_version": 1', '"schema_version": 7', "schema_version is 7, this isobatch reads 1"),
        ('"schema_version": 1', '"schema_version": true', "schema_version is True, this isobatch reads 1"),
        ('"schema_version": 1,', "", "schema_version is None"),
        ('"kind": "v100",', "", "tables.0.kind: this field is missing"),
        ('"length"', '"lenght"', "tables.0.lenght: there is no such field"),
        ("[1, 2, 4,", "[1, 2, 2,", "tables.0: batch_sizes must ascend, but 2 follows 2"),
        ("[1.0, 0.5,", "[true, 0.5,", "exits.survival.0 = true: this must be a number"),
        ("[1.0, 0.5,", "[1.0, 1.5,", "exits: survival[1] = 1.5 must lie between"),
        ("{", "[", "is not JSON"),
    ],
)
def test_a_broken_file_says_where_and_why(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "profile.json"
    save(PROFILE, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        load(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_times_of_a_shared_device_can_only_be_measured() -> None:
    with pytest.raises(UserError, match=r"measure one on a v100 with 'isobatch profile ... --together 2'$"):
        PROFILE.table("v100/2")


def test_no_file_and_no_object_are_one_line_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        load(tmp_path / "absent.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match="one JSON object, got list"):
        load(tmp_path / "list.json")
    (tmp_path / "weights").write_bytes(b"\x89\xff\x00weights")
    with pytest.raises(UserError, match=r"weights is not a text file \(UTF-8\)$"):
        load(tmp_path / "weights")


def test_parts_must_agree_on_the_number_of_blocks() -> None:
    with pytest.raises(ValueError, match="same number of blocks"):
        replace(PROFILE, exits=ExitProfile((1.0, 0.5)))


def test_the_shortest_table_that_is_long_enough_is_taken() -> None:
    short, long = (replace(V100, length=length, source="measured") for length in (32, 128))
    profile = Profile("m", (V100, long, short))
    assert profile.table("v100", length=20) is short
    assert profile.table("v100", length=33) is long
    assert profile.table("v100") is long  # measured beats the datasheet
    with pytest.raises(UserError, match="up to 128 tokens, not 256"):
        profile.table("v100", length=256)
    with pytest.raises(UserError, match="no table for device kind 'k80'"):
        profile.table("k80")


def test_measuring_again_replaces_and_another_device_adds() -> None:
    again, other = replace(V100, launch_s=0.5), replace(V100, kind="k80")
    joined = PROFILE.joined_by(Profile("distilbert", (again, other)))
    assert joined.tables == (again, other)
    assert joined.exits == PROFILE.exits
    with pytest.raises(UserError, match="cannot add a profile of bert"):
        PROFILE.joined_by(Profile("bert", (V100,)))


def test_a_network_trained_anew_is_another_one(tmp_path: Path) -> None:
    known = replace(PROFILE, weights="a1")
    save(known, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json").weights == "a1"
    assert known.joined_by(PROFILE).weights == PROFILE.joined_by(known).weights == "a1"
    with pytest.raises(UserError, match="another distilbert, whose weights were a1 and are b2 now"):
        known.joined_by(replace(PROFILE, weights="b2"))


def test_a_datasheet_never_replaces_what_was_measured() -> None:
    here = Profile("m", (replace(V100, source="measured"),))
    assert here.joined_by(Profile("m", (V100, replace(V100, kind="k80")))).kinds == ("v100", "k80")
    assert here.joined_by(Profile("m", (V100,))) == here
    assert Profile("m", (V100,)).joined_by(here) == here


def derived(backend: str, dtype: str, kind: str = "v100") -> LatencyTable:
    return curve_table(distilbert(), kind, backend=backend, dtype=dtype)


def test_a_backend_and_precision_choose_among_derived_tables(tmp_path: Path) -> None:
    tables = [derived(backend, dtype) for backend in ("onnx", "torch") for dtype in ("float16", "float32")]
    profile = Profile("distilbert", (*tables, replace(V100, kind="cpu", source="measured")))
    save(profile, tmp_path / "profile.json")
    profile = load(tmp_path / "profile.json")
    assert profile.on("onnx", "float16").table("v100") == derived("onnx", "float16")
    assert profile.table("v100") == derived("onnx", "float16")  # the first, which is the network's own
    assert profile.on("onnx", "").table("cpu").source == "measured"  # nobody noted of what
    assert profile.on("tensorrt", "float16").kinds == ("v100", "cpu")  # better those that there are than none
    with pytest.raises(UserError, match="on v100 has no times of tensorrt, only of onnx float16, onnx float32, torch"):
        profile.check_has("v100", "tensorrt", "")
    measured = Profile("distilbert", (replace(V100, source="measured", backend="torch", dtype="float32"),))
    with pytest.raises(UserError, match=r"torch float32: measure some there with 'isobatch profile .* --backend onnx"):
        measured.check_has("v100", "onnx", "float16")


def test_derived_tables_of_several_backends_stand_side_by_side_until_one_is_measured() -> None:
    both = Profile("m", (derived("onnx", "float16"),)).joined_by(Profile("m", (derived("torch", "float16"),)))
    assert [table.backend for table in both.tables] == ["onnx", "torch"]
    measured = replace(derived("torch", "float32"), source="measured")
    assert both.joined_by(Profile("m", (measured,))).tables == (measured,)
    assert Profile("m", (measured,)).joined_by(both).tables == (measured,)


def test_notes_do_not_outlive_what_they_speak_of() -> None:
    first = Profile("m", (V100,), notes=("v100, 32 tokens: noisy", "v100, 128 tokens: fine"))
    joined = first.joined_by(Profile("m", (V100,), notes=("v100, 32 tokens: steady",)))
    assert set(joined.notes) == {"v100, 32 tokens: steady", "v100, 128 tokens: fine"}


def test_exits_go_with_the_ramps_that_they_were_counted_with() -> None:
    notes = ("exits: counted over 5 inputs", "v100: fine")
    first = Profile("m", (V100,), ExitProfile((1.0,) * V100.num_blocks), notes, ramps="a1")
    for ramps in ("", "a1"):
        joined = first.joined_by(Profile("m", (V100,), ramps=ramps))
        assert (joined.exits, joined.notes, joined.ramps) == (first.exits, notes, "a1")
    assert first.joined_by(replace(first, notes=("link: fast",))).notes == (*notes, "link: fast"), "nothing was counted"
    joined = first.joined_by(Profile("m", (V100,), ramps="b2"))
    assert (joined.exits, joined.notes, joined.ramps) == (None, notes[1:], "b2")


def test_what_sharing_costs_goes_with_the_measurement_of_the_device() -> None:
    def measured(kind: str, length: int) -> LatencyTable:
        return replace(V100, kind=kind, length=length, source="measured")

    kinds = ("v100", "v100/2")
    tables = tuple(measured(kind, length) for kind in kinds for length in (32, 128))
    first = Profile("m", tables, notes=("v100: fine", "v100/2, 32 tokens: 1.2", "exits: none"))
    alone = first.joined_by(Profile("m", (measured("v100", 32),)))
    assert alone.kinds == ("v100",)
    assert {table.length for table in alone.tables} == {32, 128}
    assert alone.notes == ("v100: fine", "exits: none")
    both = first.joined_by(Profile("m", tuple(measured(kind, 32) for kind in kinds)))
    assert sorted((table.kind, table.length) for table in both.tables) == sorted(
        (kind, length) for kind in kinds for length in (32, 128)
    )
    assert both.notes == first.notes


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    link.symlink_to(file)
    write_whole(link, "a text")
    assert link.is_symlink()
    assert file.read_text() == "a text\n"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    write_whole(pipe, "a text\n")  # it gets no second line break
    assert pipe.is_fifo()
    assert os.read(reader, 99) == b"a text\n"
    os.close(reader)


def test_processes_that_write_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path, script = tmp_path / "plan.json", "for _ in range(300): write_whole(Path(sys.argv[1]), sys.argv[2] * 9999)"
    imports = "import sys; from pathlib import Path; from isobatch.profiles.files import write_whole\n"
    writers = [subprocess.Popen([sys.executable, "-c", imports + script, path, letter]) for letter in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert path.read_text() in {letter * 9999 + "\n" for letter in "abc"}
    assert list(tmp_path.iterdir()) == [path]
