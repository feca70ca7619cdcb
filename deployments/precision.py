"""In which precision devices compute: the one that the user or the plan names, else that of the times.

Where a profile has times in several precisions, the network's own one counts. `isobatch profile` writes the times in
that precision first, so that `isobatch plan`, which does not see the network, takes the same.
"""

from pathlib import Path

from isobatch.deployments.config import AppConfig
from isobatch.deployments.folders import checkpoint_json
from isobatch.deployments.named import AUTO, INT8, LOADER, VIRTUAL
from isobatch.profiles.devices import is_cpu
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile
from isobatch.profiles.promise import RULES


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


def own_precisions(folder: Path, kind: str) -> tuple[str, ...]:
    """The precisions in which a network is computed if nothing names one, the best first: that of its ramps, which fit
    no other; without ramps, that of its file. A CPU computes in float32.
    """
    if is_cpu(kind):
        return ("float32",)
    if (folder / RULES).is_file():
        made_for = str(checkpoint_json(folder, RULES).get("dtype", "float32"))
        return ("float32" if made_for == INT8 else made_for,)
    config = checkpoint_json(folder)
    stored = str(config.get("dtype") or config.get("torch_dtype"))
    return (stored, "float32") if stored in ("float16", "bfloat16") else ("float32",)
