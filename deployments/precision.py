"""The precision in which devices compute: the one that the user or the plan names, else that of the profile's times.

Where a profile has times in several precisions, the network's own one counts. `isobatch profile` writes the times in
that precision first, so that `isobatch plan`, which does not see the network, takes the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from isobatch.deployments.config import AppConfig
from isobatch.deployments.folders import checkpoint_json
from isobatch.deployments.named import AUTO, INT8, LOADER, VIRTUAL, Dtype
from isobatch.profiles.devices import is_cpu
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile
from isobatch.profiles.promise import RULES

# Precisions that GPUs multiply faster than float32, and the first compute capability that has units for them.
HALVES: Mapping[Dtype, tuple[int, int]] = {"float16": (7, 0), "bfloat16": (8, 0)}


class OwnDtype(NamedTuple):
    """The precision of a network if nothing else names one; without ramps, on a GPU only."""

    name: Dtype
    reason: str  # in words
    is_fixed: bool  # its ramps fit no other precision


def own_dtype(folder: Path) -> OwnDtype:
    """The precision that the ramps of a network were made for; without ramps, that of its weights' file."""
    has_ramps = (folder / RULES).is_file()
    config = checkpoint_json(folder, RULES if has_ramps else "config.json")
    stored = config.get("dtype") or config.get("torch_dtype")
    half = next((each for each in HALVES if each == stored), None)
    reason = "as its ramps were made" if has_ramps else "as it is stored"
    return OwnDtype(half or "float32", "as int8 is for CPUs" if stored == INT8 else reason, has_ramps)


def named_dtype(config: AppConfig) -> str:
    """The precision that the user or the plan names; "": none. A user's own loader always gets the configured one."""
    return config.dtype if "dtype" in config.model_fields_set or config.loader != LOADER else ""


def in_precision(profile: Profile, config: AppConfig) -> Profile:
    """The profile with times in the precision in which each kind computes, for kinds that have any."""
    if dtype := named_dtype(config):
        return profile.on("", dtype)
    for kind in profile.kinds if config.backend != VIRTUAL else ():
        if len(profile.dtypes(kind)) > 1:
            for dtype in own_precisions(config.folder, kind):
                profile = profile.on("", dtype, kind)
    return profile


def check_precision(profile: Profile, config: AppConfig, kind: str) -> None:
    """Raise UserError if devices of this kind would compute in another precision than that of their times."""
    has, dtype = profile.dtypes(kind), named_dtype(config)
    if config.backend == VIRTUAL or not has or dtype in has:
        return
    runs_int8 = config.backend in ("onnx", AUTO)
    if dtype or len(has) > 1 or (INT8 in has and not runs_int8):
        dtype = dtype or own_precisions(config.folder, kind)[0]
        there = ", ".join(sorted(f"{each}{' (backend: onnx)' * (each == INT8)}" for each in has))
        raise UserError(
            f"{kind} would compute {profile.model} in {dtype}, and {config.profile} has its times in {there} only: "
            f"set dtype: to one of these, or measure a {kind} with 'isobatch profile --dtype {dtype}'"
        )


def own_precisions(folder: Path, kind: str) -> tuple[Dtype, ...]:
    """The precisions in which devices of this kind compute a network if nothing names one, the best first.

    A CPU computes in float32, unless the ramps were made for another precision.
    """
    own = own_dtype(folder)
    if own.name == "float32" or (is_cpu(kind) and not own.is_fixed):
        return ("float32",)
    return (own.name,) if own.is_fixed else (own.name, "float32")
