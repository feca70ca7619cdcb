"""Names that users give, and their forms: built-in networks, backends, functions, devices, ports, hosts."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from isobatch.profiles.errors import UserError

# Backends by short name (docs/backends.md). They are import paths, because a backend's library is imported only when
# the backend is used. `auto` tries them in turn.
BACKENDS = {
    "torch": "isobatch.deployments.models.interface:TORCH",
    "graphs": "isobatch.deployments.models.cuda_graphs:TORCH_GRAPHS",
    "onnx": "isobatch.deployments.models.onnx_model:ONNX",
    "onnx-graphs": "isobatch.deployments.models.onnx_model:ONNX_GRAPHS",
}
AUTO = "auto"
VIRTUAL = "virtual"
Dtype = Literal["float32", "float16", "bfloat16", "int8"]
INT8: Dtype = "int8"  # the precision in which the weights of the blocks are 8-bit integers
DEMO = "isobatch.deployments.demo:demo_directory"
# The names of built-in networks, accepted in place of a directory or a hub id.
DEMO_NAME = "demo"
LLM_DEMO_NAME = "llm-demo"
_BUILT_IN = {DEMO_NAME: DEMO, LLM_DEMO_NAME: "isobatch.deployments.demo:llm_demo_directory"}
LOADER = "isobatch.deployments.models:load_served"


def function_at(path: str) -> Callable[..., Any]:
    """The function that an import path `module:function` names.

    >>> function_at("math:sqrt")(9.0)
    3.0
    """
    try:
        function = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise UserError(f"{path!r} must name a function as 'module:function'")
    return function  # type: ignore[no-any-return]


def demo_folder() -> Path:
    """The directory of the built-in network that is served if nothing else is named."""
    return Path(str(function_at(DEMO)()))


def built_in(name: str | Path) -> Path | None:
    """The directory of a built-in network, by its name; None if there is none, or if a directory has that name."""
    path = _BUILT_IN.get(str(name))
    return function_at(path)() if path and not Path(name).is_dir() else None


def well_formed(path: str) -> str:
    module, colon, name = path.partition(":")
    if not (module and colon and name.isidentifier()):
        raise ValueError(f"{path!r} must look like 'package.module:function'")
    return path


def path_of(name: str, paths: Mapping[str, str], what: str, others: str, own: str = "function") -> str:
    """The import path of something that a user names, by its short name or by the path itself.

    The error says `what` the name is for, which `others` have no path, and the type of the user's `own`.
    """
    if name not in paths and ":" not in name:
        known = ", ".join((others, *paths))
        raise UserError(f"{what} {name!r} is not known; known are: {known}, or your own as package.module:{own}")
    return well_formed(paths.get(name, name))


def backend_path(name: str) -> str:
    """
    >>> backend_path("torch"), backend_path("my_package.my_module:BACKEND")
    ('isobatch.deployments.models.interface:TORCH', 'my_package.my_module:BACKEND')
    """
    return path_of(name, BACKENDS, "backend", AUTO, "object")


def known_device(name: str) -> str:
    """Return the name if it is `auto` or a device's."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UserError(f"device {name!r} is not known; use auto, cpu, cuda or cuda:0")
    return name


def known_backend(name: str) -> str:
    """Return the name if it is `auto` or a backend's. Commands check it before they load anything."""
    if name != AUTO:
        backend_path(name)
    return name


# The forms of values in Serve files


def _shaped(pattern: str, rule: str) -> AfterValidator:
    """Refuses a text that does not have the pattern; `rule` says what it must be."""

    def checked_text(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} must {rule}")
        return text

    return AfterValidator(checked_text)


def _device_counts(devices: dict[str, int] | str) -> dict[str, int] | str:
    counts = devices.values() if isinstance(devices, dict) else ()
    if devices != "auto" and (not counts or min(counts) < 1):
        raise ValueError("devices must be auto, or counts of at least one, as in {a100: 2, l4: 2}")
    return devices


def _port_range(text: str) -> str:
    """
    >>> ports_in(_port_range("24000-24002"))
    range(24000, 24003)
    """
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65535):
        raise ValueError(f"{text!r} must be FIRST-LAST, from 1024 to 65535, as in 24000-24099")
    return text


def ports_in(port_range: str) -> range:
    first, _, last = port_range.partition("-")
    return range(int(first), int(last) + 1)


LinkName = Annotated[str, _shaped(r"[^>/\s]+>[^>/\s]+", "name two kinds of whole devices: KIND>KIND, as in a100>t4")]
WholeKind = Annotated[str, _shaped(r"[^/]+", "be a kind of whole devices: each application has a replica on all of it")]
NodeKind = Annotated[str, _shaped(r"(?!CPU|GPU)[^/]+", "be a kind of whole devices, as in t4, and none of Ray's names")]
WebOrigin = Annotated[
    str,
    _shaped(r"https?://[\w.-]+(:\d{1,5})?", "be as browsers send it: https://NAME or http://NAME:PORT, without a path"),
    AfterValidator(str.lower),
]
HostName = Annotated[
    str, _shaped(r"[\w-]+(\.[\w-]+)*", "be a name, as in api.example, without a port"), AfterValidator(str.lower)
]
RoutePrefix = Annotated[
    str,
    _shaped(r"/|(/[A-Za-z0-9._~%-]+)+", "begin with / and not end with it; letters, digits and . _ ~ % - are possible"),
]
Ports = Annotated[str, AfterValidator(_port_range)]
ImportPath = Annotated[str, AfterValidator(well_formed)]
LogFormat = Literal["text", "json"]
DeviceName = Annotated[str, _shaped(r"cpu|cuda(:0)?", "be 'cpu' or 'cuda': Ray gives a replica its GPU")]
DeclaredDevices = Annotated[dict[str, int] | str, AfterValidator(_device_counts)]


class CanaryTerms(BaseModel):
    """Another application of the same Serve file, whose network may take the place of the present one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    application: str = Field(pattern=r"^[\w.-]+$", description="The name of the application with the new network.")
    share: float = Field(0.1, gt=0, le=1, description="The share of requests that both networks compute.")
    shadow: bool = Field(
        False, description="Whether clients get the present network's answers; otherwise they get the new one's."
    )
    agreement: float = Field(
        0.95,
        gt=0,
        lt=1,
        description="The share of inputs that the new network must answer in time with the same labels; each request "
        "counts once.",
    )
