"""The standard Serve file, which says what is served: read from YAML, or made for a model's directory."""

from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cluster.controller.config import OF_CLASSIFIERS, ControllerConfig
from deployments.cluster_checks import PATHS, check_http
from deployments.config import AppConfig, checked, parse
from deployments.decoding.config import DecoderConfig
from deployments.decoding.ramp_rules import check_decoder, is_decoder
from deployments.folders import told_in, weights_of
from deployments.front.headers import key_in
from deployments.graph import check_weights, read_graph
from deployments.named import DEMO, DEMO_NAME, LLM_DEMO_NAME, LOADER, built_in, function_at
from deployments.tasks import check_one_label
from optimizer.plan import read_plan
from profiles.decoding import PROJECT, load_decoder_profile
from profiles.errors import UserError, read_text
from profiles.files import differ

ROOT = Path(__file__).resolve().parents[2]
APPLICATION = "deployments.app:build"
CONTROLLER = "cluster.controller.app:build"
REACHED = ("front", "deployer")  # the deployments that Serve knows of; those of replicas are started by the deployer
DECODER = "deployments.decoding.app:build"
NAME = "isobatch"  # what an application is called that is made for a directory
LOCALHOST = "127.0.0.1"
GRPC_PORT = 8001
LONGEST = 64_000  # characters of a file: PyYAML takes 4 us for each, and its parser in C fails on deep nesting

# What Serve reads, which passes over what it does not know; and what `isobatch serve` reads beside it.
OF_FILES = frozenset(
    (
        "applications", "controller_options", "grpc_options", "http_options", "logging_config", "proxy_location",
        "target_capacity", "tracing_config",
    )
)  # fmt: skip
NODES = "nodes"
OF_APPLICATIONS = frozenset(
    (
        "args", "autoscaling_policy", "deployments", "external_scaler_enabled", "host", "import_path", "logging_config",
        "name", "port", "route_prefix", "runtime_env",
    )
)  # fmt: skip

ServeFile = dict[str, Any]


class _Http(BaseModel):
    """What we read of `http_options:`; the rest is Serve's."""

    model_config = ConfigDict(extra="allow")

    host: str = LOCALHOST
    port: int = Field(8000, ge=1, le=65535)


def serve_file(target: Path | None, overrides: dict[str, Any]) -> ServeFile:
    """The Serve file for a directory, a YAML file, or (None) the built-in demo; `overrides` go into `args:`.

    Relative paths in a YAML file are from its folder. `demo` is the built-in network too, and `llm-demo` the built-in
    decoder, unless a directory has that name.
    """
    if target and not target.exists():
        target, overrides = _built_in(target, overrides)
    if target is None and not overrides:
        target = ROOT / "cluster" / "demo.yaml"
    content, root = _content(target, planned="plan" in overrides)
    for one in content["applications"]:
        _check_import_path(one.get("import_path"))
    for one in ours(content):
        _check_deployments(one.get("deployments") or [])
        one["args"] = _checked((one.get("args") or {}) | overrides, root)
    for one in decoders(content):
        one["args"] = _checked_decoder((one.get("args") or {}) | overrides, root)
    _check_apart(content)
    for one in controllers(content):
        key_in(checked(ControllerConfig, one.get("args") or {}).api_key_variable)
    content["http_options"] = checked(_Http, content.get("http_options") or {}, "http_options").model_dump()
    check_http(content["http_options"]["host"], any(name.startswith("ssl_") for name in content["http_options"]), ())
    if content.get("target_capacity") is not None:
        raise UserError("target_capacity does not reach replicas of plans: devices: and rate_per_s: say how many")
    return content


def _built_in(name: Path, overrides: dict[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    if name == Path(LLM_DEMO_NAME):
        return built_in(name), {"name": LLM_DEMO_NAME} | overrides
    return None if name == Path(DEMO_NAME) else name, overrides


def _content(target: Path | None, planned: bool) -> tuple[ServeFile, Path]:
    """What a file says, or an application for a directory or the demo; and where relative paths begin.

    `planned`: a plan is given beside. Where a network that classifies has one, a controller keeps it right.
    """
    if target is not None and not target.exists():
        raise UserError(f"{target}: no such directory or file; give a model's directory or a Serve file (*.yaml)")
    if target is not None and not target.is_dir():
        return _read(target), target.resolve().parent
    model = {"model": str(target.resolve())} if target else {}
    if target and is_decoder(target):
        return {"applications": [{"name": NAME, "import_path": DECODER, "args": model}]}, Path()
    served = {"name": NAME, "import_path": APPLICATION, "args": model}
    if not planned:
        return {"applications": [served]}, Path()
    served |= {"route_prefix": "/", "args": model | {"replan": True}}
    steers = {"name": "controller", "import_path": CONTROLLER, "route_prefix": "/controller"}
    return {"applications": [served, steers | {"args": {"application": NAME}}]}, Path()


def named(application: dict[str, Any]) -> str:
    """The name of an application, as Serve understands its entry."""
    return str(application.get("name", "default"))


def prefix_of(application: dict[str, Any]) -> str:
    """What stands before its paths.

    >>> prefix_of({"name": "a"}), prefix_of({"route_prefix": "/reviews"})
    ('', '/reviews')
    """
    return str(application.get("route_prefix") or "/").rstrip("/")


def _check_apart(content: ServeFile) -> None:
    """Refuse what two applications would both take, and a controller of one that is not there."""
    applications = content["applications"]
    _no_two("name", [named(one) for one in applications])
    _no_two("route_prefix", [one.get("route_prefix", "/") for one in applications])
    _no_two("grpc_port", _grpc_ports(content))
    decoding = [named(one) for one in decoders(content)]
    names = [*(named(one) for one in ours(content)), *decoding]
    for controller in controllers(content):
        config = checked(ControllerConfig, controller.get("args") or {})
        told = config.application
        if told not in names:
            there = ", ".join(names) or "none"
            raise UserError(f"args: application = {told!r}: {named(controller)} would control none of these: {there}")
        if told in decoding and (idle := sorted(config.model_fields_set & OF_CLASSIFIERS)):
            raise UserError(f"args: {idle[0]}: {told} is a decoder, whose controller has no use for it: leave it out")


def _grpc_ports(content: ServeFile) -> list[int]:
    return [port for _, port in grpc_addresses(content)]


def _no_two(field: str, told: list[Any]) -> None:
    for one in told:
        if one is not None and told.count(one) > 1:
            raise UserError(f"{field} = {one!r}: two applications cannot have the same")


def ours(content: ServeFile) -> list[dict[str, Any]]:
    """The applications that isobatch builds; a Serve file may hold others."""
    return [application for application in content["applications"] if application.get("import_path") == APPLICATION]


def decoders(content: ServeFile) -> list[dict[str, Any]]:
    """The applications that decode."""
    return [application for application in content["applications"] if application.get("import_path") == DECODER]


def controllers(content: ServeFile) -> list[dict[str, Any]]:
    """The applications that are controllers."""
    return [application for application in content["applications"] if application.get("import_path") == CONTROLLER]


def key_variable(content: ServeFile) -> str | None:
    """The environment variable that holds the first application's key, if it asks for one."""
    return next((one["args"].get("api_key_variable") for one in ours(content) + decoders(content)), None)


def with_demo(content: ServeFile) -> ServeFile:
    """The same content, with the built-in demo where no model is named."""
    complete = content | {"applications": [dict(application) for application in content["applications"]]}
    for application in ours(complete):
        if "model" not in application["args"]:
            application["args"] = {"name": DEMO_NAME} | application["args"] | {"model": str(function_at(DEMO)())}
    return complete


def with_grpc(content: ServeFile, host: str | None, port: int | None, is_free: Callable[[str, int], bool]) -> ServeFile:
    """The same content, whose first isobatch application serves gRPC at the given port, or at the usual one if free.

    Others do where the file says so.

    A port that the user names is never replaced: `check_port` raises later if it is taken. `port` 0 means no gRPC.
    """
    complete = content | {"applications": [dict(application) for application in content["applications"]]}
    for application in [*ours(complete), *decoders(complete)][:1]:
        arguments = application["args"] | ({"grpc_host": host} if host else {})
        if port is None and "grpc_port" not in arguments:
            taken = GRPC_PORT in _grpc_ports(complete) or not is_free(_grpc_host(arguments), GRPC_PORT)
            port = 0 if taken else GRPC_PORT
        told = {"grpc_port": port or None} if port is not None else {}
        application["args"] = {name: value for name, value in (arguments | told).items() if value is not None}
    _no_two("grpc_port", _grpc_ports(complete))
    return complete


def beside(content: ServeFile, running: list[dict[str, Any]], others: str | None) -> ServeFile:
    """The same content with all that runs already and is to be kept: Serve ends what a file does not name.

    `running` are the applications that Serve was told by files, `others` what becomes of those that are not in this
    one: "keep" or "end".
    """
    names = [named(one) for one in content["applications"]]
    more = [{"args": {}} | one for one in running if named(one) not in names]
    if more and others is None:
        told = ", ".join(map(named, more))
        raise UserError(f"{told}: running there and not in the file: --others keep leaves them, --others end ends them")
    complete = content | {"applications": [*(more if others == "keep" else ()), *content["applications"]]}
    _check_apart(complete)
    return complete


def grpc_addresses(content: ServeFile) -> list[tuple[str, int]]:
    """Host and port of each isobatch application that serves gRPC."""
    told = [application["args"] for application in (*ours(content), *decoders(content))]
    return [(_grpc_host(each), each["grpc_port"]) for each in told if each.get("grpc_port")]


def _grpc_host(arguments: dict[str, Any]) -> str:
    return str(arguments.get("grpc_host", LOCALHOST))


def _read(path: Path) -> ServeFile:
    import yaml

    text = read_text(path)
    if len(text) > LONGEST:
        raise UserError(f"{path} has {len(text):,} characters: a Serve file has {LONGEST:,} at most")
    try:
        content = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    applications = content.get("applications") if isinstance(content, dict) else None
    if not (isinstance(applications, list) and applications and all(isinstance(one, dict) for one in applications)):
        raise UserError(f"{path} is not a Serve file: it needs a list 'applications:', as cluster/serve.yaml has")
    for place, settings in [("http_options", content), *(("args", one) for one in applications)]:
        found = settings.get(place) or {}
        if not (isinstance(found, dict) and all(isinstance(name, str) for name in found)):
            raise UserError(f"{path}: '{place}:' must be fields with values, got {type(found).__name__}")
    for known, settings in [(OF_FILES | {NODES}, content), *((OF_APPLICATIONS, one) for one in applications)]:
        _check_fields(path, known, settings)
    return content  # type: ignore[no-any-return]


def _check_fields(path: Path, known: Collection[str], settings: dict[Any, Any]) -> None:
    """A misspelt `route_prefix` would put an application where another one is meant to be."""
    for name in settings:
        if name not in known:
            meant = get_close_matches(str(name), known, n=1)
            what = f"is {meant[0]!r} meant?" if meant else f"there are: {', '.join(sorted(known))}"
            raise UserError(f"{path}: there is no field {name!r}; {what}")


def _check_deployments(told: Any) -> None:
    if not (isinstance(told, list) and all(isinstance(each, dict) for each in told)):
        raise UserError("deployments: must be a list, as in [{name: front, ray_actor_options: {num_cpus: 0.5}}]")
    if any(each.get("name") not in REACHED for each in told):
        raise UserError(f"deployments: reaches {' and '.join(REACHED)} only: args: says what replicas are")


def _check_import_path(path: Any) -> None:
    """Refuse a misspelt path of ours at once: Serve would tell it after many seconds, and otherwise."""
    if path in (known := (APPLICATION, CONTROLLER, DECODER)) or not isinstance(path, str):
        return
    if meant := get_close_matches(path, known, n=1, cutoff=0.8):
        raise UserError(f"import_path = {path!r}: there is no such application; is {meant[0]!r} meant?")


def _checked(arguments: dict[str, Any], root: Path) -> dict[str, Any]:
    """Check an application's fields and its directory before anything starts, and make its paths absolute."""
    given = {name: value for name, value in arguments.items() if value is not None}
    given |= {name: _absolute(root, name, given[name]) for name in PATHS if isinstance(given.get(name), str)}
    config = parse(given)
    given |= _as_read(config, given)
    if config.model and not Path(config.model).is_dir():
        raise UserError(f"args: model = {config.model!r}: no such directory")
    if config.model and config.loader == LOADER:
        check_one_label(Path(config.model), told_in(Path(config.model)).get("problem_type"))
    check_weights(config)
    key_in(config.api_key_variable)
    if config.plan or isinstance(config.devices, dict):  # "auto" is known only once Ray runs
        read_graph(config)  # raises if the plan or its profile is wrong, or if there is no plan
    return given


def _checked_decoder(arguments: dict[str, Any], root: Path) -> dict[str, Any]:
    """The same for a decoder."""
    given = {name: value for name, value in arguments.items() if value is not None}
    given |= {name: _absolute(root, name, given[name]) for name in PATHS if isinstance(given.get(name), str)}
    config = checked(DecoderConfig, given)
    given |= _as_read(config, given)
    if not Path(config.model).is_dir():
        raise UserError(f"args: model = {config.model!r}: no such directory")
    for planned in config.per_kind().values():
        check_decoder(Path(config.model), planned.cuts, planned.exits == PROJECT)
    if config.profile:
        load_decoder_profile(Path(config.profile))
    _check_plans_weights(config)
    key_in(config.api_key_variable)
    return given


def _as_read(config: AppConfig | DecoderConfig, given: dict[str, Any]) -> dict[str, Any]:
    """The fields that are used here, as numbers where a file has them as texts."""
    return {name: getattr(config, name) for name in ("grpc_port", "grpc_host") if name in given}


def _check_plans_weights(config: DecoderConfig) -> None:
    made_for = read_plan(Path(config.plan)).weights if config.plan else ""
    if made_for and differ(made_for, weights_of(Path(config.model))):
        raise UserError(f"{config.plan}: this plan was made for other weights than those in {config.model}")


def _absolute(root: Path, name: str, told: str) -> str:
    try:
        return str((root / told).resolve())
    except ValueError as error:  # a null byte
        raise UserError(f"args: {name} = {told!r} is no path: {error}") from error
