"""isobatch is one package, and each of its modules has one name, from a checkout as from a wheel."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from isobatch.cluster.serving.serve_file import APPLICATION, CONTROLLER, DECODER, serve_file
from isobatch.deployments.models.ramps import ExitRules
from isobatch.deployments.named import current_path
from isobatch.profiles.errors import UserError

PARTS = ("profiles", "optimizer", "deployments", "cluster")


def test_a_network_is_loaded_from_the_package_itself() -> None:
    import isobatch

    assert isobatch.load is import_module("isobatch.deployments").load


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_no_second_name(part: str) -> None:
    """The folders at the top of a checkout would be packages too."""
    for name in (part, f"{part}.errors"):
        with pytest.raises(ImportError, match=f"import isobatch.{part}"):
            import_module(name)
    assert part not in sys.modules


def test_import_paths_before_the_first_release_still_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, before = tmp_path / "serve.yaml", "deployments.app:build"
    file.write_text(f"applications: [{{name: a, import_path: '{before}', args: {{model: .}}}}]")
    (application,) = serve_file(file, {})["applications"]
    assert application["import_path"] == APPLICATION == current_path(before)
    assert f"import_path: {before} is called {APPLICATION} since 0.1.0" in capsys.readouterr().err
    assert [current_path(path) for path in ("cluster.controller.app:build", "deployments.decoding.app:build")] == [
        CONTROLLER,
        DECODER,
    ]
    assert ExitRules(policy="deployments.exits:margin").policy == "isobatch.deployments.exits:margin"


def test_import_paths_of_others_are_left_alone(tmp_path: Path) -> None:
    for path in ("cluster.policies:mine", "deployments:mine", "my.deployments.exits:entropy"):
        assert current_path(path) == path
    file = tmp_path / "serve.yaml"
    file.write_text("applications: [{name: a, import_path: 'deployments.app:biuld'}]")
    with pytest.raises(UserError, match=f"'deployments.app:biuld': there is no such application; is '{APPLICATION}'"):
        serve_file(file, {})
