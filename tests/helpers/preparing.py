"""A network that `isobatch prepare` has given ramps, for the tests of one kind of network."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from isobatch.cluster.cli import app
from isobatch.deployments.prepare import pipeline


def command(*arguments: object) -> Result:
    """The result of a command of `isobatch` that succeeds. Raises the command's error."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


@contextmanager
def prepared_network(place: Path, network: Path, data: Path, most_lost: str, *more: str) -> Iterator[str]:
    """Write it to `place`/out, without a picture, and yield what the command prints. Its cache lies in `place`, too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patched.setattr(pipeline, "draw_exits", lambda _, path: path.touch())
        arguments = ("--data", data, "--out", place / "out", "--max-accuracy-loss", most_lost)
        yield command("prepare", network, *arguments, *more).output
