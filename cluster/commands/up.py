"""`isobatch up`: from a checkpoint to a server in one command, step by step; finished steps are skipped."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from isobatch.cluster.commands import above_0
from isobatch.cluster.commands.plan import ClassifierPlanOptions, plan_classifier
from isobatch.cluster.commands.prepare import prepare
from isobatch.cluster.commands.profile import profile
from isobatch.cluster.commands.serve import serve
from isobatch.cluster.commands.shared_options import READS, called
from isobatch.cluster.serving.ports import check_port
from isobatch.deployments.folders import PLAN, PROFILE, STEPS, check_replaceable, files_of_data, locked
from isobatch.deployments.sources import name_of
from isobatch.profiles.devices import GB, catalogued, fleet, kind_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import fields_in, load, write_whole
from isobatch.profiles.promise import RULES

LOG = "up.log"  # beside the folder: everything that the steps print
PROFILE_BUDGET_S = 20.0


@dataclass(frozen=True)
class _Step:
    """A step, the file that it makes, what this depends on, and how the result is shown in a line.

    `make` returns whether Ctrl-C ended it early, with a result that serves until the next time.
    """

    name: str
    made: Path
    about: str
    inputs: Mapping[str, Any]
    make: Callable[[], bool | None]
    result: Callable[[], str]


def up(
    model: Annotated[str, typer.Argument(help="Directory, hub id or URL of a Hugging Face classifier.")],
    data: Annotated[Path, f"Inputs, labelled or not: {READS}."],
    slo_ms: Annotated[float, "The deadline of every answer."],
    out: Annotated[
        Path | None, typer.Option(help="Directory for the results.", show_default="the model's name, with -up")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="As for isobatch plan: KIND=COUNT,...", show_default="this machine's")
    ] = None,
    max_accuracy_loss: Annotated[str, "The most that exits may cost: 1% or 0.01."] = "1%",
    max_rows: Annotated[int, typer.Option(min=50, help="The most rows of the data; more are sampled.")] = 5000,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port for HTTP; none: 8000.")] = None,
) -> None:
    """Prepare, profile, plan and serve a network. The next time, only steps whose inputs have changed are done again.

    The folder is a prepared model with its plan and profile: isobatch serve FOLDER serves it as well.

    Example: [bold]isobatch up my-bert --data reviews.csv --slo-ms 100[/]
    """

    from isobatch.cluster.serving.serve_file import LOCALHOST, PORT
    from isobatch.deployments.models import checkpoint

    above_0("--slo-ms", slo_ms)
    if not data.exists():
        raise UserError(f"{data}: no such file")
    folder = out or Path(f"{name_of(model)}-up")
    check_port(LOCALHOST, port or PORT, "--port")
    if devices:
        _check_measured(devices, folder / PROFILE)
    source = checkpoint.locate(model)
    console = Console(file=sys.stdout, soft_wrap=True, markup=False, highlight=False)
    steps = _steps(model, checkpoint.fingerprint(source), data, folder, slo_ms, devices, max_accuracy_loss, max_rows)
    with locked(folder.resolve(), f"another isobatch up makes {folder}"):
        _make(steps, folder, console.print)
    console.print(f"{len(steps) + 1}/{len(steps) + 1} serve: isobatch serve {folder}")
    serve(target=str(folder), port=port)


def _check_measured(devices: str, profile: Path) -> None:
    """Raise UserError for a wrong fleet, or one with a kind that is not measured here, before the long steps."""
    wanted, here = fleet(devices), fleet(this_machine())[0].kind
    known = {here, *(load(profile).kinds if profile.exists() else ())}
    if other := next((each.kind for each in wanted if each.kind not in known), None):
        there = "isobatch profile there, and isobatch plan"
        raise UserError(f"--devices {other}: up measures this machine's {here}: for others use {there}")


def _steps(
    model: str, files: str, data: Path, folder: Path, slo_ms: float, devices: str | None, loss: str, max_rows: int
) -> list[_Step]:
    changed = max(path.stat().st_mtime for path in (data, *files_of_data(data)))
    file = {"data": str(data.resolve()), "changed": changed}
    all_devices = devices or this_machine()
    table, best = folder / PROFILE, folder / PLAN
    return [
        _Step(
            "prepare",
            folder / RULES,
            f"exits for {model}, from {data}, that lose at most {loss} of accuracy",
            {"model": model, "files": files, **file, "loss": loss, "rows": max_rows},
            lambda: called(
                prepare, model=model, data=data, out=folder, max_accuracy_loss=loss, max_rows=max_rows, force=True
            ),
            lambda: _prepared(folder),
        ),
        _Step(
            "profile",
            table,
            "how long its blocks take here, and where its inputs leave",
            {"machine": this_machine()},
            lambda: called(profile, model=str(folder), data=data, out=table, timing_s=PROFILE_BUDGET_S),
            lambda: f"times are in {table}",
        ),
        _Step(
            "plan",
            best,
            f"the best one for {all_devices}, with answers within {slo_ms:g} ms",
            {"devices": all_devices, "slo_ms": slo_ms},
            lambda: (
                plan_classifier(
                    ClassifierPlanOptions(profile=table, devices=all_devices, slo_ms=slo_ms, out=best)
                ).hurried
            ),
            lambda: _planned(best),
        ),
    ]


def _make(steps: list[_Step], folder: Path, tell: Callable[[str], None]) -> None:
    """Do each step, unless its file is there, and it and those before it were made from the same inputs."""
    state, done = folder / STEPS, dict[str, Any]()
    known = fields_in(state) if state.exists() else {}
    if folder.exists() and not known and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists, and is not of isobatch up: --out names another directory")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps, start=1):
        heading, inputs = f"{number}/{len(steps) + 1} {step.name}", dict(step.inputs)
        if known.get(step.name) == inputs and step.made.exists():
            tell(f"{heading}: done before; {step.result()}")
        else:
            known = {}  # what follows depends on it
            check_replaceable(folder)
            tell(f"{heading}: {step.about}")
            began_s = time.monotonic()
            with folder.with_name(folder.name + f".{LOG}").open("a") as log, redirect_stdout(log):
                hurried = step.make()
            tell(f"{heading}: {step.result()} ({time.monotonic() - began_s:.0f} s)")
            if hurried:
                tell(f"{heading}: Ctrl-C ended the search; the next isobatch up searches again")
                continue
        done[step.name] = inputs
        write_whole(state, json.dumps(done, indent=2))


def _prepared(folder: Path) -> str:
    from isobatch.deployments.models.ramps import read_rules

    rules = read_rules(folder / RULES)
    if rules.mean_depth_share == 1.0:
        return "no input leaves early"
    depth = "" if rules.mean_depth_share is None else f"an input runs {rules.mean_depth_share:.0%} of the blocks; "
    return f"{depth}{rules.promise or 'nothing is promised'}"


def _planned(path: Path) -> str:
    from isobatch.deployments.config import A_FRONT_PER_S
    from isobatch.deployments.planning import summary
    from isobatch.optimizer.plan import read_plan

    made = read_plan(path)
    slow = made.promise and made.promise.goodput_per_s > A_FRONT_PER_S
    return summary(made) + (f"; the front passes on some {A_FRONT_PER_S:,} requests per second" if slow else "")


def this_machine() -> str:
    """The devices here, as a fleet. One CPU is left to the front."""
    import torch

    from isobatch.deployments.own_cores import usable_cores
    from isobatch.profiles.measure import device_name

    if count := torch.cuda.device_count():
        kind, memory_bytes = kind_of(device_name("cuda:0")), torch.cuda.get_device_properties(0).total_memory
        return f"{kind}={count}" if catalogued(kind) else f"{kind}={count}@0:{memory_bytes / GB:g}"
    return f"cpu={max(1, usable_cores() - 1)}"
