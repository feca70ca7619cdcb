"""Profiles of decoders: what a launch costs, and files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from isobatch.profiles.errors import UserError
from isobatch.profiles.text_profile import DecodingTable, LaunchSize, load_text_profile, save_text_profile
from tests.helpers.paper_application import paper_decoder


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_text_profile(paper_decoder(), tmp_path / "profile.json")
    assert load_text_profile(tmp_path / "profile.json") == paper_decoder()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[1]", "must hold one JSON object"),
        ("{}", "is not a profile of a decoder"),
        ('{"schema_version": 1, "profile_of": "decoder", "model": "m"}', "num_blocks"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        load_text_profile(tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("num_blocks",), 0, "num_blocks = 0 must be above 0"),
        (("reads",), 0, "reads = 0 must be above 0"),
        (("tables",), [], "a profile needs at least one table"),
        (("tables", 0, "kv_bytes"), 0, "kv_bytes = 0 must be above 0"),
        (("tables", 0, "threads"), 0, "threads = 0 must be above 0"),
        (("tables", 0, "front_s"), -1.0, r"front_s = -1.0 must be finite, 0 or more"),
        (("tables", 0, "price_s", "rows"), float("nan"), "Input should be a finite number"),
        (("tables", 0, "price_s"), {}, "must take time"),
        (("workload", "survival"), [[1, 1.5]], "from 0 to 1"),
        (("workload", "survival"), [[7, 0.5]], "no ramp can stand after block 7 of 8 blocks"),
    ],
)
def test_a_value_that_makes_no_sense_is_one_sentence(
    place: tuple[str | int, ...], value: object, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    save_text_profile(paper_decoder(), path)
    content = json.loads(path.read_text())
    at = content
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=sentence):
        load_text_profile(path)


def test_an_estimate_replaces_no_measurement() -> None:
    measured = paper_decoder()
    guess = replace(measured, tables=(replace(measured.tables[0], error=None, source="guessed"),))
    assert measured.joined_by(guess).tables == measured.tables
    assert guess.joined_by(measured).tables == measured.tables
    with pytest.raises(UserError, match="cannot add a profile of paper"):
        replace(measured, model="other").joined_by(measured)
    with pytest.raises(UserError, match="another paper"):
        replace(measured, weights="a").joined_by(replace(measured, weights="b"))
    moved = replace(measured, model="other", weights="a")
    assert replace(measured, weights="a").joined_by(moved) == moved, "its directory has another name now"
    with pytest.raises(UserError, match="there are no times of it on h100, only on cpu"):
        measured.table("h100")


def test_what_overlaps_costs_what_is_longer() -> None:
    price = LaunchSize(launches=1.0, blocks=10.0, rows=2.0)
    table = DecodingTable("h100", price, "made up", 64, 10, overlaps=True)
    assert table.seconds(LaunchSize(launches=1, blocks=1, rows=3)) == 11.0
    assert table.seconds(LaunchSize(launches=1, blocks=1, rows=7)) == 15.0
    assert replace(table, overlaps=False).seconds(LaunchSize(launches=1, blocks=1, rows=3)) == 17.0
