"""A whole file is answered as the network answers each input, and an interrupted run goes on where it stopped."""

import csv
import errno
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copytree
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from isobatch import load
from isobatch.cluster.bulk import ROWS_PER_GROUP, answer_rows, finish, kept_in, part_of
from isobatch.cluster.cli import app
from isobatch.cluster.client import as_json, json_at, outputs_from
from isobatch.cluster.load import request_bodies
from isobatch.deployments.folders import content_of, locked
from isobatch.deployments.models.encode import ImageEncoder
from isobatch.deployments.models.predict import BATCH, predict
from isobatch.deployments.models.ramps import save_ramps
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.prepare.data import Row
from isobatch.profiles.errors import UserError, WrongInputError
from tests.helpers.command_lines import material
from tests.helpers.commands import ran
from tests.helpers.documented import served
from tests.helpers.tiny_labels import label_network
from tests.helpers.tiny_networks import network
from tests.helpers.tiny_pixels import pixel_network
from tests.helpers.tiny_words import word_network

ROWS = 120  # of the material
DATA = Path("others.csv")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with random ramps, and texts."""
    folder = material(tmp_path_factory.mktemp("bulk"))
    ramps = network("bert", "confidence", [0.6]).ramps
    save_ramps(folder / "my-bert", ramps.rules, ramps.heads)
    return folder


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("my-bert", "others.csv"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["predict", "others.csv", *map(str, arguments)])


def answered(*arguments: object) -> str:
    result = run("--model", "my-bert", "--device", "cpu", *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return str(result.output)


@pytest.fixture(scope="module")
def alone(place: Path) -> list[Any]:
    """The network's answers, each input by itself."""
    model = load(place / "my-bert")
    with (place / "others.csv").open() as file:
        return [model.predict([row["text"]])[0] for row in csv.DictReader(file)]


def test_answers_have_the_number_of_their_row_in_every_format(here: Path, alone: list[Any]) -> None:
    assert "120 rows are answered in a.csv" in answered("--out", "a.csv", "--scores", "all")
    with Path("a.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(row["row"]) for row in table] == list(range(1, ROWS + 1))
    assert [int(row["exit_block"]) for row in table] == [each.exit_block for each in alone]
    assert len({each.exit_block for each in alone}) > 1
    for row, each in zip(table, alone, strict=True):
        assert row["name"] == each.name
        assert [float(row[f"score of LABEL_{label}"]) for label in range(3)] == pytest.approx(
            each.probabilities.tolist(), abs=1e-5
        )
    answered("--out", "a.jsonl", "--full")
    lines = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    assert {line["exit_block"] for line in lines} == {3}
    assert all("scores" not in line for line in lines)
    answered("--out", "a.parquet")
    rows = parquet.read_table("a.parquet").to_pylist()
    assert [row["name"] for row in rows] == [each.name for each in alone]
    assert not list(here.glob("*.part"))


def test_an_interrupted_run_repeats_nothing(here: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.deployments.models.predict.AT_ONCE", BATCH)
    encode, encoded, stops_at = TorchModel.encode, list[int](), 2

    def interrupted(model: TorchModel, inputs: Any) -> Any:
        if len(encoded) == stops_at:
            raise KeyboardInterrupt
        encoded.append(len(inputs))
        return encode(model, inputs)

    monkeypatch.setattr(TorchModel, "encode", interrupted)
    stopped = run("--model", "my-bert", "--device", "cpu", "--out", "b.csv")
    assert (stopped.exit_code, "b.csv.part has the answers so far" in stopped.output) == (130, True)
    with Path("b.csv.part").open("a") as part:
        part.write('{"digest": "torn')
    encoded.clear()
    stops_at = ROWS
    answered("--out", "b.csv")
    assert sum(encoded) == ROWS - 2 * BATCH
    with Path("b.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == [each.name for each in alone]


def test_answers_to_texts_that_another_tokenizer_read_are_not_continued(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = copytree(here / "my-bert", here / "copied")
    arguments = ("--model", copied, "--device", "cpu", "--out", "b.csv")
    monkeypatch.setattr("isobatch.deployments.models.predict.AT_ONCE", BATCH)
    encode, encoded = TorchModel.encode, list[int]()

    def once(model: TorchModel, inputs: Any) -> Any:
        if encoded:
            raise KeyboardInterrupt
        encoded.append(len(inputs))
        return encode(model, inputs)

    with monkeypatch.context() as patched:
        patched.setattr(TorchModel, "encode", once)
        assert run(*arguments).exit_code == 130
    settings = copied / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 4}))
    assert "b.csv.part holds answers with another preprocessor" in str(run(*arguments).exception)
    assert run(*arguments, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("--full",), "b.csv.part holds answers with another full (False, now True): --force starts again"),
        (("--dtype", "bfloat16"), "b.csv.part holds answers with another dtype (None, now bfloat16): --force"),
        ((), "the first 32 rows are not those that b.csv.part answers: --force starts again"),
    ],
)
def test_the_answers_of_another_run_are_not_continued(here: Path, change: tuple[str, ...], sentence: str) -> None:
    network = content_of(here / "my-bert")
    job = {"file": "others.csv", "network": network, "scores": "winner", "full": False, "dtype": None}
    others = [Row(number, f"another {number}", None) for number in range(1, 33)]
    answer_rows(DATA, others, lambda values: [{"label": 0}] * len(values), part_of(Path("b.csv")), job, 32)
    result = run("--model", "my-bert", "--device", "cpu", "--out", "b.csv", *change)
    assert sentence in str(result.exception)
    answered("--out", "b.csv", "--force", *change)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--out", "a.csv"), "give either --model DIRECTORY, which answers here, or --url of a server"),
        (("--model", "my-bert", "--out", "a.txt"), "its suffix must be one of .csv, .jsonl, .parquet"),
        (("--model", "my-bert", "--out", "others.csv"), "others.csv exists: --force replaces it"),
        (("--model", "my-bert", "--out", "others.csv", "--force"), "cannot write others.csv: this command uses that"),
        (("--model", "my-bert", "--out", "a.csv", "--scores", "0"), "--scores is '0': it must be 'all', 'winner' or"),
        (("--model", "nowhere/there/is", "--out", "a.csv"), "no such directory"),
        (("--url", "http://127.0.0.1:1", "--out", "a.csv"), "nobody answers at http://127.0.0.1:1"),
        (("--model", "my-bert", "--out", "nowhere/a.csv"), "cannot write nowhere/a.csv"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(here: Path, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in str(run(*arguments).exception)


def test_a_run_that_answers_nothing_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TorchModel, "encode", interrupted)
        stopped = run("--model", "my-bert", "--device", "cpu", "--out", "c.csv")
    assert "interrupted: no row was answered yet" in stopped.output
    Path("wrong.jsonl").write_text('{"text": 5}\n')
    wrong = CliRunner().invoke(app, ["predict", "wrong.jsonl", "--model", "my-bert", "--out", "c.csv"])
    assert "row 1: 'text' must be a text" in str(wrong.exception)
    assert not list(here.glob("c.csv.part"))


def test_survivors_of_several_batches_become_full_ones(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes, run_blocks = load(place / "my-bert"), defaultdict[int, list[int]](list), TorchModel.run

    def noted(self: TorchModel, batch: Any, *rest: Any) -> Any:
        sizes[batch.cursor].append(len(batch))
        return run_blocks(self, batch, *rest)

    monkeypatch.setattr(TorchModel, "run", noted)
    assert len(predict(model, ["a good film", "a bad film", "the film was not dull"] * 40)) == 120
    for here in sizes.values():
        assert sum(size < BATCH for size in here) <= 1, "only the last batch is not full"


def finished(out: Path, answers: list[Any]) -> Path:
    """The file of so many rows with these answers."""
    rows = [Row(number, "text", None) for number, _ in enumerate(answers)]
    answer_rows(DATA, rows, lambda values: answers, part_of(out), {}, len(rows))
    finish(part_of(out), out)
    return out


def test_a_table_has_a_column_for_each_label_that_any_row_lists(tmp_path: Path) -> None:
    answers = [
        {"name": "c", "scores": [{"label": "abc".index(name), "name": name, "score": 0.5} for name in listed]}
        for listed in ("ac", "bc")
    ]
    with finished(tmp_path / "a.csv", answers).open() as file:
        rows = list(csv.DictReader(file))
    assert [[row[f"score of {name}"] for name in "abc"] for row in rows] == [["0.5", "", "0.5"], ["", "0.5", "0.5"]]


def test_labels_with_the_sign_between_labels_in_their_names_are_refused_until_another_is_named(tmp_path: Path) -> None:
    answers = [{"labels": [{"label": 0, "name": "a, b"}, {"label": 1, "name": "c"}]}]
    with pytest.raises(UserError, match=r"label 'a, b' contains ',': --label-separator names another sign"):
        finished(tmp_path / "a.csv", answers)
    finish(tmp_path / "a.csv.part", tmp_path / "a.csv", ";")
    with (tmp_path / "a.csv").open() as file:
        assert [row["labels"] for row in csv.DictReader(file)] == ["a, b;c"]


def test_labels_of_one_name_have_columns_of_their_own(tmp_path: Path) -> None:
    """ImageNet has a crane that flies and one that lifts."""
    scores = [{"label": 134, "name": "crane", "score": 0.75}, {"label": 517, "name": "crane", "score": 0.25}]
    with finished(tmp_path / "a.csv", [{"name": "crane", "scores": scores}]).open() as file:
        (row,) = csv.DictReader(file)
    assert (row["score of crane (134)"], row["score of crane (517)"]) == ("0.75", "0.25")


def test_a_parquet_file_has_the_columns_and_types_of_later_rows(tmp_path: Path) -> None:
    """The first row group has no label in any row, and whole numbers."""
    answers: list[Any] = [{"labels": [], "score": 1}] * ROWS_PER_GROUP
    answers += [{"labels": [], "score": 0.5}, {"labels": [{"label": 2, "name": "c"}], "score": 0.5, "runs": [3, 4]}]
    first, *_, last = parquet.read_table(finished(tmp_path / "a.parquet", answers)).to_pylist()
    assert first == {"row": 0, "labels": [], "score": 1.0, "runs": None, "truncated": False}
    assert last == {**answers[-1], "row": len(answers) - 1, "truncated": False}


def test_answers_of_a_version_that_noted_no_precision_are_continued(tmp_path: Path) -> None:
    part = tmp_path / "a.csv.part"
    answer_rows(DATA, [Row(1, "a", None)], lambda values: [{"label": 0}], part, {"full": False}, 1)
    assert kept_in(part, {"full": False, "dtype": "float16"})[0] == 1


def test_an_option_for_the_other_way_to_answer_is_refused(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "a.csv")
    with pytest.raises(UserError, match="--dtype is for --model: leave it out"):
        ran("predict", DATA, "--url", "http://127.0.0.1:1", "--dtype", "float16", *out)
    with pytest.raises(UserError, match="--api-key-variable is for --url: leave it out"):
        ran("predict", DATA, "--model", "demo", "--api-key-variable", "KEY", *out)


@pytest.mark.parametrize("content", [b"[1, 2]\n", b'{"a": 1}\n', b'{"job": 3}\n', b"\x89PNG\n"])
def test_a_file_of_another_program_is_not_continued(tmp_path: Path, content: bytes) -> None:
    part = tmp_path / "answers.csv.part"
    part.write_bytes(content)
    with pytest.raises(UserError, match=r"answers\.csv\.part is not of isobatch predict: --force replaces it"):
        kept_in(part, {"full": False})
    assert part.read_bytes() == content


def test_a_full_disk_is_named_by_the_file_that_was_wanted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # writing to an open file names none

    monkeypatch.setattr("isobatch.cluster.commands.predict.finish", full)
    failed = run("--model", "my-bert", "--device", "cpu", "--out", "d.csv").exception
    assert (failed.errno, failed.filename) == (errno.ENOSPC, "d.csv")
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert "120 rows are answered in d.csv" in answered("--out", "d.csv")


def test_two_commands_do_not_write_one_file(here: Path) -> None:
    with locked(Path("a.csv")):
        assert "another isobatch predict writes a.csv" in str(run("--model", "my-bert", "--out", "a.csv").exception)
    answered("--out", "a.csv")


MOST_BYTES = 400


class Refusing(BaseHTTPRequestHandler):
    """A server that cannot read the input "wrong", nor bodies that are too large."""

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/ends":
            self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"[1]")

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        inputs = json.loads(self.rfile.read(size))["inputs"]
        self.send_response(413 if size > MOST_BYTES else 422 if "wrong" in inputs else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"outputs": [{"label": 0}] * len(inputs)}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_an_input_that_a_server_refuses_is_named_by_its_row(refusing: str, tmp_path: Path) -> None:
    rows = [Row(number, "wrong" if number == 41 else f"right {number}", None) for number in range(1, 61)]
    with pytest.raises(UserError, match=r"^others\.csv: row 41: the input is refused: .* with status 422"):
        answer_rows(DATA, rows, lambda some: list(outputs_from(refusing, some, {})), tmp_path / "a.part", {}, 60)


def test_a_server_that_ends_while_it_answers_is_not_taken_for_one_of_grpc(refusing: str) -> None:
    with pytest.raises(UserError, match=r"nobody answers at .*/ends \(IncompleteRead"):
        json_at(f"{refusing}/ends", {})


def test_inputs_that_are_too_large_together_are_sent_apart(refusing: str) -> None:
    assert len(list(outputs_from(refusing, ["a text of 30 characters, or so"] * 60, {}))) == 60
    with pytest.raises(WrongInputError, match="with status 413") as refusal:
        list(outputs_from(refusing, ["short", "long" * MOST_BYTES, "short"], {}))
    assert refusal.value.value == "long" * MOST_BYTES


@pytest.mark.parametrize(("shape", "channels"), [((5, 7, 3), 3), ((5, 7), 3), ((5, 7), 1)])
def test_a_picture_is_sent_in_few_bytes_and_read_as_its_numbers(shape: tuple[int, ...], channels: int) -> None:
    picture = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    read = ImageEncoder(lambda images, **_: {"pixel_values": images[None]}, channels)
    as_sent, as_numbers = (read([value]).arrays["pixel_values"] for value in (as_json(picture), picture.tolist()))
    np.testing.assert_array_equal(as_sent, as_numbers)
    photo = np.full((480, 640, 3), 200, np.uint8)
    assert len(json.dumps(as_json(photo))) < photo.size / 100
    assert as_json(picture / 2) == (picture / 2).tolist()


def test_a_server_on_this_machine_is_reached_without_the_proxy(refusing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request._opener", None)  # of an earlier test, with its environment
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert json_at(refusing, {}) == [1]


@pytest.mark.parametrize(("network", "parts"), [(word_network, True), (pixel_network, True), (label_network, False)])
def test_a_server_shows_whether_an_answer_has_parts(
    network: Callable[[], Path], parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not fit into a row of a table."""
    with served(model=str(network()), device="cpu") as client:
        monkeypatch.setattr(request_bodies, "json_at", lambda url, _: client.get(urlsplit(url).path).json())
        assert request_bodies.accepted_at("http://a.example/predict", {}).parts == parts
