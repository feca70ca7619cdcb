"""What users may name: built-in networks, backends, functions by their import paths."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from profiles.errors import UserError

# What may compute a network, by short name (docs/backends.md): import paths, since a backend's library is imported only
# when the backend is asked for. `auto` tries them in turn.
BACKENDS = {
    "torch": "deployments.models.torch_model:TORCH",
    "graphs": "deployments.models.cuda_graphs:TORCH_GRAPHS",
    "onnx": "deployments.models.onnx_model:ONNX",
    "onnx-graphs": "deployments.models.onnx_graphs:ONNX_GRAPHS",
}
AUTO = "auto"
VIRTUAL = "virtual"
DEMO = "deployments.demo:demo_directory"
# What built-in networks are called where a directory or a hub id is expected.
DEMO_NAME, LLM_DEMO_NAME = "demo", "llm-demo"
_BUILT_IN = {DEMO_NAME: DEMO, LLM_DEMO_NAME: "deployments.demo:llm_demo_directory"}
LOADER = "deployments.models:load_served"


def function_at(path: str) -> Callable[..., Any]:
    """The function that an import path `module:function` names.

    >>> function_at("math:sqrt")(9.0)
    3.0
    """
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{path!r} cannot be imported: {error}") from error
    if not callable(found):
        raise UserError(f"{path!r} must name a function as 'module:function'")
    return found  # type: ignore[no-any-return]


def built_in(name: str | Path) -> Path | None:
    """The directory of a built-in network, by its name, unless a directory is called so."""
    path = _BUILT_IN.get(str(name))
    return function_at(path)() if path and not Path(name).is_dir() else None


def well_formed(path: str) -> str:
    module, colon, name = path.partition(":")
    if not (module and colon and name.isidentifier()):
        raise ValueError(f"{path!r} must look like 'package.module:function'")
    return path


def backend_path(name: str) -> str:
    """The import path of a backend that is named in short, or by that path itself.

    >>> backend_path("torch"), backend_path("my_package.my_module:BACKEND")
    ('deployments.models.torch_model:TORCH', 'my_package.my_module:BACKEND')
    """
    if name not in BACKENDS and ":" not in name:
        raise UserError(
            f"backend {name!r} is not known; known are: {', '.join((AUTO, *BACKENDS))}, "
            "or your own as package.module:object"
        )
    return well_formed(BACKENDS.get(name, name))


def known_backend(name: str) -> str:
    """The same name, if it is `auto` or a backend's: commands check it here before they load anything."""
    if name != AUTO:
        backend_path(name)
    return name
