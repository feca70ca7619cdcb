"""Commands of isobatch, as a user types them."""

from typer.testing import CliRunner

from isobatch.cluster.cli import app


def ran(*words: object) -> str:
    """What a command that succeeds prints. Raises the command's error."""
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout
