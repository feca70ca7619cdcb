"""`isobatch plan fleet.yaml`: divides one set of devices among several applications, and plans each of them."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.table import Table

from isobatch.cluster.commands import check_writable, number_text
from isobatch.cluster.commands.fleet_file import ARBITER_NAME, FleetEntry, FleetFile, controller_of, read_fleet
from isobatch.cluster.commands.plan_report import PlanResult
from isobatch.cluster.commands.plan_search import LivePlan, named, objective_of, problem_of, searched
from isobatch.cluster.commands.serve import write
from isobatch.cluster.commands.shared_options import check_not_given
from isobatch.cluster.controller.config import ShareTerms
from isobatch.cluster.controller.fleet_division import kind_for_one
from isobatch.cluster.serving.serve_file import ARBITER, key_of, serve_file, with_controller
from isobatch.cluster.simulator.plan_choice import why_not_simulated
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.front.headers import key_in
from isobatch.deployments.graph import check_weights
from isobatch.deployments.named import AUTO, VIRTUAL
from isobatch.deployments.planning import summary
from isobatch.optimizer.effort import SAME
from isobatch.optimizer.fleets.application import FleetApplication, FleetGoal, value_of
from isobatch.optimizer.fleets.division import Division, divide
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.tuning import plan_for_its_ramps
from isobatch.profiles.devices import GB, Device, as_text, fleet, sharing_choices
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile, load, write_whole

if TYPE_CHECKING:
    from isobatch.cluster.commands.plan import ClassifierPlanOptions

# Options that a fleet's file names for each application, or that a division does not support.
OF_ONE = ("profile", "devices", "rate", "goal", "slo_ms", "budget", "no_later", "cut")
HANDOVER_S = 1.0  # until a standby replica is used
LOOK_EVERY_S = 1.0  # with standby or parking, so that lent devices return soon
DIVISIONS = 3  # at most; each knows the goodput of the plans of the previous division
AMPLE = 0.5  # a need below this share of the estimate: the first plan is likely to sustain it
CANDIDATE_GAP = 0.03  # of a plan that only says which inputs leave
NO_TIME = 0.0  # in place of --seconds, after Ctrl-C


@dataclass(frozen=True)
class Planned:
    """An application, the problem by which it is planned, and its plan, once it has a part of the fleet."""

    entry: FleetEntry
    path: Path
    profile: Profile
    options: "ClassifierPlanOptions"
    application: FleetApplication
    result: PlanResult | None = None  # None: it has no devices

    @classmethod
    def of(
        cls, entry: FleetEntry, folder: Path, goal: FleetGoal, devices: Sequence[Device],
        options: "ClassifierPlanOptions",
    ) -> Self:  # fmt: skip
        computed: dict[str, Any] = {name: entry.args[name] for name in ("backend", "dtype") if name in entry.args}
        if computed.get("backend") in (AUTO, VIRTUAL):
            del computed["backend"]
        _checked_args(entry, folder, devices)
        profile = load(path := folder / entry.profile).on(computed.get("backend", ""), computed.get("dtype", ""))
        here = _known(devices, profile)
        if not here:
            has = ", ".join(each.kind for each in devices)
            raise UserError(f"{entry.name}: {path} has times of {', '.join(profile.kinds)}, the fleet has {has}")
        rate = max(entry.rate_per_s or 0.0, entry.least_per_s) if goal == "cost" else None
        own = replace(options, profile=path, slo_ms=entry.slo_ms, rate=rate, goal="cost" if goal == "cost" else None)
        objective = objective_of(own)
        facts, most = problem_of(own, here, profile), objective.for_most_goodput
        if facts.exits:
            first = plan_for_its_ramps(facts, most, lambda given: side_by_side(given, most, CANDIDATE_GAP))
            facts = first[1] if first else facts
        application = FleetApplication(
            entry.name, facts.given, objective, entry.weight, entry.rate_per_s, entry.least_per_s, entry.priority
        )
        return cls(entry, path, profile, own, application)

    def planned_on(self, devices: Sequence[Device], counts: Sequence[int], seconds: float | None) -> Self:
        """The same with the plan that `isobatch plan` makes on this part of the devices, if it has any."""
        part = [replace(each, count=count) for each, count in zip(devices, counts, strict=True) if count]
        if not (here := _known(part, self.profile)):
            return replace(self, result=None)
        if self.result and tuple(here) == self.result.facts.devices:  # divided again, with the same part
            return self
        options = replace(self.options, seconds=seconds)
        with LivePlan(seconds) as live:
            result = searched(options, here, self.profile, self.application.objective, live)
        return replace(self, result=replace(result, hurried=live.stopped))

    @property
    def hurried(self) -> bool:
        return self.options.seconds == NO_TIME or bool(self.result and self.result.hurried)

    @property
    def in_a_hurry(self) -> Self:
        """The same without time for more than a first plan."""
        return replace(self, options=replace(self.options, seconds=NO_TIME))

    @property
    def plan(self) -> Plan | None:
        return named(self.result.plan, self.profile, self.application.objective.slo_s) if self.result else None

    @property
    def devices(self) -> dict[str, int]:
        return self.result.plan.devices() if self.result else {}

    @property
    def goodput_per_s(self) -> float:
        promise = self.result.plan.promise if self.result else None
        return promise.goodput_per_s if promise else 0.0


@dataclass(frozen=True)
class PlannedFleet:
    goal: FleetGoal
    devices: Sequence[Device]
    applications: Sequence[Planned]
    division: Division

    @property
    def left(self) -> dict[str, int]:
        """The devices that no plan uses."""
        used = sum((Counter(each.devices) for each in self.applications), Counter[str]())
        return {each.kind: each.count - used[each.kind] for each in self.devices if each.count > used[each.kind]}

    @property
    def value(self) -> float:
        dollars = [each.result.score.cost_per_hour if each.result else 0.0 for each in self.applications]
        rows = zip(self.applications, dollars, strict=True)
        worths = [each.application.worth(self.goal, each.goodput_per_s, cost) for each, cost in rows]
        return abs(value_of(self.goal, worths)[0])


def plan_fleet(file: Path, options: "ClassifierPlanOptions") -> None:
    content, out = read_fleet(file), options.out
    devices: Sequence[Device] = fleet(",".join(f"{kind}={count}" for kind, count in content.devices.items()))
    _check_outputs(content, file, out)
    live = LivePlan(options.seconds)
    options = replace(options, seconds=options.seconds and options.seconds / len(content.applications))
    applications = [Planned.of(each, file.parent, content.goal, devices, options) for each in content.applications]
    _check_simulated(applications, options)
    for each in applications if content.standby else ():
        _check_parks(each)
    covered = {kind for each in applications for kind in each.profile.kinds}
    if unknown := [each.kind for each in devices if each.kind not in covered]:
        raise UserError(f"{file}: devices: {unknown[0]}: no application's profile has times of this kind: leave it out")
    if out:
        for each in applications:
            _check_served(each, devices, file.parent)
    if content.standby:
        _check_memory(applications, devices)
    elif len(applications) > 1 and content.goal != "cost":  # plans for cost rent whole devices
        choices = sharing_choices(devices, covered)
        applications, devices = _shared_or_not(applications, choices, content.goal, file.parent)
    planned = _planned(applications, devices, content.goal, options.gap, live)
    folder = out.parent if out else Path()
    plans = {_plan_file(each.entry, folder): each.plan for each in planned.applications if each.plan}
    for path, plan in plans.items():
        write_whole(path, plan.to_json())
    if options.as_json:
        print(json.dumps(_json(planned), indent=2))
    else:
        _print(planned, folder)
    if out:
        _write_serve_file(planned, out, file.parent, content.standby)


def _plan_file(entry: FleetEntry, folder: Path) -> Path:
    return folder / f"{entry.name}-plan.json"


def _check_outputs(content: FleetFile, file: Path, out: Path | None) -> None:
    """Raise UserError if a plan or the Serve file cannot be written, or would replace a file in use."""
    read = [file, *(file.parent / each.profile for each in content.applications)]
    plans = [_plan_file(each, out.parent if out else Path()) for each in content.applications]
    if out:
        check_writable(out, *read, *plans)
    for each in plans:
        check_writable(each, *read)


def _shared_or_not(
    applications: list[Planned], choices: Sequence[Sequence[Device]], goal: FleetGoal, folder: Path
) -> tuple[list[Planned], Sequence[Device]]:
    """The applications and the devices, each of which several replicas share if that is worth more by estimate."""
    best, value, error = (applications, choices[0]), tuple[float, ...](), None
    options, few = applications[0].options, sum(each.count for each in choices[0]) < len(applications)
    with LivePlan(options.seconds) as live:
        for index, devices in enumerate(choices if few or len(choices) > 1 else ()):
            try:
                here = [
                    Planned.of(each.entry, folder, goal, devices, options) if index else each for each in applications
                ]
                gap = max(options.gap, CANDIDATE_GAP)
                division = divide([each.application for each in here], devices, goal, gap)
                if division.value > value:
                    best, value = (here, devices), division.value
            except UserError as caught:
                error = caught
            if value and live.is_over():
                break
    if live.stopped:
        best = [each.in_a_hurry for each in best[0]], best[1]
    if error and not value:
        measured = len(choices) > 1
        hint = "" if measured else "; devices are shared once that is measured (isobatch profile --together 2)"
        raise UserError(f"{error}{hint}")
    return best


def _check_simulated(applications: Sequence[Planned], options: "ClassifierPlanOptions") -> None:
    """Raise UserError for --in-time if no plan is simulated."""
    if all(why := [why_not_simulated(each.application.objective) for each in applications]):
        check_not_given(options, ("in_time",), f"is for plans that are simulated: {why[0]}")


def _check_parks(each: Planned) -> None:
    """Raise UserError if the application could never be parked."""
    facts, after_s = each.application.facts, each.entry.park_after_s
    one_each = {device.kind: 1 for device in facts.devices}
    if after_s and not kind_for_one(facts, each.application.objective, one_each):
        raise UserError(
            f"{each.entry.name}: park_after_s = {after_s:g}: no single device sustains its network within its SLO, so "
            "that none could answer its next inputs: leave park_after_s or standby out, or raise slo_ms"
        )


def _check_memory(applications: Sequence[Planned], devices: Sequence[Device]) -> None:
    """Raise UserError if a device cannot hold the weights of all applications that may use it."""
    for device in devices:
        needs = [
            sum(each.profile.table(device.kind).memory_bytes) for each in applications if _known([device], each.profile)
        ]
        if sum(needs) > device.memory_bytes:
            raise UserError(
                f"standby: the networks of {len(needs)} applications need {sum(needs) / GB:.1f} GB, a "
                f"{device.kind} has {device.memory_bytes / GB:.1f} GB: leave standby out, or the kind"
            )


def _planned(
    applications: Sequence[Planned], devices: Sequence[Device], goal: FleetGoal, gap: float, live: LivePlan
) -> PlannedFleet:
    """Divide and plan; if a plan sustains less than its application needs, divide again by the simulated goodput.

    While another division is likely to follow, a division takes half of the time that is left.
    """
    short = list[Planned]()
    for number in range(1, DIVISIONS + 1):
        try:
            division = divide([each.application for each in applications], devices, goal, gap)
        except UserError:
            if not short:
                raise
            break  # the error below names the shortfall
        is_tight = any(
            each.application.needed_per_s(goal) > AMPLE * estimate.estimated_per_s
            for each, estimate in zip(applications, division.estimates, strict=False)
        )
        share = 0.5 if is_tight and number < DIVISIONS else 1.0
        applications = _planned_on(applications, devices, division, live, share)
        short = [each for each in applications if each.goodput_per_s < each.application.needed_per_s(goal) * (1 - SAME)]
        if not short:
            return PlannedFleet(goal, devices, applications, division)
        if not division.estimates:  # one application alone: there is nothing to divide
            break
        applications = [
            replace(each, application=each.application.learned(each.goodput_per_s, estimate.estimated_per_s))
            for each, estimate in zip(applications, division.estimates, strict=True)
        ]
    name, needed_per_s = short[0].entry.name, short[0].application.needed_per_s(goal)
    sustained_per_s = short[0].goodput_per_s
    raise UserError(
        f"{name} needs {needed_per_s:.6g} per second, its plan sustains {sustained_per_s:.6g}, as simulated: "
        f"{needed_per_s - sustained_per_s:.6g} are missing"
    )


def _planned_on(
    applications: Sequence[Planned], devices: Sequence[Device], division: Division, live: LivePlan, share: float
) -> list[Planned]:
    """Plan each application on its part, in this share of the time that is left.

    After Ctrl-C in one search, the other searches end with a first plan.
    """
    planned, kept_s = list[Planned](), (1 - share) * (live.left_s or 0.0)
    for each, counts in zip(applications, division.parts, strict=True):
        hurried = any(one.hurried for one in (*applications, *planned))
        here, seconds = (each.in_a_hurry, NO_TIME) if hurried else (each, live.left_s)
        if seconds is not None:
            seconds = max(0.0, seconds - kept_s) / (len(applications) - len(planned))
        planned.append(here.planned_on(devices, counts, seconds))
    return planned


def _check_served(each: Planned, devices: Sequence[Device], folder: Path) -> None:
    """Raise UserError if the application cannot be served, before its plan is made."""
    entry = each.entry
    if entry.model is None and entry.args.get("backend") != VIRTUAL:
        raise UserError(f"--out: {entry.name} needs model: the directory to serve; or backend: virtual under args:")
    config = _checked_args(entry, folder, devices)
    if config.model and not config.folder.is_dir():
        raise UserError(f"{entry.name}: model = {entry.model!r}: no such directory")
    check_weights(config)
    key_in(config.api_key_variable)


def _checked_args(entry: FleetEntry, folder: Path, devices: Sequence[Device]) -> AppConfig:
    counts = {device.kind: device.count for device in devices}
    return checked(AppConfig, _arguments(entry, folder) | {"devices": counts}, f"{entry.name}: args")


def _arguments(entry: FleetEntry, folder: Path) -> dict[str, Any]:
    """The `args:` of an application, without its plan."""
    model = entry.model
    here = model and (folder / model).exists()
    named = {"model": str((folder / model).resolve()) if here else model} if model else {}
    return {"name": entry.name, **named, **entry.args, "profile": str((folder / entry.profile).resolve())}


def _write_serve_file(planned: PlannedFleet, out: Path, folder: Path, standby: bool) -> None:
    import yaml

    content: list[dict[str, Any]] = []
    members = [each for each in planned.applications if each.result]
    for each in members:
        name = each.entry.name
        arguments = _arguments(each.entry, folder) | {"plan": str(_plan_file(each.entry, out.parent).resolve())}
        served, controller = with_controller(name, controller_of(name), f"/{name}", arguments)
        limits = {name: getattr(each.options, name) for name in ("one_machine", "slack", "max_batch")}
        controller["args"] |= {name: value for name, value in limits.items() if value is not None}
        if len(members) > 1:
            shared = {device.kind: device.count for device in _known(planned.devices, each.profile)}
            controller["args"] |= {"shared": shared}
            if standby:
                served["args"] |= {"standby": shared, "sharers": len(members)}
                controller["args"] |= {"start_s": HANDOVER_S}
            if standby or each.entry.park_after_s:
                controller["args"] |= {"look_every_s": LOOK_EVERY_S}
        content += [served, controller]
    if len(members) > 1:
        content.append(_arbiter(planned, members))
        if standby or any(each.entry.park_after_s for each in members):
            content[-1]["args"] |= {"look_every_s": LOOK_EVERY_S}
    write_whole(out, yaml.safe_dump({"applications": content}))
    write(serve_file(out, {}), out)


def _arbiter(planned: PlannedFleet, members: Sequence[Planned]) -> dict[str, Any]:
    """The application that moves devices between the others while they run."""
    applications = [
        each.entry.model_dump(include=set(ShareTerms.model_fields), exclude_defaults=True)
        | {"devices": each.devices, "controller": controller_of(each.entry.name)}
        for each in members
    ]
    devices = {device.kind: device.count for device in planned.devices}
    arguments = {"devices": devices, "goal": planned.goal, "applications": applications}
    for each in members:
        arguments |= key_of(each.entry.args)
    name = ARBITER_NAME
    return {"name": name, "import_path": ARBITER, "route_prefix": f"/{name}", "args": arguments}


def _print(planned: PlannedFleet, folder: Path) -> None:
    console, alone = Console(), len(planned.applications) == 1
    columns = [] if alone else ["estimated", "equal share", "all devices"]
    table = Table("application", "devices", "per second", *columns, title=f"a fleet for {planned.goal}")
    lines = list[str]()
    for index, each in enumerate(planned.applications):
        estimates = [] if alone else asdict(planned.division.estimates[index]).values()
        figures = map(number_text, (each.goodput_per_s, *estimates))
        table.add_row(each.entry.name, as_text(each.devices) or "none", *figures)
        if each.plan:
            lines.append(f"{each.entry.name}: {summary(each.plan)}; written to {_plan_file(each.entry, folder)}")
    console.print(table)
    for line in (*lines, *_lines(planned)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _lines(planned: PlannedFleet) -> list[str]:
    """The value of the division, how near to the best it is, and the devices that are left."""
    words = {
        "goodput": f"weighted goodput {number_text(planned.value)} per second",
        "cost": f"${planned.value:,.2f} per hour",
        "fairness": f"the smallest share is {planned.value:,.3g}",
    }
    division, left = planned.division, planned.left
    proved = "no division is better" if division.exact else f"no division is better by more than {division.gap:.1%}"
    lines = [words[planned.goal]]
    if len(planned.applications) > 1:
        lines[0] += f"; by the planner's estimates, {proved}"
    if left:
        lines.append(f"not used: {as_text(left)}")
    return lines


def _json(planned: PlannedFleet) -> dict[str, object]:
    estimates = [asdict(each) for each in planned.division.estimates] or [{} for _ in planned.applications]
    applications = [
        {"name": each.entry.name, "goodput_per_s": each.goodput_per_s}
        | estimate
        | {"result": each.result and each.result.as_json()}
        for each, estimate in zip(planned.applications, estimates, strict=True)
    ]
    return {
        "schema_version": 1,
        "goal": planned.goal,
        "value": planned.value,
        "gap": planned.division.gap,
        "exact": planned.division.exact,
        "not_used": planned.left,
        "applications": applications,
    }


def _known(devices: Sequence[Device], profile: Profile) -> list[Device]:
    return [each for each in devices if each.kind in profile.kinds]
