"""Resolves names that users give: built-in networks, backends, and functions by their import paths."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

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
DEMO = "isobatch.deployments.demo:demo_directory"
# The names of built-in networks, accepted in place of a directory or a hub id.
DEMO_NAME = "demo"
LLM_DEMO_NAME = "llm-demo"
_BUILT_IN = {DEMO_NAME: DEMO, LLM_DEMO_NAME: "isobatch.deployments.demo:llm_demo_directory"}
LOADER = "isobatch.deployments.models:load_served"
# How import paths began before 0.1.0, when each folder was a package: files that were written then have them.
_BEFORE = re.compile(r"(deployments\.(app|decoding\.app|exits|models)|cluster\.controller\.app)[.:]")


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


def current_path(path: str) -> str:
    """An import path as it is now, if it names something of isobatch as before 0.1.0."""
    return f"isobatch.{path}" if _BEFORE.match(path) else path


def well_formed(path: str) -> str:
    module, colon, name = path.partition(":")
    if not (module and colon and name.isidentifier()):
        raise ValueError(f"{path!r} must look like 'package.module:function'")
    return current_path(path)


def path_of(name: str, paths: Mapping[str, str], what: str, others: str, own: str = "function") -> str:
    """The import path of something that a user names, by its short name or by the path itself.

    `what` it is, `others` that have no path, and the type of the user's `own` are named in the error.
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
