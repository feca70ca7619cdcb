"""All of `isobatch prepare`: features, ramps, thresholds, and a directory that is still a checkpoint."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from isobatch.deployments.folders import cache_directory, check_replaceable, replacing
from isobatch.deployments.models import checkpoint, load
from isobatch.deployments.models.backends import on_backend, weights_dtype
from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.models.ramps import WEIGHTS, ExitRules, RampDtype, Ramps, read_rules, save_ramps
from isobatch.deployments.named import INT8
from isobatch.deployments.prepare.bridges import make_bridges
from isobatch.deployments.prepare.features import features
from isobatch.deployments.prepare.measuring import PrepareOptions, make_ramps, retuned
from isobatch.deployments.prepare.report import draw_exits
from isobatch.deployments.prepare.sample import Indices, Sample
from isobatch.deployments.prepare.scores import make_score_ramps
from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.promise import RULES

PICTURE = "exits.png"
CUT = "cut"  # the note on texts that are too long
OwnHeads = Callable[[Sequence[int], int], Mapping[int, nn.Module]]


def prepare(
    source: Path,
    sample: Sample,
    out: Path,
    options: PrepareOptions,
    notes: Mapping[str, str | int | float] | None = None,
    device: str = "cpu",
    force: bool = False,
    own: OwnHeads | None = None,
) -> ExitRules:
    """Write `out`: the checkpoint in `source`, its ramps, their rules, and a picture of their figures.

    `own`: the ramps that need no training, given the width of each block's pooled states and the number of labels.
    """
    check_free(out, force)
    cache = cache_directory()
    model = _served(source, device, options.dtype)
    if model.num_blocks < 2:
        raise UserError(f"{source}: has {model.num_blocks} block; a ramp needs another block after it")
    heads = own(model.exact.anatomy.pooled_widths, model.num_labels) if own else {}
    fingerprint, made = checkpoint.fingerprint(source), {**(notes or {})}
    if sample.task.by_map:
        ramps = make_bridges(model, sample, options)
    else:
        cached = features(model, f"{fingerprint} {options.dtype}", sample.values, cache / "features")
        if cached.truncated:
            longest, texts = model.exact.encoder.longest, f"{cached.truncated:,} of {len(sample):,} texts"
            made[CUT] = (
                f"{texts} are longer than the {longest} tokens that the network reads: the rest of each is cut off"
            )
        if sample.task.by_score:
            ramps = make_score_ramps(cached, sample, options)
        else:
            ramps = make_ramps(cached, sample, options, model.labels, heads)
    rules = ramps.rules.model_copy(update={"notes": _provenance(sample, options, fingerprint) | made})
    check_free(out, force)  # a second time, as another process may have written there meanwhile
    with replacing(out) as draft:
        checkpoint.copy(source, draft)
        save_ramps(draft, rules, ramps.heads)
        if ramps.evidence:
            ramps.evidence.save(draft / EVIDENCE)
        draw_exits(rules, draft / PICTURE)
    return rules


def tune(source: Path, out: Path, evidence: Evidence, chosen: Indices, force: bool = False) -> ExitRules:
    """Write `out`: the prepared network in `source` with other thresholds at its ramps."""
    check_free(out, force)
    rules = retuned(read_rules(source / RULES), evidence, chosen)
    with replacing(out) as draft:
        checkpoint.copy(source, draft)
        shutil.copyfile(source / WEIGHTS, draft / WEIGHTS)
        evidence.save(draft / EVIDENCE)  # with the metric of the new promise
        draw_exits(rules, draft / PICTURE)
        rules.write(draft / RULES)
    return rules


def _served(source: Path, device: str, dtype: RampDtype) -> BackedModel:
    """The network in the precision of serving, as ramps must learn from the features of that precision."""
    model = load(source, device, weights_dtype(dtype)).with_ramps(Ramps())
    return on_backend(model, source, "onnx", int8=True) if dtype == INT8 else model


def check_free(out: Path, force: bool) -> None:
    """Raise UserError if `out` exists and may not be replaced, or if it cannot be written."""
    check_replaceable(out)
    replaceable = out.is_dir() and ((out / RULES).is_file() or not any(out.iterdir()))
    if out.exists() and not replaceable:
        raise UserError(f"{out}: exists, and is not a prepared model (it has no {RULES}): name another --out")
    if out.exists() and not force:
        raise UserError(f"{out}: exists already; --force replaces it")
    nearest = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    try:  # permissions alone do not show whether a directory can be made (root, /proc)
        with TemporaryDirectory(prefix=".isobatch-", dir=nearest):
            pass
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {nearest}: {error.strerror}") from error


def _provenance(sample: Sample, options: PrepareOptions, fingerprint: str) -> dict[str, str | int | float]:
    return {
        "checkpoint_sha256": fingerprint,
        "targets": "the network's own predictions" if sample.labels is None else "labels",
        "trained_on": len(sample.parts.train),
        "calibrated_on": len(sample.parts.calibrate),
        "tested_on": len(sample.parts.test),
        "seed": options.seed,
    }
