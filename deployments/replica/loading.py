"""Loads the network for a replica or a front.

The backends (torch, ONNX Runtime) are imported inside the functions, so that virtual devices start without them.
"""

from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

from isobatch.deployments.config import AppConfig
from isobatch.deployments.folders import content_of, hash_of
from isobatch.deployments.graph import profile_of
from isobatch.deployments.named import INT8, VIRTUAL, function_at
from isobatch.deployments.planning import first_plan
from isobatch.deployments.precision import named_dtype
from isobatch.deployments.sources import local
from isobatch.optimizer.plan import Plan, read_plan
from isobatch.profiles.devices import is_cpu
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import SplitModel

Warm = dict[Hashable, int]  # the largest batch that has run, by what was computed


def load_model(config: AppConfig, kind: str, directory: str, warm: Warm | None = None) -> SplitModel:
    """Load the network as a device of this kind runs it, and run full batches of its plan, which `warm` gets."""
    config = _without_lost_plan(config)
    if config.backend == VIRTUAL:
        return _virtual(config, kind)
    from isobatch.deployments.models.backends import (
        backend_of,
        compile_shapes,
        keep_freed_memory,
        make_ready,
        planned_block_ranges,
        warn_of_other_times,
    )

    keep_freed_memory()
    table = profile_of(config).table(kind) if config.profile else None
    device = "cpu" if is_cpu(kind) else "cuda"
    dtype = named_dtype(config) or (table and table.dtype) or _usual_dtype(directory, device)
    model = _load(config, directory, device, dtype)
    plan = known_plan(config, kind)
    if plan:
        make_ready(model, directory, planned_block_ranges(model, plan, kind))
    if table:
        warn_of_other_times(table, backend_of(model), dtype)
        compile_shapes(model, table)
    if plan:
        for run in cold_launches(config, kind, directory, model, {} if warm is None else warm)(plan):
            run()
    return model


def cold_launches(
    config: AppConfig, kind: str, directory: str, model: SplitModel, warm: Warm
) -> Callable[[Plan], Iterator[Callable[[], None]]]:
    """Calls, for any plan, that run its full batches that have not run here yet. A launch counts as warm once the next
    call is taken, so one that fails is tried again."""
    if config.backend == VIRTUAL or not config.profile:
        return lambda plan: iter(())
    from isobatch.deployments.models.backends import needs_one_warm_up, warm_ups

    length = profile_of(_without_lost_plan(config)).table(kind).length

    def cold(plan: Plan) -> Iterator[Callable[[], None]]:
        if warm and needs_one_warm_up(model):
            return
        for launch, size, run in warm_ups(model, directory, plan, kind, length):
            if warm.get(launch, 0) < size:
                yield run
                warm[launch] = size

    return cold


def _without_lost_plan(config: AppConfig) -> AppConfig:
    """A replica that starts later may find that the plan's file has been removed. It does not need the file: any
    replica can run any plan, and the configuration also names the backend and the precision."""
    lost = config.plan and not local(config.plan).exists()
    return config.model_copy(update={"plan": None}) if lost else config


def known_plan(config: AppConfig, kind: str) -> Plan | None:
    """The plan for which a new replica gets ready: that of the file. Without a file, a replica on a GPU makes the first
    plan itself if the devices are named, since every process then makes the same plan."""
    if config.plan:
        return read_plan(local(config.plan))
    if is_cpu(kind) or not isinstance(config.devices, dict):
        return None
    return first_plan(config, profile_of(config))


def load_front_model(config: AppConfig, directory: str) -> SplitModel:
    """Load the network for the front, which only encodes inputs if a plan's replicas run the network."""
    if config.backend == VIRTUAL:
        return _virtual(config, None)
    if config.planned:
        return _made(config, directory, "cpu", "float32")
    from isobatch.deployments.models.backends import block_ranges, keep_freed_memory, make_ready

    keep_freed_memory()
    dtype = named_dtype(config) or _usual_dtype(directory, config.device)
    model = _load(config, directory, config.device, dtype)
    make_ready(model, directory, [*block_ranges(model, 0, model.num_blocks, model.ramp_blocks if config.exits else ())])
    return model


def weights_in(config: AppConfig, directory: str) -> str:
    """A hash of the files on this node that answers depend on; "": there are none to compare."""
    if config.backend != VIRTUAL:
        return content_of(Path(directory))
    assert config.profile, "This is a bug: AppConfig asks for it."
    return hash_of([local(config.profile)])


def _load(config: AppConfig, directory: str, device: str, dtype: str) -> SplitModel:
    from isobatch.deployments.models.backends import on_backend, weights_dtype

    model = _made(config, directory, device, weights_dtype(dtype))
    return on_backend(model, directory, config.backend, int8=dtype == INT8)


def _made(config: AppConfig, directory: str, device: str, dtype: str) -> SplitModel:
    """The network that the loader returns, which may be the user's own function."""
    model: SplitModel = function_at(config.loader)(directory, device=device, dtype=dtype)
    if model.num_blocks < 1:
        blocks = f"its network has {model.num_blocks} blocks: num_blocks must be 1 or more"
        raise UserError(f"loader {config.loader}: {blocks}")
    return model


def _usual_dtype(directory: str, device: str) -> str:
    """The precision where neither the user nor the plan nor its times name one: as in a profile of this device."""
    from isobatch.deployments.models.checkpoint import usual_dtype
    from isobatch.deployments.models.loading import resolve_device

    return usual_dtype(Path(directory), resolve_device(device))


def _virtual(config: AppConfig, kind: str | None) -> SplitModel:
    from isobatch.deployments.replica.virtual import VirtualModel

    profile = profile_of(config)
    if profile.exits is None:
        raise UserError(f"{config.profile} contains no exits: make it again with isobatch profile --data FILE")
    length = profile.length
    table = profile.table_of(kind or profile.kinds[0], length)
    return VirtualModel(table, profile.exits, length=length, edges=profile.edges)
