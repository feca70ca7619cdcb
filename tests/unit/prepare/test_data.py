"""Files of inputs: rows and columns that are read, and errors if they cannot be."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from isobatch.deployments.models.encode import ImageEncoder
from isobatch.deployments.prepare.data import Columns, rows, taken
from isobatch.deployments.prepare.records import Layout
from isobatch.profiles.errors import UserError

PLAIN, IMAGE = Columns(), Columns(image="image")

GREY = 1  # the number of channels


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path, columns: Columns | None = None) -> list[tuple[object, object]]:
    requested = columns or Columns()
    channels = GREY if path.suffix == ".npz" or requested.image is not None else None
    return [(row.value, row.label) for row in rows(path, requested, channels=channels)]


BOTH = "text,label\n"
# JSON can write half a character, and a tokenizer would raise a TypeError that names no row.
WHOLE, WORDS = '{"text": "so \\ud83d\\ude00"}\n', '{"tokens": ["so \\ud83d\\ude00"]}\n'
WITHOUT_HEADER = Columns(layout=Layout(("label", "text")))
QUOTED = 'id,Text,Label\n1,"so, ""good""\nindeed",1\n2,one\u0085line\u2028still,0\n'
FLAG = Columns(flags=("x",))
NAMED_PAIR = "index\tquestion\tsentence\tlabel\n0\twho?\the.\tentailment\n"


@pytest.mark.parametrize(
    ("name", "content", "columns", "result"),
    [
        ("a.csv", "text, Label \na,1\n", PLAIN, [("a", "1")]),  # blanks around the names of columns do not count
        ("a.csv", " text, label\na,1\n", Columns(text="text", label="label"), [("a", "1")]),
        ("a.tsv", "text\t label\na\t1\n", Columns(label="label"), [("a", "1")]),
        ("a.csv", "a,1\n", Columns(label="label", layout=Layout(("text", " label"))), [("a", "1")]),
        ("a.jsonl", '{"text": "a", "label ": "1"}\n', PLAIN, [("a", "1")]),
        ("a.csv", "\n\ntext,label\na,1\n\nb,0\n", PLAIN, [("a", "1"), ("b", "0")]),  # nor do empty lines before them
        ("a.csv", "\ufeff\r\n,\r\ntext,label\na,1\n\nb,0\n", PLAIN, [("a", "1"), ("b", "0")]),
        ("a.csv", ",text,label,\n0,a,1,\n", PLAIN, [("a", "1")]),  # columns without a name may be several
        ("a.csv", QUOTED, PLAIN, [('so, "good"\nindeed', "1"), ("one\u0085line\u2028still", "0")]),
        ("a.csv", 'text,label\n"",1\ngood,0\n', PLAIN, [("", "1"), ("good", "0")]),
        ("a.csv", "sentence1,sentence2,label\na,b,0\n", PLAIN, [(("a", "b"), "0")]),
        ("a.csv", "0,bad\n1,good\n", WITHOUT_HEADER, [("bad", "0"), ("good", "1")]),
        ("a.tsv", 'sentence\tlabel\n"tis good\t1\nbad " film\t0\n', PLAIN, [('"tis good', "1"), ('bad " film', "0")]),
        ("a.tsv", NAMED_PAIR, Columns(text="question", pair="sentence"), [(("who?", "he."), "entailment")]),
        ("a.jsonl", '{"text": "a\\u0085b", "n": 1}\n\n{"text": "c"}\n', PLAIN, [("a\u0085b", None), ("c", None)]),
        ("a.json", '[{"text": "a", "label": 1},\n {"text": "b", "label": 0}]', PLAIN, [("a", 1), ("b", 0)]),
        ("a.json", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n', PLAIN, [("a", 1), ("b", 0)]),
        ("a.csv", "text,label\na\nb,0\n", PLAIN, [("a", None), ("b", "0")]),  # many commands need no labels
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": null}\n', PLAIN, [("a", 1), ("b", None)]),
        ("a.jsonl", '{"tokens": ["a"], "tags": null}\n', PLAIN, [(["a"], None)]),
        ("a.jsonl", '{"text": "a", "x": 1}\n{"text": "b", "x": null}', FLAG, [("a", ["x"]), ("b", None)]),
    ],
)
def test_texts_are_read_with_their_labels(
    tmp_path: Path, name: str, content: str, columns: Columns, result: list[tuple[Any, Any]]
) -> None:
    assert read(written(tmp_path, name, content), columns) == result


def test_other_delimiters_and_encodings_are_read_when_they_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("text;label\nKäse, gut;1\n".encode("cp1252"))
    assert read(path, Columns(layout=Layout(delimiter=";", encoding="cp1252"))) == [("Käse, gut", "1")]
    with pytest.raises(UserError, match=r"not UTF-8 text .* --encoding names another"):
        read(path, Columns(layout=Layout(delimiter=";")))


def test_parquet_and_the_directories_that_datasets_writes(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = arrow.table({"text": ["a", "b"], "label": [1, 0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    for part in ("saved/train/data-00000-of-00002.arrow", "saved/train/data-00001-of-00002.arrow"):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        with ipc.new_stream(tmp_path / part, table.schema) as stream:
            stream.write_table(table)
    (tmp_path / "saved/train/cache-5a3e.arrow").write_text("what `datasets` keeps of a call of map")
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as whole:
        whole.write_table(table)
    assert read(tmp_path / "a.arrow") == [("a", 1), ("b", 0)]
    assert read(tmp_path / "a.parquet") == [("a", 1), ("b", 0)]
    assert read(tmp_path / "saved" / "train") == [("a", 1), ("b", 0)] * 2
    with pytest.raises(UserError, match=r"choose one of its splits: .*saved/train$"):
        read(tmp_path / "saved")
    for name in ("train-00000-of-00002", "train-00001-of-00002-5a3e", "test-00000-of-00001"):
        (tmp_path / "hub").mkdir(exist_ok=True)
        parquet.write_table(table, tmp_path / "hub" / f"{name}.parquet")
    with pytest.raises(UserError, match=r"hub: holds several splits, test, train: give the file of one$"):
        read(tmp_path / "hub")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "part.parquet").write_text("no table")
    with pytest.raises(UserError, match=r"broken/part.parquet: cannot be read as .parquet"):
        read(tmp_path / "broken")
    parquet.write_table(arrow.Table.from_arrays([["a"], ["b"]], names=["text", "text"]), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match=r"twice\.parquet: two columns are named 'text'$"):
        read(tmp_path / "twice.parquet")


def test_a_few_rows_of_a_parquet_file_are_in_memory_at_a_time(tmp_path: Path) -> None:
    """They may hold pictures."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts, size = [f"{number} " + "so " * 2000 for number in range(3000)], 6000
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet")
    tracemalloc.start()
    read_texts = [row.value == text for row, text in zip(rows(tmp_path / "a.parquet"), texts, strict=True)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(read_texts)
    assert peak_bytes < 600 * size


def test_pictures_inside_a_table_are_read(tmp_path: Path) -> None:
    """As bytes, and as the library `datasets` has bytes or a path."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    pixels = np.arange(4, dtype=np.uint8).reshape(2, 2)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    content = (tmp_path / "p.png").read_bytes()
    cells = ({"bytes": content, "path": "p.png"}, {"bytes": None, "path": str(tmp_path / "p.png")}, content)
    for cell in cells:
        parquet.write_table(arrow.table({"image": [cell], "label": [3]}), tmp_path / "a.parquet")
        (row,) = rows(tmp_path / "a.parquet", channels=GREY)
        np.testing.assert_array_equal(row.value, pixels)
    parquet.write_table(arrow.table({"image": [b"no picture"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"row 1: the picture in it cannot be read: cannot identify image file"):
        next(rows(tmp_path / "a.parquet", channels=GREY))


def test_a_picture_is_upright_as_where_it_is_served(tmp_path: Path) -> None:
    pixels, turned = np.arange(6, dtype=np.uint8).reshape(2, 3), Image.Exif()
    turned[0x0112] = 6  # the orientation of a camera that was held upright
    Image.fromarray(pixels).save(tmp_path / "p.png", exif=turned)
    (row,) = rows(written(tmp_path, "a.csv", "image,label\np.png,1\n"), channels=GREY)
    (served,) = ImageEncoder(lambda images, **_: {"pixel_values": images[None]}, 1)(
        [(tmp_path / "p.png").read_bytes()]
    ).arrays["pixel_values"]
    np.testing.assert_array_equal(row.value, served[:, :, 0])
    assert row.value.shape == (3, 2)


def test_which_columns_are_read_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "text,label,sentence\na,1,b\n")
    assert taken(path) == "a.csv: text from 'sentence', label from 'label'; not read: 'text'"
    assert taken(path, Columns(text="text")) == "a.csv: text from 'text', label from 'label'; not read: 'sentence'"
    with pytest.raises(UserError, match="holds no inputs"):
        taken(written(tmp_path, "b.csv", "text,label\n"))
    pairs = written(tmp_path, "qnli.csv", "index,question,sentence,label\n0,who?,me,1\n")
    assert taken(pairs) == "qnli.csv: text from 'question', pair from 'sentence', label from 'label'; not read: 'index'"
    assert [row.value for row in rows(pairs)] == [("who?", "me")]
    assert [row.value for row in rows(pairs, Columns(text="sentence"))] == ["me"]


def test_no_pair_is_looked_for_where_the_network_reads_single_texts(tmp_path: Path) -> None:
    for header, text in (("question,context", "question"), ("text,context", "text"), ("query,passage,text", "text")):
        path = written(tmp_path, "a.csv", f"{header},label\n" + "a," * header.count(",") + "b,1\n")
        assert taken(path, pairs=False).startswith(f"a.csv: text from '{text}', label")
        assert all(isinstance(row.value, str) for row in rows(path, pairs=False))
    with pytest.raises(UserError, match="reads single texts, so --text-pair-column has no use"):
        taken(path, Columns(text="query", pair="passage"), pairs=False)


def test_images_from_npz_nested_lists_and_pictures(tmp_path: Path) -> None:
    pixels = np.arange(4, dtype=np.uint8).reshape(2, 2)
    np.savez(tmp_path / "a.npz", images=pixels[None], labels=np.array([3]))
    Image.fromarray(pixels).save(tmp_path / "p.png")
    table = f'image,label\np.png,1\n"{json.dumps(pixels.tolist())}",2\n'
    result = [
        *rows(tmp_path / "a.npz", channels=GREY),
        *rows(written(tmp_path, "a.csv", table), channels=GREY),
        *rows(written(tmp_path, "a.jsonl", json.dumps({"image": pixels.tolist(), "label": 4})), channels=GREY),
    ]
    assert [row.label for row in result] == [3, "1", "2", 4]
    for row in result:
        np.testing.assert_array_equal(np.asarray(row.value), pixels)


def test_pictures_are_read_as_a_server_reads_them(tmp_path: Path) -> None:
    """Upright, and with the high bits of 16."""
    pixels, turned = np.arange(6, dtype=np.uint8).reshape(2, 3), Image.Exif()
    turned[0x0112] = 6  # its top is on the right
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=turned)
    Image.fromarray(pixels.astype(np.uint16) * 256 + 255).save(tmp_path / "deep.png")
    first, second = rows(written(tmp_path, "a.csv", "image\nturned.png\ndeep.png\n"), channels=GREY)
    np.testing.assert_array_equal(first.value, np.rot90(pixels, -1))
    np.testing.assert_array_equal(second.value, pixels)


@pytest.mark.parametrize("mode", ["1", "P", "LA", "RGB", "RGBA"])
def test_a_network_that_reads_grey_pictures_gets_pictures_of_any_mode_in_grey(tmp_path: Path, mode: str) -> None:
    pixels = np.array([[0, 255, 255], [255, 0, 0]], np.uint8)
    Image.fromarray(pixels).convert(mode).save(tmp_path / "p.png")
    (row,) = rows(written(tmp_path, "a.csv", "image\np.png\n"), channels=GREY)
    np.testing.assert_array_equal(row.value, pixels)


def test_a_picture_that_is_damaged_or_huge_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 300), np.uint8)
    Image.fromarray(noise).save(tmp_path / "p.png")
    path, whole = written(tmp_path, "a.csv", "image,label\np.png,1\n"), (tmp_path / "p.png").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        with pytest.raises(UserError, match=r"row 1: the picture 'p\.png' cannot be read"):
            list(rows(path, channels=GREY))
    second = whole.index(b"IDAT", whole.index(b"IDAT") + 4)
    (tmp_path / "p.png").write_bytes(whole[:second] + b"\0\0\0\0" + whole[second + 4 :])
    with pytest.raises(UserError, match=r"row 1: the picture 'p\.png' cannot be read: broken PNG"):
        list(rows(path, channels=GREY))


@pytest.mark.parametrize(
    ("name", "text", "columns", "message"),
    [
        (
            "a.csv",
            f'{BOTH}"never closed,0\nmore,1\n"quoted",1\n',
            PLAIN,
            "up to line 4 its quotation marks",
        ),
        ("a.csv", f'{BOTH}good,0\n"She said \\"hi\\", so,1\n', PLAIN, "up to line 3 its quotation marks"),
        ("a.csv", f'{BOTH}"to the end,0\n', PLAIN, "up to line 2 its quotation marks"),
        ("a.jsonl", f'{WHOLE}{{"text": "so \\ud83d"}}\n', PLAIN, r"row 2: 'text': holds \\ud83d, half of a character"),
        ("a.jsonl", f'{WORDS}{{"tokens": ["\\ud83d"]}}\n', PLAIN, r"row 2: 'tokens': holds \\ud83d, half of a char"),
        ("a.xml", "", PLAIN, "cannot read .xml; use .csv, .tsv, .jsonl, .json, .conll, .iob, .bio, .txt, .parquet, "),
        ("a.csv", "x,y\n1,2\n", PLAIN, "no column of texts found .* it has: 'x', 'y'"),
        ("a.csv", "text,y\n1,2\n", Columns(label="lable"), "no column 'lable'; it has: 'text', 'y'"),
        ("a.csv", "label,text\n1\n", PLAIN, "row 1 has no 'text'"),
        ("a.csv", "sentence,label\na,1\nb, 1, 0\n", PLAIN, "row 2 has more cells .* quote texts that hold commas"),
        ("a.tsv", "text\tlabel\na\tb\t1\n", PLAIN, "row 1 has more cells .* a text must not hold tabs"),
        ("a.jsonl", '{"text": "a"}\n{"text"\n', PLAIN, "line 2 is not JSON: .* at character 9"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": 3}\n', PLAIN, "row 2: 'text' must be a text, got int"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b", "label": 1}\n', PLAIN, "row 2 has a label .* but row 1 has none"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b", "text_pair": "c"}\n', PLAIN, "row 2 has a second text .'text_pair'"),
        ("a.jsonl", "{}\n", PLAIN, r"it has: nothing$"),
        ("a.csv", 'image\n[[1]]\n"[[1], [2, 3]]"\n', IMAGE, "row 2: 'image' must be an array of numbers"),
        ("a.csv", "image\n[[1]]\n[[1]\n", IMAGE, "row 2: 'image' is not JSON"),
        ("a.jsonl", '{"image": "[1, 2]"}\n', IMAGE, r"row 1: 'image' must be height x width .* got \(2,\)"),
        ("a.jsonl", '{"image": [[NaN]]}\n', IMAGE, "row 1: 'image' must be .* finite"),
        ("a.jsonl", "[1]\n", PLAIN, "line 1 is not a JSON object but list"),
        ("a.json", '{"text": "a"}', PLAIN, "is not a JSON array but dict; one object per line is .jsonl"),
        ("a.json", '[{"text": "a"}, 3]', PLAIN, "item 2 is not a JSON object but int"),
        ("a.csv", "text;label\na;1\n", PLAIN, "Are its columns divided by ';'. Then give --delimiter ';'"),
        ("a.csv", "text,label\n", Columns(layout=Layout(encoding="klingon")), "unknown encoding: klingon"),
        ("a.parquet", "no table", PLAIN, "cannot be read as .parquet"),
        ("a.parquet", "", Columns(layout=Layout(header=("text",))), "--columns is only for .csv, .tsv"),
        ("a.jsonl", "", Columns(layout=Layout(delimiter=";")), "--delimiter is only for .csv, .tsv"),
        ("a.npz", "", Columns(layout=Layout(encoding="cp1252")), "--encoding is only for .csv, .tsv, .jsonl, .json"),
        ("a.npz", "no archive", PLAIN, "is no .npz: numpy.savez writes one, of the arrays 'images'"),
        ("a.npz", "", PLAIN, "is no .npz: numpy.savez writes one"),
        ("a.csv", "text, text,label\na,b,1\n", PLAIN, "two columns are named 'text'"),
        ("a.csv", "Text,text,label\na,b,1\n", PLAIN, "its columns 'Text' and 'text' are named alike: rename one"),
        ("a.jsonl", '{"text": "a", "y": 1, "Y": 0}\n', PLAIN, "its columns 'y' and 'Y' are named alike: rename one"),
        ("a.csv", "image,label\nnowhere.png,1\n", IMAGE, "row 1: the picture 'nowhere.png'"),
    ],
)
def test_unreadable_files_are_one_line(tmp_path: Path, name: str, text: str, columns: Columns, message: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(UserError, match=message) as caught:
        read(path, columns)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_one_that_is_no_text(tmp_path: Path) -> None:
    for name in ("none.csv", "directory_of_datasets"):
        with pytest.raises(UserError, match=f"{name}: cannot be read: No such file or directory"):
            read(tmp_path / name)
    (tmp_path / "binary.csv").write_bytes(b"text,label\n\xff\xfe\x00,1\n")
    with pytest.raises(UserError, match="not UTF-8"):
        read(tmp_path / "binary.csv")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.array([[1], "a"], object), [0, 1], "'images' must not be an array of Python objects"),
        (np.float32(3), [0], r"'images' must be numbers, .* got float32 \(\)"),
        (["a", "b"], [0, 1], r"'images' must be numbers, .* got <U1 \(2,\)"),
        (np.zeros((0, 4, 4)), [], r"holds no inputs: 'images' has the shape \(0, 4, 4\)"),
        (np.zeros((2, 0, 4), np.uint8), [0, 1], "holds no inputs"),
        (np.float32([[[1]], [[np.nan]]]), [0, 1], "row 2: 'images' must be finite numbers"),
        (np.zeros((2, 4, 4)), 1, r"'labels' must be a label or a map for each image, got the shape \(\)"),
        (np.zeros((2, 4, 4)), [1], "2 images but 1 labels"),
    ],
)
def test_arrays_that_are_no_images_or_labels(tmp_path: Path, images: Any, labels: Any, message: str) -> None:
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("name", "columns", "channels", "message"),
    [
        ("a.npz", Columns(), None, "the network reads texts, not images"),
        ("a.npz", Columns(label="y"), GREY, "the arrays 'images' and 'labels' are read: leave out --image-column and"),
        ("a.npz", Columns(image="x"), GREY, "the arrays 'images' and 'labels' are read: leave out --image-column and"),
        ("a.csv", Columns(image="image"), None, "the network reads texts, not images"),
        ("a.csv", Columns(text="text"), GREY, "the network reads images: name their column with --image-column"),
    ],
)
def test_inputs_of_the_other_kind_are_refused(
    tmp_path: Path, name: str, columns: Columns, channels: int | None, message: str
) -> None:
    path = written(tmp_path, name, "text,image\na,[[1]]\n")
    for reading in (taken, lambda *arguments, **kind: next(rows(*arguments, **kind))):
        with pytest.raises(UserError, match=message):
            reading(path, columns, channels=channels)


def test_images_of_another_number_of_channels_are_refused_by_file_and_row(tmp_path: Path) -> None:
    grey, coloured = np.zeros((4, 4)).tolist(), np.zeros((4, 4, 2)).tolist()
    lines = written(tmp_path, "a.jsonl", "\n".join(json.dumps({"image": image}) for image in (grey, coloured)))
    assert len(list(rows(lines, channels=2))) == 2
    with pytest.raises(UserError, match=r"a.jsonl: row 2: 'image' must be .* x 3, got \(4, 4, 2\)"):
        list(rows(lines, channels=3))
    np.savez(tmp_path / "a.npz", images=np.zeros((5, 4, 4, 2)))
    with pytest.raises(UserError, match=r"a.npz: each of 'images' must be .* x 3, got \(4, 4, 2\)"):
        next(rows(tmp_path / "a.npz", channels=3))
    assert len(list(rows(tmp_path / "a.npz", channels=2))) == 5


def test_rows_are_read_one_at_a_time(tmp_path: Path) -> None:
    """An error far down the file does not keep the first rows from being read."""
    path = written(tmp_path, "a.jsonl", '{"text": "a"}\n' * 3 + "broken")
    result = rows(path)
    assert [next(result).number for _ in range(3)] == [1, 2, 3]
    with pytest.raises(UserError, match="not JSON"):
        next(result)
