"""`isobatch prepare` refuses what it cannot do in one sentence, and replaces nothing unasked."""

import errno
import json
import pwd
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from isobatch.cluster.cli import app, main
from isobatch.deployments.folders import cache_directory
from isobatch.deployments.models.ramps import read_rules
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.prepare import pipeline
from isobatch.deployments.prepare.features import features
from isobatch.profiles.files import load
from tests.helpers.tiny_labels import label_network
from tests.helpers.tiny_pixels import pixel_network
from tests.helpers.tiny_words import word_network
from tests.unit.prepare.conftest import Refusal, Run, reviews

pytestmark = pytest.mark.usefixtures("cache", "no_picture")


def test_without_a_tokenizer_no_data_is_read(refusal: Refusal, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal(checkpoint, "--data", tmp_path / "nowhere.csv", "--out", tmp_path / "out")


def test_what_appears_meanwhile_is_not_replaced_unasked(
    refusal: Refusal, asked: tuple[object, ...], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def while_another_writes(*arguments: Any) -> Any:
        out.mkdir()
        (out / "exits.json").write_text("another's")
        return features(*arguments)

    monkeypatch.setattr(pipeline, "features", while_another_writes)
    assert "exists already; --force replaces it" in refusal(*asked)
    assert (out / "exits.json").read_text() == "another's"


def test_a_file_in_the_place_of_the_folder_is_not_called_replaceable(
    refusal: Refusal, asked: tuple[object, ...], out: Path
) -> None:
    out.touch()
    assert "exists, and is not a prepared model (it has no exits.json): name another --out" in refusal(*asked)


def test_a_network_whose_weights_are_broken_is_one_sentence(
    refusal: Refusal, checkpoint: Path, asked: tuple[object, ...], out: Path
) -> None:
    """A training that diverged leaves weights that are no numbers."""
    weights = load_file(checkpoint / "model.safetensors")
    weights["classifier.bias"] = weights["classifier.bias"] * float("nan")
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert "the network's answers are not finite" in refusal(*asked)
    assert not out.exists()


def test_a_text_of_which_the_tokenizer_makes_nothing_is_named_by_its_row(
    refusal: Refusal, checkpoint: Path, asked: tuple[object, ...], tmp_path: Path
) -> None:
    """Tokenizers of GPT-2, for example, put nothing around a text."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    (checkpoint / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    lines = (tmp_path / "a.csv").read_text().splitlines()
    lines[77] = ",1"
    (tmp_path / "a.csv").write_text("\n".join(lines))
    empty = f"{tmp_path / 'a.csv'}: row 77: the input is empty: this network's tokenizer makes no token of it"
    assert empty in refusal(*asked)
    of_profile = ("profile", str(checkpoint), "--data", str(tmp_path / "a.csv"), "--out", str(tmp_path / "p.json"))
    assert str(CliRunner().invoke(app, of_profile).exception) == empty


def test_nothing_is_replaced_unasked_and_nothing_that_is_read(
    run: Run, refusal: Refusal, asked: tuple[object, ...], out: Path, checkpoint: Path, tmp_path: Path
) -> None:
    assert run(*asked) == 0
    refusal(*asked)
    data = reviews(out / "b.csv")
    inner = out / "inner"
    inner.symlink_to(checkpoint)
    assert f"{data}: lies in --out {out}, which is replaced" in refusal(*asked, "--data", data, "--force")
    assert data.exists()
    assert f"{inner}: lies in --out {out}, which is replaced" in refusal(inner, *asked[1:], "--force")
    assert inner.exists()
    assert run(*asked, "--force") == 0
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").touch()
    refusal(*asked, "--out", precious, "--force")
    assert (precious / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--label-column", "lable"), "no column 'lable'; it has: 'text', 'label'"),
        (("--policy", "entropie"), "policy 'isobatch.deployments.exits:entropie' cannot be imported"),
        (("--max-accuracy-loss", "one"), "--max-accuracy-loss one is not a share; write it as 1% or 0.01"),
        (("--policy", "near"), "--policy: policy near gives a score, but this network gives labels: use entropy, conf"),
        (("--policy", "five_best"), "--policy: policy five_best reads heat maps, which only networks that find points"),
        (("--policy", "os:getcwd"), "policy 'os:getcwd' failed when tried on two inputs: TypeError"),
        (("--out", "/proc/x/y"), "/proc/x/y: cannot be written: /proc: "),
        (("--out", ".", "--force"), ".: is mounted or holds the current folder, so it cannot be replaced: name one in"),
        (("--out", "/proc", "--force"), "/proc: is mounted or holds the current folder, so it cannot be replaced"),
        (("--out", f"{__file__}/y"), f"{__file__}/y: cannot be written: {__file__}: Not a directory"),
        (("--data", "none.csv"), "none.csv: cannot be read: No such file or directory"),
        (("--metric", "macro-f1"), "has no column of labels, which --metric macro-f1 needs"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    refusal: Refusal, checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    data, out = reviews(tmp_path / "a.csv", labelled="--metric" not in arguments), tmp_path / "out"
    output = refusal(checkpoint, "--data", data, "--out", out, *arguments)
    assert message in output
    assert "\n" not in output
    assert not out.exists()


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    refusal: Refusal, asked: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "exits.png")

    monkeypatch.setattr(pipeline, "draw_exits", full)
    assert "exits.png: No space left on device" in refusal(*asked, "--out", tmp_path / "made" / "out")
    assert list((tmp_path / "made").iterdir()) == []


def test_a_user_without_a_home_needs_another_place_for_the_cache(
    refusal: Refusal, asked: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert refusal(*asked).endswith("in which there could be a cache: XDG_CACHE_HOME=DIR names a place")
    assert not (tmp_path / "~").exists()


def test_the_name_of_the_data_may_be_any_bytes(
    run: Run, asked: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = reviews(tmp_path / "caf\udce9.csv")
    assert run(*asked, "--data", data) == 0
    out = tmp_path / "out"
    assert read_rules(out / "exits.json").notes["data"] == "caf\\udce9.csv"
    few = ("--tokens", "6", "--largest", "2", "--timing-s", "0.1", "--device", "cpu", "--out", f"{tmp_path}/p.json")
    monkeypatch.setattr(sys, "argv", ["isobatch", "profile", str(out), "--data", str(data), *few])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert any("caf\\udce9.csv" in note for note in load(tmp_path / "p.json").notes)


def test_features_take_their_room_before_they_are_computed(
    run: Run, asked: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room on the disk, writing to a page of a mapped file would end the process (SIGBUS)."""
    files, sparse, compute = set[Path](), set[Path](), TorchModel.features

    def noted(model: TorchModel, batch: Any) -> Any:
        files.update((cache_directory() / "features").glob(".*/*.npy"))
        sparse.update(each for each in files if each.stat().st_blocks * 512 < each.stat().st_size)
        return compute(model, batch)

    monkeypatch.setattr(TorchModel, "features", noted)
    assert run(*asked) == 0
    assert files
    assert not sparse


ONE_LABEL = "--metric mcc is for networks that give an input one label; for this one: "
REMEMBERS = "remembers earlier ramps of an input"


@pytest.mark.parametrize(
    ("network", "option", "value", "sentence"),
    [
        (word_network, "--metric", "mcc", f"{ONE_LABEL}accuracy"),
        (label_network, "--metric", "mcc", f"{ONE_LABEL}micro-f1, acc"),
        (pixel_network, "--metric", "mcc", f"{ONE_LABEL}agreement, acc"),
        (word_network, "--policy", "patience", f"--policy: policy patience {REMEMBERS}"),
        (pixel_network, "--policy", "near_number", "--policy: policy near_number gives a score, but this network"),
        (pixel_network, "--policy", "five_best", "--policy: policy five_best reads heat maps"),
        (label_network, "--policy", "voting", f"--policy: policy voting {REMEMBERS}"),
        (pixel_network, "--policy", "patience", f"--policy: policy patience {REMEMBERS}"),
        (label_network, "--label-separator", "", "--label-separator '' is empty: give the sign between labels"),
        (word_network, "--tolerance", "0.1", "--tolerance is for networks that give scores or points: leave it out"),
        (pixel_network, "--ramp", "pooler", "--ramp and --own-exits are not for a network whose answers are maps"),
    ],
)
def test_options_for_another_kind_of_network_are_refused_before_data_is_read(
    refusal: Refusal, tmp_path: Path, network: Callable[[], Path], option: str, value: str, sentence: str
) -> None:
    data = ("--data", tmp_path / "nowhere.csv", "--out", tmp_path / "out")
    assert sentence in refusal(network(), *data, option, value)
