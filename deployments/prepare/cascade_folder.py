"""Writes the directory of a chosen combination: a cascade of levels, or one network if a single one is best."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

from deployments.folders import replacing
from deployments.models import checkpoint
from deployments.models.levels import CascadeRules, LevelRule, write_levels
from deployments.models.ramps import WEIGHTS, ExitRules, RampRule, write_rules
from deployments.prepare.cascades import CalibratedCombination, Candidate
from deployments.prepare.measuring import retuned
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
    table, temperatures = combination.evidence.test, combination.temperatures
    ramps = tuple(
        RampRule(block=block, threshold=0.0, temperature=temperatures[ramp], accuracy=float(table.right[ramp].mean()))
        for ramp, block in enumerate(combination.blocks)
    )
    kind = next((member.kind for member in combination.members if member.ramps), "light")
    untuned = ExitRules(kind=kind, policy=policy, ramps=ramps, head_temperature=temperatures[-1], notes=dict(notes))
    depths = np.array([*combination.blocks, combination.starts[-1] - 1])[table.places(chosen)] + 1
    measured = {
        "full_accuracy": float(table.full_right.mean()),
        "mean_depth_share": float(depths.mean() / combination.starts[-1]),
    }
    return retuned(untuned, combination.evidence, chosen).model_copy(update=measured)


def _copy(member: Candidate, to: Path, exits: bool) -> None:
    checkpoint.copy(member.folder, to)
    if exits and member.ramps:
        shutil.copyfile(member.folder / WEIGHTS, to / WEIGHTS)
    else:
        save_file({}, to / WEIGHTS)
