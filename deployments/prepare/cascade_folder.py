"""Writes the directory of a chosen combination: a cascade of levels, or one network if a single one is best."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from deployments.folders import replacing
from deployments.models import checkpoint
from deployments.models.levels import CascadeRules, LevelRule, write_levels
from deployments.models.ramps import WEIGHTS, ExitRules, RampRule, write_rules
from deployments.prepare.cascades import CalibratedCombination, Candidate
from deployments.prepare.classes import by_class
from deployments.prepare.pipeline import check_free
from deployments.prepare.sample import Indices

Notes = Mapping[str, str | int | float]


def write(
    out: Path, combination: CalibratedCombination, chosen: Indices, policy: str, notes: Notes, force: bool = False
) -> ExitRules:
    """Write `out`: every member's checkpoint, the rules of all ramps, and the levels with their weights."""
    check_free(out, force)
    rules = rules_of(combination, chosen, policy, notes)
    with replacing(out) as draft:
        if len(combination.members) == 1:
            _copy(combination.members[0], draft, combination.exits)
        else:
            levels = tuple(
                LevelRule(folder=f"level-{number}", model=member.name, blocks=member.num_blocks, weight=weight)
                for number, (member, weight) in enumerate(zip(combination.members, combination.weights, strict=True))
            )
            for level, member in zip(levels, combination.members, strict=True):
                (draft / level.folder).mkdir()
                _copy(member, draft / level.folder, combination.exits)
            write_levels(draft, CascadeRules(levels=levels, notes=dict(notes)))
        write_rules(draft, rules)
    return rules


def rules_of(combination: CalibratedCombination, chosen: Indices, policy: str, notes: Notes) -> ExitRules:
    """The content of exits.json: a rule for every ramp, including the ramps at edges."""
    table = combination.evidence.test
    places = table.places(chosen)
    figures, blocks = combination.figures(chosen), (*combination.blocks, combination.starts[-1] - 1)
    thresholds = table.candidates[chosen].tolist()
    ramps = tuple(
        RampRule(
            block=block,
            threshold=thresholds[ramp],
            temperature=combination.temperatures[ramp],
            survival=float((places > ramp).mean()),
            accuracy=float(table.right[ramp].mean()),
            exit_accuracy=float(table.right[ramp][places == ramp].mean()) if (places == ramp).any() else None,
        )
        for ramp, block in enumerate(combination.blocks)
    )
    return ExitRules(
        kind=next((member.kind for member in combination.members if member.ramps), "light"),
        policy=policy,
        ramps=ramps,
        head_temperature=combination.temperatures[-1],
        full_accuracy=float(table.full_right.mean()),
        exit_accuracy=figures.accuracy,
        agreement=figures.agreement,
        mean_depth_share=float(
            (sum(blocks[place] + 1 for place in places.tolist())) / len(places) / combination.starts[-1]
        ),
        promise=figures.promise,
        classes=by_class(table.truth, table.full_labels, table.answers(places)),
        notes=dict(notes),
    )


def _copy(member: Candidate, to: Path, exits: bool) -> None:
    checkpoint.copy(member.folder, to)
    if exits and member.ramps:
        shutil.copyfile(member.folder / WEIGHTS, to / WEIGHTS)
    else:
        save_file({}, to / WEIGHTS)
