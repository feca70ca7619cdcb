"""The directory of a chosen combination: a cascade of levels, or one network where one alone is best."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from deployments.folders import whole
from deployments.models import checkpoint
from deployments.models.levels import CascadeRules, LevelRule, write_levels
from deployments.models.ramps import WEIGHTS, ExitRules, RampRule, write_rules
from deployments.prepare.cascades import Candidate, Tried
from deployments.prepare.classes import by_class
from deployments.prepare.pipeline import check_free
from deployments.prepare.sample import Indices

Notes = Mapping[str, str | int | float]


def write(out: Path, made: Tried, chosen: Indices, policy: str, notes: Notes, force: bool = False) -> ExitRules:
    """Write `out`: every member's checkpoint, the rules of all ramps, and how the levels are put together."""
    check_free(out, force)
    rules = rules_of(made, chosen, policy, notes)
    with whole(out) as draft:
        if len(made.members) == 1:
            _copy(made.members[0], draft, made.exits)
        else:
            levels = tuple(
                LevelRule(folder=f"level-{number}", model=member.name, blocks=member.num_blocks, weight=weight)
                for number, (member, weight) in enumerate(zip(made.members, made.weights, strict=True))
            )
            for level, member in zip(levels, made.members, strict=True):
                (draft / level.folder).mkdir()
                _copy(member, draft / level.folder, made.exits)
            write_levels(draft, CascadeRules(levels=levels, notes=dict(notes)))
        write_rules(draft, rules)
    return rules


def rules_of(made: Tried, chosen: Indices, policy: str, notes: Notes) -> ExitRules:
    """exits.json: a rule for every ramp, those at the edges among them."""
    table = made.evidence.test
    places = table.places(chosen)
    told, blocks = made.told(chosen), (*made.blocks, made.starts[-1] - 1)
    thresholds = table.candidates[chosen].tolist()
    ramps = tuple(
        RampRule(
            block=block,
            threshold=thresholds[ramp],
            temperature=made.temperatures[ramp],
            survival=float((places > ramp).mean()),
            accuracy=float(table.right[ramp].mean()),
            exit_accuracy=float(table.right[ramp][places == ramp].mean()) if (places == ramp).any() else None,
        )
        for ramp, block in enumerate(made.blocks)
    )
    return ExitRules(
        kind=next((member.kind for member in made.members if member.ramps), "light"),
        policy=policy,
        ramps=ramps,
        head_temperature=made.temperatures[-1],
        full_accuracy=float(table.full_right.mean()),
        exit_accuracy=told.accuracy,
        agreement=told.agreement,
        mean_depth_share=float((sum(blocks[place] + 1 for place in places.tolist())) / len(places) / made.starts[-1]),
        promise=told.promise,
        classes=by_class(table.truth, table.full_said, table.answers(places)),
        notes=dict(notes),
    )


def _copy(member: Candidate, to: Path, exits: bool) -> None:
    checkpoint.copy(member.folder, to)
    if exits and member.ramps:
        shutil.copyfile(member.folder / WEIGHTS, to / WEIGHTS)
    else:
        save_file({}, to / WEIGHTS)
