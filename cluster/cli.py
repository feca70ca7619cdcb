"""The `isobatch` command. Commands are in `cluster/commands`, most in a file of their name."""

import sys
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from isobatch.cluster.commands.bench import bench
from isobatch.cluster.commands.cascade import cascade
from isobatch.cluster.commands.deploy import dashboards, deploy, environment, kubernetes
from isobatch.cluster.commands.doctor import doctor
from isobatch.cluster.commands.evaluate import evaluate
from isobatch.cluster.commands.explain import explain
from isobatch.cluster.commands.load import load
from isobatch.cluster.commands.plan import plan
from isobatch.cluster.commands.predict import predict
from isobatch.cluster.commands.prepare import prepare
from isobatch.cluster.commands.profile import profile
from isobatch.cluster.commands.serve import serve
from isobatch.cluster.commands.shared_options import with_options
from isobatch.cluster.commands.simulate import simulate
from isobatch.cluster.commands.status import status
from isobatch.cluster.commands.tune import tune
from isobatch.cluster.commands.up import up
from isobatch.profiles.errors import NO_ROOM, UserError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Serve early-exit networks in full batches, on Ray Serve.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"isobatch {version('isobatch')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class _Command(TyperCommand):
    """A command whose errors about options contain the value."""

    def parse_args(self, *context_and_words: Any) -> list[str]:
        try:
            return super().parse_args(*context_and_words)
        except typer.BadParameter as error:
            if isinstance(wrong := error.__cause__, ValidationError):
                error.message = f"{wrong.errors()[0]['input']!r}: {error.message}"
            raise


for command in (
    bench, cascade, dashboards, deploy, doctor, environment, evaluate, explain, kubernetes, load, plan, predict,
    prepare, profile, serve, simulate, status, tune, up,
):  # fmt: skip
    app.command(cls=_Command)(with_options()(command))

LOOP = "Symlink loop"  # the beginning of the RuntimeError for links that lead in a circle, before Python 3.13


def main() -> None:
    """Run a command. An error that the user can mend, such as a full disk, is one line, and the exit code is 2.

    Modules of the user's own, such as a backend or a policy, are found in the current directory too, as by Ray. Letters
    that the output's encoding lacks, such as a byte of a file's name that is no UTF-8, are written as escapes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        sys.path.append(_current_folder())
        app()
    except (UserError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(LOOP):
            raise
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(_message(error))}", highlight=False)
        sys.exit(2)


def _current_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError as error:
        raise UserError(f"the current folder is gone ({error.strerror}): cd to another") from error


def _message(error: Exception) -> str:
    """
    >>> _message(OSError(2, "No such file or directory", "weights", None, "copy"))
    'copy: No such file or directory'
    >>> _message(OSError(27, "File too large", "weights", None, "copy"))
    'copy: File too large: raise the limit on the sizes of files (ulimit -f)'
    >>> _message(OSError(27, "File too large"))
    'File too large: what was being written has no room there; raise the limit on the sizes of files (ulimit -f)'
    """
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    remedy, place = NO_ROOM.get(error.errno or 0), error.filename2 or error.filename
    if place:
        return ": ".join(filter(None, (str(place), error.strerror, remedy)))
    return f"{error.strerror}: what was being written has no room there; {remedy}" if remedy else str(error)


if __name__ == "__main__":
    main()
