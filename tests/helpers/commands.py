"""Commands of isobatch, as a user types them."""

from click.testing import Result
from typer.testing import CliRunner

from isobatch.cluster.cli import app


def done(*words: object) -> Result:
    """The result of a command that succeeds. Raises the command's error."""
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def ran(*words: object) -> str:
    """What a command that succeeds prints. Raises the command's error."""
    return done(*words).stdout
