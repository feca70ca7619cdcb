"""The directory of a tiny cascade, as `isobatch cascade` writes them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from isobatch.deployments.models.levels import CASCADE, CascadeRules, LevelRule
from isobatch.deployments.models.ramps import ExitRules, RampRule, make_head, save_ramps
from isobatch.profiles.promise import RULES
from tests.helpers.tiny_networks import hugging_face
from tests.helpers.tiny_tokenizers import WORDS, save_tokenizer

SEED = 4  # of the ramp inside BERT


def cascade_directory(folder: Path, sure: tuple[float, float] = (0.9, 0.6), words: Sequence[str] = WORDS) -> Path:
    """BERT before ELECTRA, whose labels have other numbers; with a ramp inside BERT.

    `sure`: the confidence that lets an input go there, and at the edge. `words`: those of ELECTRA's tokenizer.
    """
    for number, name in enumerate(("bert", "electra")):
        place = folder / f"level-{number}"
        hugging_face(name).save_pretrained(place)
        save_tokenizer(place, words if number else WORDS)
        labels = ["good", "bad", "so so"] if number else ["Bad", "Good", "So so"]
        edit(place / "config.json", id2label=dict(enumerate(labels)), label2id={x: i for i, x in enumerate(labels)})
    torch.manual_seed(SEED)  # networks that another test has made already draw nothing
    save_ramps(folder / "level-0", ExitRules(), {1: make_head("light", 32, 3)})
    (folder / "level-0" / RULES).unlink()
    ramps = (
        RampRule(block=1, threshold=sure[0], survival=0.9),
        RampRule(block=3, threshold=sure[1], temperature=1.5, survival=0.5),
    )
    rules = ExitRules(policy="isobatch.deployments.exits:confidence", ramps=ramps, head_temperature=2.0)
    rules.write(folder / RULES)
    levels = (LevelRule(folder="level-0", blocks=4), LevelRule(folder="level-1", blocks=3, weight=0.7))
    CascadeRules(levels=levels).write(folder / CASCADE)
    return folder


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
