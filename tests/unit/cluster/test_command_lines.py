"""What the pages say can be typed, can be typed; and help comes at once."""

import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import typer.main
from rich.markup import render
from typer.testing import CliRunner

from isobatch.cluster.cli import app, main
from isobatch.cluster.commands.shared_options import pairs_of
from isobatch.profiles.errors import UserError
from tests.helpers.command_lines import ROOT, SMALL, lines

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = typer.main.get_command(app)
HEAVY = ("torch", "ray", "transformers", "sklearn", "matplotlib", "pandas")


def test_the_readme_shows_every_command() -> None:
    assert {line[0] for line in lines(ROOT / "README.md")} == set(SMALL) == set(COMMAND.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_lines_of_a_page_are_understood(page: Path) -> None:
    """Their commands and options exist, and the values are of the right type."""
    for name, *arguments in lines(page):
        COMMAND.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """Of the command and of all its commands, in one fresh process."""
    script = f"""
import contextlib, io, sys
from isobatch.cluster.cli import main
for words in [[], *[[name] for name in {sorted(SMALL)!r}]]:
    sys.argv = ["isobatch", *words, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main()
    assert "Usage" in shown.getvalue(), words
print(*[name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_shell_completes_commands_and_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the script of `isobatch --install-completion` asks for them."""

    def completed(words: str) -> set[str]:
        monkeypatch.setenv("_ISOBATCH_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        return set(CliRunner().invoke(app, [], prog_name="isobatch").output.split())

    assert completed("isobatch pr") == {"predict", "prepare", "profile"}
    assert "--max-batch" in completed("isobatch plan --max")


def test_what_reads_a_file_takes_the_same_columns_everywhere() -> None:
    """So that what `isobatch prepare` was told of a file can be told to each command after it."""
    of_data = {"text_column", "text_pair_column", "image_column", "label_column", "columns", "delimiter", "encoding"}
    for name, command in COMMAND.commands.items():  # type: ignore[attr-defined]
        names = {parameter.name for parameter in command.params}
        assert names & of_data in (set(), of_data), name


def test_each_command_shows_an_example_and_no_help_of_an_option_loses_words_in_brackets() -> None:
    """Rich takes `[...]` for a style, and shows nothing of it."""
    for name, command in COMMAND.commands.items():  # type: ignore[attr-defined]
        assert f"Example: [bold]isobatch {name}" in (command.help or "")
        for parameter in command.params:
            sentence = getattr(parameter, "help", None) or ""
            assert render(sentence).plain == sentence, (name, parameter.name)


@pytest.mark.parametrize("seed", [-1, 2**64])
@pytest.mark.parametrize("command", ["prepare my-bert", "cascade small large --devices cpu=1"])
def test_a_seed_that_no_generator_takes_is_refused(command: str, seed: int) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--data", "a.csv", "--out", "out", "--seed", str(seed)])
    assert "Invalid value for '--seed'" in result.output


def test_a_value_of_the_wrong_type_is_in_its_error() -> None:
    assert "Invalid value for '--slo-ms': 'abc': " in CliRunner().invoke(app, ["plan", "--slo-ms", "abc"]).output


def test_names_in_several_lines_are_refused() -> None:
    with pytest.raises(UserError, match="must be one line"):
        pairs_of("neg=0\npos=1")


def test_a_label_with_two_numbers_is_refused() -> None:
    with pytest.raises(UserError, match="--labels names 'pos' twice: give each label one number"):
        pairs_of("Pos=1,neg=0,pos=2")
    assert pairs_of("pos=1,good=1") == {"pos": "1", "good": "1"}


def test_letters_that_the_output_lacks_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files may be any bytes."""
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, "utf-8"))
    monkeypatch.setattr(sys, "argv", ["isobatch", "dashboards", "--out", f"{tmp_path}/caf\udce9"])
    with pytest.raises(SystemExit) as ended:
        main()
    sys.stdout.flush()
    assert (ended.value.code, f"wrote {tmp_path}/caf\\udce9/alerts.yaml" in written.getvalue().decode()) == (0, True)


def test_links_in_a_circle_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (loop := tmp_path / "loop").symlink_to(loop)
    monkeypatch.setattr(sys, "argv", ["isobatch", "prepare", str(tmp_path), "--data", "a.csv", "--out", str(loop)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.count("\n") == 1


def test_an_error_of_our_own_has_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("isobatch.cluster.cli.app", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        main()


def test_a_current_folder_that_is_gone_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", ["isobatch", "--version"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "error: the current folder is gone" in capsys.readouterr().err
