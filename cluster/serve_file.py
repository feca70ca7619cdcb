"""What is to be served, as the standard Serve file: read from YAML, or made for a model's directory."""

from pathlib import Path
from typing import Any

from deployments.config import DEMO, named, parse
from profiles.errors import UserError

APPLICATION = "deployments.app:build"
HTTP = {"host": "127.0.0.1", "port": 8000}

ServeFile = dict[str, Any]


def serve_file(target: Path | None, overrides: dict[str, object]) -> ServeFile:
    """The Serve file for a directory, a YAML file, or (None) the built-in demo; `overrides` go into `args:`."""
    if target is not None and not target.exists():
        raise UserError(f"{target}: no such directory or file; give a model's directory or a Serve file (*.yaml)")
    if target is None or target.is_dir():
        model = {"model": str(target.resolve())} if target else {}
        application = {"name": "isobatch", "import_path": APPLICATION, "args": model}
        content: ServeFile = {"applications": [application]}
    else:
        content = _read(target)
    for application in content["applications"]:
        if application.get("import_path") == APPLICATION:
            application["args"] = _checked((application.get("args") or {}) | overrides)
    content["http_options"] = HTTP | (content.get("http_options") or {})
    return content


def with_demo(content: ServeFile) -> ServeFile:
    """The same with the demo where no model is named. At first use it is trained here, where its progress is seen."""
    applications = [dict(application) for application in content["applications"]]
    for application in applications:
        if application.get("import_path") == APPLICATION and "model" not in application["args"]:
            application["args"] = application["args"] | {"model": str(named(DEMO)())}
    return content | {"applications": applications}


def _read(path: Path) -> ServeFile:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    applications = content.get("applications") if isinstance(content, dict) else None
    if not (isinstance(applications, list) and applications and all(isinstance(one, dict) for one in applications)):
        raise UserError(f"{path} is not a Serve file: it needs a list 'applications:', as cluster/serve.yaml has")
    return content  # type: ignore[no-any-return]


def _checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """Before anything starts: are the fields right, and is the directory there? Paths become absolute."""
    config = parse(arguments)
    if config.model is None:
        return {name: value for name, value in arguments.items() if name != "model"}
    directory = Path(config.model)
    if not directory.is_dir():
        raise UserError(f"args: model = {config.model!r}: no such directory")
    return arguments | {"model": str(directory.resolve())}
