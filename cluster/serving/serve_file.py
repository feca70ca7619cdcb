"""Ray Serve's standard file, which lists the applications: reads it from YAML, or makes one for a model's directory."""

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from isobatch.cluster.controller.config import OF_CLASSIFIERS, ArbiterConfig, ControllerConfig, MemberTerms
from isobatch.deployments.cluster_checks import PATHS, check_http
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.ramp_rules import check_decoder, is_decoder
from isobatch.deployments.deployer.steps import DEPLOYER, FRONT, NETWORK
from isobatch.deployments.folders import PLAN, PROFILE, checkpoint_json, weights_of
from isobatch.deployments.front.headers import key_in
from isobatch.deployments.graph import check_weights, read_graph
from isobatch.deployments.named import DEMO_NAME, LLM_DEMO_NAME, LOADER, RoutePrefix, built_in, demo_folder
from isobatch.deployments.ray_facts import front_of
from isobatch.deployments.sources import as_url, is_url, local, pinned, remote_of
from isobatch.deployments.tasks import check_problem
from isobatch.optimizer.plan import read_plan
from isobatch.profiles.errors import UserError, read_yaml
from isobatch.profiles.files import differ
from isobatch.profiles.text_profile import PROJECT, load_text_profile

ROOT = Path(__file__).resolve().parents[2]
APPLICATION = "isobatch.deployments.app:build"
CONTROLLER = "isobatch.cluster.controller.app:build"
ARBITER = "isobatch.cluster.controller.app:arbiter"
DECODER = "isobatch.deployments.decoding.app:build"
REACHED = (FRONT, NETWORK, DEPLOYER)  # the deployments that Serve starts; the deployer itself starts those of replicas
NAME = "isobatch"  # the name of an application that is made for a directory
LOCALHOST, PORT = "127.0.0.1", 8000  # where HTTP is served by default
GRPC_PORT = 8001  # the default, if it is free
# With one of these fields, the plan in a model's directory is not taken.
NOT_IN_OWN_PLANS = {"plan", "device", "max_batch", "replicas"}

# The fields that Serve reads. Serve ignores unknown fields; isobatch refuses them.
OF_FILES = {
    "applications", "controller_options", "grpc_options", "http_options", "logging_config", "proxy_location",
    "target_capacity", "tracing_config",
}  # fmt: skip
NODES = "nodes"  # a field that only `isobatch serve` reads
OF_HTTP = {
    "host", "keep_alive_timeout_s", "location", "middlewares", "num_cpus", "port", "request_timeout_s", "root_path",
    "root_url", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password",
}  # fmt: skip
OF_APPLICATIONS = {
    "args", "autoscaling_policy", "deployments", "external_scaler_enabled", "host", "import_path", "logging_config",
    "name", "port", "route_prefix", "runtime_env",
}  # fmt: skip

ServeFile = dict[str, Any]


class _Http(BaseModel):
    """The fields of `http_options:` that isobatch reads. Serve checks the others."""

    model_config = ConfigDict(extra="allow")

    host: str = Field(LOCALHOST, min_length=1)
    port: int = Field(PORT, ge=1, le=65535)


class _Application(BaseModel):
    """The fields of an application that Serve or HAProxy would refuse only once Ray has started."""

    model_config = ConfigDict(extra="allow")

    name: str = Field("default", min_length=1)
    route_prefix: RoutePrefix | None = None


def serve_file(target: str | Path | None, overrides: dict[str, Any], name: str | None = None) -> ServeFile:
    """The Serve file for a model's place, a YAML file, or the built-in demo (None). `overrides` are added to `args:` of
    the application with this name (None: of all).

    Relative paths in a YAML file are relative to its folder. `demo` is the built-in network and `llm-demo` the built-in
    decoder, unless a directory has that name.
    """
    content, root, overrides = _content(target, overrides)
    for application in content["applications"]:
        checked(_Application, application, "applications")
        _check_import_path(application)
    for application in classifiers(content):
        _check_deployments(application.get("deployments") or [])
    of_one = next((each for each in ("plan", "profile") if each in overrides), None)
    if of_one and not name and len(served(content)) > 1:
        several = f"{target} has {len(served(content))} applications, and --{of_one} is for one"
        raise UserError(f"{several}: write it into the file (isobatch simulate: or name one with --application)")
    for application in served(content):
        added = overrides if name in (None, name_of(application)) else {}
        if added and application in decoders(content):
            _check_for_decoders(name_of(application), added)
        application["args"] = (application.get("args") or {}) | added
        application["args"] = _checked(application, root)
    check_apart(content)
    key = key_of(overrides)
    for application in (*controllers(content), *arbiters(content)):
        application["args"] = (application.get("args") or {}) | key
    for application in controllers(content):
        key_in(checked(ControllerConfig, application["args"]).api_key_variable)
    for application in arbiters(content):
        key_in(_checked_arbiter(application, content).api_key_variable)
    content["http_options"] = _http(content).model_dump()
    check_http(content["http_options"]["host"], any(name.startswith("ssl_") for name in content["http_options"]), ())
    if content.get("target_capacity") is not None:
        raise UserError("target_capacity has no effect on the replicas of plans: use devices: and rate_per_s: instead")
    return content


def _check_for_decoders(name: str, overrides: Mapping[str, Any]) -> None:
    """Raise UserError for an option of a command that a decoder does not have."""
    if other := next((each for each in overrides if each not in DecoderConfig.model_fields), None):
        option = f"--{other.replace('_', '-')}"
        own = "its own limits, as max_residents and ttft_ms, are args: of a Serve file"
        raise UserError(f"{option} is for classifiers, and the application {name} is a decoder: {own}")


def _content(target: str | Path | None, overrides: dict[str, Any]) -> tuple[ServeFile, Path, dict[str, Any]]:
    """The content of a file, or an application for a model; the folder for relative paths; and what `args:` gets."""
    if target and str(target) in (DEMO_NAME, LLM_DEMO_NAME) and not Path(target).exists():
        is_decoder_demo = str(target) == LLM_DEMO_NAME
        overrides = ({"name": LLM_DEMO_NAME} if is_decoder_demo else {}) | overrides
        target = built_in(target) if is_decoder_demo else None
    if target is None and not overrides:
        target = ROOT / "cluster" / "demo.yaml"
    model = _model(target, overrides) if target else None
    if target and not model:
        return _read(Path(target)), Path(target).resolve().parent, overrides
    if model and overrides.keys().isdisjoint(NOT_IN_OWN_PLANS):
        overrides = _own_plan(model) | overrides
    return _made_for(model, planned="plan" in overrides), Path(), overrides


def _model(target: str | Path, files: dict[str, Any]) -> str | None:
    """A model's directory, or its pinned URL; None: the target is a file. `files`: its plan and profile, if given."""
    path = Path(target)
    if path.is_dir():
        return str(path.resolve())
    if path.exists():
        return None
    is_yaml = path.suffix in (".yaml", ".yml")
    is_id = "/" in str(target) and not is_yaml and is_url(as_url(str(target)))
    if not is_url(str(target)) and not is_id:
        if is_yaml:
            raise UserError(f"{target}: no such file; 'isobatch serve MODEL --out {target}' writes one")
        raise UserError(f"{target}: no such directory or file; give a model's directory or a Serve file (*.yaml)")
    return _pinned(str(target), Path(), files)


def _pinned(model: str, root: Path, files: dict[str, Any]) -> str:
    """A model's absolute path, or its URL with a revision: that of its plan or profile, or the present one.

    A relative path is relative to `root`, and a hub id without a slash needs hf:// before it.
    """
    here = root / model
    if not is_url(model) and ("/" not in model or here.exists() or not is_url(as_url(model))):
        return str(here.resolve())
    remote = remote_of(as_url(model))
    for name in ("plan", "profile"):
        if remote and not remote.revision and isinstance(file := files.get(name), str):
            made_for = checkpoint_json(root, file).get("model") if not is_url(file) else None
            known = remote_of(made_for) if isinstance(made_for, str) and is_url(made_for) else None
            if known and known.url == remote.url:
                return str(known)
    return pinned(model)


def _own_plan(model: str) -> dict[str, str]:
    """The plan and the profile that `isobatch tune` and `isobatch up` put into a model's directory."""
    folder = local(model)
    there = all((folder / name).is_file() for name in (PLAN, PROFILE)) and not is_decoder(folder)
    return {"plan": f"{model}/{PLAN}", "profile": f"{model}/{PROFILE}"} if there else {}


def _made_for(model: str | None, planned: bool) -> ServeFile:
    """An application for a model or the demo. `planned`: it has a plan, so a classifier gets a controller, too."""
    arguments = {"model": model} if model else {}
    decodes = bool(model) and is_decoder(local(model or ""))
    if planned and not decodes:
        return {"applications": with_controller(NAME, "controller", "", arguments)}
    path = DECODER if decodes else APPLICATION
    return {"applications": [{"name": NAME, "import_path": path, "args": arguments}]}


def with_controller(name: str, controller: str, prefix: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """An application with a plan, which answers below a prefix, and its controller, which needs the same key."""
    served = {"name": name, "import_path": APPLICATION, "route_prefix": prefix or "/"}
    control = {"name": controller, "import_path": CONTROLLER, "route_prefix": f"{prefix}/controller"}
    settings = {"application": name} | key_of(arguments)
    return [served | {"args": arguments | {"replan": True}}, control | {"args": settings}]


def key_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The field that names the variable with the key, if there is one."""
    return {name: value for name, value in arguments.items() if name == "api_key_variable"}


def name_of(application: dict[str, Any]) -> str:
    """The name of an application, with Serve's default."""
    return str(application.get("name", "default"))


def prefix_of(application: dict[str, Any]) -> str:
    """The prefix of an application's paths, without a slash at its end."""
    return str(application.get("route_prefix") or "/").rstrip("/")


def check_apart(content: ServeFile) -> None:
    """Refuse names, paths and ports that two applications share, and a controller of an application that is missing."""
    applications = content["applications"]
    _no_two("name", every := [name_of(application) for application in applications])
    _no_two("route_prefix", [application.get("route_prefix", "/") for application in applications])
    _no_two("grpc_port", [port for _, port in grpc_addresses(content)])
    names, decoding = ([name_of(each) for each in listed(content)] for listed in (served, decoders))
    if taken := next((each for each in every if front_of(each) != each and front_of(each) in names), None):
        raise UserError(f"name = {taken!r}: replicas of {front_of(taken)} have such names: choose another name")
    fields = {name_of(each): each.get("args") or {} for each in classifiers(content)}
    for name, canary in [(name, own["canary"]["application"]) for name, own in fields.items() if own.get("canary")]:
        named = f"{name}: canary: application = {canary!r}"
        if canary not in (others := fields.keys() - {name}):
            raise UserError(f"{named}: the file's other classifiers are {', '.join(sorted(others)) or 'none'}")
        if len({fields[each].get("predict_form", "isobatch") for each in (name, canary)}) > 1:
            raise UserError(f"{named}: clients could not read its answers: give both the same predict_form")
    leads = [(each, checked(ControllerConfig, each.get("args") or {})) for each in controllers(content)]
    led = [config.application for _, config in leads]
    _no_two("args: application", led, "two controllers cannot lead one application")
    for controller, config in leads:
        if config.application not in names:
            wrong = f"{name_of(controller)} would control none of these: {', '.join(names) or 'none'}"
            raise UserError(f"args: application = {config.application!r}: {wrong}")
        if config.application in decoding and (unused := sorted(config.model_fields_set & OF_CLASSIFIERS)):
            raise UserError(f"args: {unused[0]}: {config.application} is a decoder, whose controller has no use for it")


def _no_two(field: str, values: list[Any], why: str = "two applications cannot have the same") -> None:
    for value in values:
        if value is not None and values.count(value) > 1:
            raise UserError(f"{field} = {value!r}: {why}")


def _at(import_path: str, content: ServeFile) -> list[dict[str, Any]]:
    """The applications with this import path. A Serve file may also contain applications of other programs."""
    return [application for application in content["applications"] if application.get("import_path") == import_path]


classifiers, decoders = partial(_at, APPLICATION), partial(_at, DECODER)
controllers, arbiters = partial(_at, CONTROLLER), partial(_at, ARBITER)


def served(content: ServeFile) -> list[dict[str, Any]]:
    """The applications of isobatch that answer clients."""
    return classifiers(content) + decoders(content)


def config_of(application: dict[str, Any]) -> AppConfig | DecoderConfig:
    """The checked `args:` of an application that answers clients."""
    if application["import_path"] == APPLICATION:
        return checked(AppConfig, application["args"])
    return checked(DecoderConfig, application["args"])


def _checked_arbiter(arbiter: dict[str, Any], content: ServeFile) -> ArbiterConfig:
    config = checked(ArbiterConfig, arbiter.get("args") or {})
    led = {name_of(each): each["args"] for each in classifiers(content)}
    settings = {name_of(each): each.get("args") or {} for each in controllers(content)}
    for each in config.applications:
        if wrong := _misfit(each, config.devices, led, settings.get(each.controller, {})):
            raise UserError(f"{name_of(arbiter)}: args: applications: {wrong}")
    return config


def _misfit(
    terms: MemberTerms, fleet: Mapping[str, int], led: Mapping[str, dict[str, Any]], controller: dict[str, Any]
) -> str:
    """Why the arbiter cannot lead this application; empty: it can."""
    name, shared = terms.name, controller.get("shared") or {}
    if name not in led:
        return f"there is no application {name} that classifies, only {', '.join(led) or 'none'}"
    if not shared or controller.get("application", NAME) != name:
        return f"{terms.controller} is no controller of {name} with shared: {dict(fleet)}"
    if other := next((kind for kind, count in shared.items() if count != fleet.get(kind, 0)), None):
        counts = f"{shared[other]} {other}, and the fleet has {fleet.get(other, 0)}"
        return f"{terms.controller} shares {counts}: give both the same"
    uses = read_plan(local(led[name]["plan"])).devices() if "plan" in led[name] else {}
    if beyond := next((kind for kind, count in uses.items() if count > terms.devices.get(kind, 0)), None):
        own = terms.devices.get(beyond, 0)
        return f"the plan of {name} uses {uses[beyond]} {beyond}, of which {own} are its own: plan the fleet anew"
    return ""


def only(name: str, content: ServeFile) -> ServeFile:
    """The same content with one application of isobatch and its controller."""
    names = [name_of(each) for each in served(content)]
    if name not in names:
        raise UserError(f"--application {name}: the file has {', '.join(names)}")
    others = [each for each in controllers(content) if each["args"].get("application", NAME) == name]
    return content | {"applications": [each for each in served(content) if name_of(each) == name] + others}


def with_demo(content: ServeFile) -> ServeFile:
    """The same content, with the built-in demo in applications that name neither a model nor a loader of their own."""
    complete = deepcopy(content)
    for application in classifiers(complete):
        if application["args"].keys().isdisjoint(("model", "loader")):
            application["args"] = {"name": DEMO_NAME} | application["args"] | {"model": str(demo_folder())}
    return complete


def with_grpc(content: ServeFile, host: str | None, port: int | None, is_free: Callable[[str, int], bool]) -> ServeFile:
    """The same content, with gRPC for the first isobatch application at `port` (None: the default, if free; 0: none,
    also of others).

    Other applications serve gRPC if the file gives them a port. All listen on `host`, if it is given. A port that the
    user names is never replaced: if it is taken, `check_port` raises later.
    """
    complete = deepcopy(content)
    for application in served(complete):
        if host:
            application["args"]["grpc_host"] = host
        if port == 0:
            application["args"].pop("grpc_port", None)
    for application in served(complete)[:1]:
        arguments = application["args"]
        if port is None and "grpc_port" not in arguments:
            others = [_http(complete).port, *(port for _, port in grpc_addresses(complete))]
            is_ours = GRPC_PORT not in others and is_free(arguments.get("grpc_host", LOCALHOST), GRPC_PORT)
            port = GRPC_PORT if is_ours else 0
        chosen = {"grpc_port": port or None} if port is not None else {}
        application["args"] = {name: value for name, value in (arguments | chosen).items() if value is not None}
    check_ports(complete)
    return complete


def check_ports(content: ServeFile) -> None:
    """Refuse a port for gRPC that HTTP or another application has."""
    _no_two("grpc_port", ports := [port for _, port in grpc_addresses(content)])
    if (port := _http(content).port) in ports:
        raise UserError(f"port = {port}: HTTP and gRPC cannot have the same: name another for one of them")


def _http(content: ServeFile) -> _Http:
    return checked(_Http, content.get("http_options") or {}, "http_options")


def grpc_addresses(content: ServeFile) -> list[tuple[str, int]]:
    """Host and port of each isobatch application that serves gRPC."""
    arguments = [application["args"] for application in served(content)]
    return [(str(each.get("grpc_host", LOCALHOST)), each["grpc_port"]) for each in arguments if each.get("grpc_port")]


def plan_files(content: ServeFile) -> list[Path]:
    """The plans and profiles that the applications of a Serve file read."""
    arguments = [application["args"] for application in served(content)]
    return [Path(each[name]) for each in arguments for name in ("plan", "profile") if each.get(name)]


def _read(path: Path) -> ServeFile:
    content = read_yaml(path)
    applications = content.get("applications") if isinstance(content, dict) else None
    if not (isinstance(applications, list) and applications and all(isinstance(entry, dict) for entry in applications)):
        raise UserError(f"{path} is not a Serve file: it needs a list 'applications:', as cluster/serve.yaml has")
    if "devices" in content:
        raise UserError(f"{path} is the file of a fleet: 'isobatch plan {path} --out serve.yaml' makes a Serve file")
    for known, place, settings in [
        (OF_FILES | {NODES}, "http_options", content), *((OF_APPLICATIONS, "args", each) for each in applications),
    ]:  # fmt: skip
        fields = settings.get(place) or {}
        if not (isinstance(fields, dict) and all(isinstance(name, str) for name in fields)):
            raise UserError(f"{path}: '{place}:' must be fields with values, got {type(fields).__name__}")
        _check_fields(path, known, settings)
    _check_fields(f"{path}: http_options", OF_HTTP, content.get("http_options") or {})
    return content  # type: ignore[no-any-return]


def _check_fields(place: Path | str, known: Collection[str], settings: dict[Any, Any]) -> None:
    """Refuse unknown fields. With a misspelt `route_prefix`, an application would take another one's paths."""
    for name in settings:
        if name not in known:
            similar = get_close_matches(str(name), known, n=1)
            hint = f"is {similar[0]!r} meant?" if similar else f"there are: {', '.join(sorted(known))}"
            raise UserError(f"{place}: there is no field {name!r}; {hint}")


def _check_deployments(deployments: Any) -> None:
    if not (isinstance(deployments, list) and all(isinstance(entry, dict) for entry in deployments)):
        raise UserError("deployments: must be a list, as in [{name: front, ray_actor_options: {num_cpus: 0.5}}]")
    if any(entry.get("name") not in REACHED for entry in deployments):
        raise UserError(f"deployments: reaches {', '.join(REACHED)} only: set the options of replicas in args:")


def _check_import_path(application: dict[str, Any]) -> None:
    """Refuse a misspelt path of isobatch, which Serve would report much later."""
    known, path = (APPLICATION, CONTROLLER, DECODER, ARBITER), application.get("import_path")
    if not isinstance(path, str) or not path:
        raise UserError(f"import_path = {path!r}: every application needs one, as in {APPLICATION}")
    if path not in known and (similar := get_close_matches(path, known, n=1, cutoff=0.8)):
        raise UserError(f"import_path = {path!r}: there is no such application; is {similar[0]!r} meant?")


def _checked(application: dict[str, Any], root: Path) -> dict[str, Any]:
    """Check an application's fields and its directory before anything starts, and make its paths absolute."""
    fields = _with_absolute_paths(application["args"], root)
    config = config_of(application | {"args": fields})
    # A YAML file may contain numbers as texts.
    fields |= {name: getattr(config, name) for name in ("grpc_port", "grpc_host") if name in fields}
    if config.model and not config.folder.is_dir():
        raise UserError(f"args: model = {config.model!r}: no such directory")
    _check_decoder(config) if isinstance(config, DecoderConfig) else _check_classifier(config)
    key_in(config.api_key_variable)
    return fields


def _check_classifier(config: AppConfig) -> None:
    if config.model and config.loader == LOADER:
        content = checkpoint_json(config.folder)
        outputs = len(content.get("id2label") or ()) or content.get("num_labels") or 2
        check_problem(config.folder, content.get("problem_type"), outputs)
    check_weights(config)
    if config.plan or isinstance(config.devices, dict):  # "auto" is known only once Ray runs
        read_graph(config)  # raises if the plan or its profile is wrong, or if no plan is possible


def _check_decoder(config: DecoderConfig) -> None:
    for planned in config.per_kind().values():
        check_decoder(config.folder, planned.cuts, planned.exits == PROJECT)
    for path, read in ((config.profile, load_text_profile), (config.plan, read_plan)):
        if path and differ(read(local(path)).weights, weights_of(config.folder)):
            raise UserError(f"{path} was made for other weights than those in {config.model}: profile and plan these")


def _with_absolute_paths(arguments: dict[str, Any], root: Path) -> dict[str, Any]:
    fields = {name: value for name, value in arguments.items() if value is not None}
    model = fields.get("model")
    for name in PATHS:
        if isinstance(path := fields.get(name), str):
            try:
                given = _pinned(path, root, arguments) if name == "model" else path
                fields[name] = given if is_url(given) else str((root / given).resolve())
            except ValueError as error:  # a null byte
                raise UserError(f"args: {name} = {path!r} is not a path: {error}") from error
    if isinstance(model, str) and (demo := built_in(model)) and not (root / model).is_dir():
        return {"name": model} | fields | {"model": str(demo)}
    return fields
