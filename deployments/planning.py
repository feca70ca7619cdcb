"""The first plan of an application: from its file, or the best one for the devices that it may use."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from isobatch.deployments import ray_facts, resources
from isobatch.deployments.config import AppConfig
from isobatch.deployments.precision import check_precision
from isobatch.deployments.sources import local
from isobatch.optimizer import Objective, Plan, optimize, read_plan
from isobatch.optimizer.early_answers import check_whole
from isobatch.optimizer.plan import rate
from isobatch.profiles.devices import Device, as_text, catalogued, links_between
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import MOST_BATCH, mixed_backends_warning

log = logging.getLogger("ray.serve")  # so that plans appear among Serve's own lines about a replica
UNKNOWN_MEMORY_BYTES = 10**15  # for a kind that the catalogue lacks: a user who names it knows that the network fits

DeviceCounts = Mapping[str, int]


def largest_batch(config: AppConfig) -> int:
    """The largest batch of plans for this application, where latency tables have larger ones."""
    return config.max_batch if "max_batch" in config.model_fields_set else MOST_BATCH


def first_plan(config: AppConfig, profile: Profile) -> Plan:
    """The plan of the configuration's file, or the best one for its devices."""
    if config.plan:
        return _of_file(config)
    devices = usable(config, profile)
    rate_per_s, budget, most = config.rate_per_s or 0.0, config.early_budget, largest_batch(config)
    goal = Objective(slo_s=config.slo_ms / 1e3, goodput_per_s=rate_per_s, max_batch=most, ramp_budget=budget)
    links = links_between(devices, gbit_per_s=config.links, measured=profile.links)
    plan = optimize(profile, devices, links, goal)
    if warning := mixed_backends_warning([profile.table(kind) for kind in plan.devices()]):
        log.warning("%s", warning)
    log.info("planned for %s: %s", as_text({device.kind: device.count for device in devices}), summary(plan))
    return replace(plan, model=profile.model, weights=profile.weights)


def plan_for_fewer(running: Plan, counts: DeviceCounts, config: AppConfig, profile: Profile) -> Plan | None:
    """The best plan for the devices that remain of the running plan, with batches no larger than the running plan's."""
    devices = [device(kind, count) for kind, count in counts.items() if count]
    largest = max(split.batch_size for pipeline in running.pipelines for split in pipeline.splits)
    goal = Objective(slo_s=config.slo_ms / 1e3, max_batch=largest, ramp_budget=config.early_budget)
    links = links_between(devices, gbit_per_s=config.links, measured=profile.links)
    try:
        return optimize(profile, devices, links, goal) if devices else None
    except UserError as error:
        log.warning("no plan can run meanwhile on %s: %s", as_text(counts) or "nothing", error)
        return None


def has_room_beside(
    config: AppConfig,
    front: resources.Resources,
    nodes: Sequence[resources.Resources],
    free: Sequence[resources.Resources],
) -> bool:
    """Whether this application has room beside everything that runs, also beside its own previous version.

    If it has none, a new front would wait for replicas, and these for devices that the old front holds until the new
    one is ready. A plan that is made at the start may use all devices, so it never has room.
    """
    if config.planned and not config.plan:
        return False
    devices = _of_file(config).devices() if config.plan else {}
    replicas = resources.needed(devices, config.replica_needs, nodes)
    return all(resources.first_fit([front, *replicas], free))


def _of_file(config: AppConfig) -> Plan:
    plan = read_plan(local(config.plan or ""))
    if config.early_budget is not None:
        check_whole(plan)
    return plan


def summary(plan: Plan, parked: bool = False) -> str:
    """A plan in one line; `parked`: it runs once the next input has come.

    >>> from isobatch.optimizer import Placement, Split
    >>> summary(Plan((Placement("v100", 4, (Split(0, 6, 16, ramps=(5,)), Split(6, 12, 16))),)))
    'blocks 0-5 at 16, 6-11 at 16 on 4 v100'
    """
    parts = [
        ", ".join(f"{split.blocks_text} at {split.batch_size}" for split in placement.splits)
        + f" on {placement.replicas} {placement.kind}"
        for placement in plan.all_placements
    ]
    counted = f"; an input is {plan.length} tokens" if plan.length else ""
    return f"{'parked until the next input: ' * parked}blocks {'; '.join(parts)}{_promised(plan)}{counted}"


def _promised(plan: Plan) -> str:
    if plan.promise is None:
        return ""
    promise, of = plan.promise, ", ".join(filter(None, (plan.backend, plan.dtype)))
    made_of = f" by {plan.origin} times{f' ({of})' if of else ''}" if plan.origin else ""
    per_s, longest_ms = f"; {rate(promise.goodput_per_s)}", 1e3 * promise.latency_s
    if plan.writes_texts:
        return f"{per_s}, first tokens in {longest_ms:.0f} ms{made_of}"
    simulated = f"as simulated: {promise.simulated}" if promise.simulated else "not simulated"
    return f"{per_s}{made_of}; {simulated}; full launches all the way: {longest_ms:.0f} ms"


def usable(config: AppConfig, profile: Profile) -> list[Device]:
    """The devices that plans may use: as configured, or with `auto` those of the nodes that the profile covers."""
    if isinstance(config.devices, dict):
        for kind in config.devices:
            profile.table(kind)  # raises if it has no table for this kind
            check_precision(profile, config, kind)
        return [device(kind, count) for kind, count in config.devices.items()]
    counts = dict(resources.devices_on(ray_facts.nodes()))
    if config.cpus_per_replica:  # each front takes a CPU, and each replica on the CPU its share
        counts["cpu"] = int((counts.get("cpu", 0) - config.front_cpus) / config.cpus_per_replica)
    devices = [device(kind, count) for kind, count in counts.items() if kind in profile.kinds and count > 0]
    if not devices:
        raise UserError(
            f"devices: auto: this Ray has {as_text(counts) or 'nothing'}, {config.profile} has times of "
            f"{', '.join(profile.kinds)}: profile these devices, or name the devices to use"
        )
    for each in devices:
        check_precision(profile, config, each.kind)
    return devices


def device(kind: str, count: int) -> Device:
    known = catalogued(kind)
    if known is None:
        return Device(kind, count, UNKNOWN_MEMORY_BYTES, price_per_hour=0.0)
    return Device(kind, count, known.memory_bytes, known.price_per_hour)
