"""Networks that were trained with exits: their heads are found, and ramps give what plain torch gives of them."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isobatch import load
from isobatch.deployments.prepare.own_exits import OwnExit, OwnExits, heads_of, names_in, without_exits
from isobatch.profiles.errors import UserError
from tests.helpers.preparing import command
from tests.helpers.tiny_networks import NUM_LABELS, hugging_face
from tests.helpers.tiny_tokenizers import save_tokenizer
from tests.unit.prepare.conftest import reviews, rules_in

TEXTS = ["a good film", "the film was dull and bad", "great"]
HIDDEN = 16
Weights = dict[str, Tensor]


def linear(name: str, inputs: int, outputs: int) -> Weights:
    return {f"{name}.weight": torch.randn(outputs, inputs), f"{name}.bias": torch.randn(outputs)}


def saved(folder: Path, family: str, change: Any, **config: Any) -> Weights:
    """A checkpoint of this family, whose weights are changed; returns them."""
    torch.manual_seed(3)
    hugging_face(family).save_pretrained(folder)
    save_tokenizer(folder)
    weights: Weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return weights


def blocks_of(family: str) -> int:
    return int(hugging_face(family).config.num_hidden_layers)


def deebert(folder: Path, family: str = "bert") -> Weights:
    def change(weights: Weights) -> Weights:
        for block in range(blocks_of(family)):
            own = f"{family}.encoder.highway.{block}"
            weights |= linear(f"{own}.pooler.dense", HIDDEN, HIDDEN) | linear(f"{own}.classifier", HIDDEN, NUM_LABELS)
        if family == "roberta":  # it has BERT's head
            for there, here in (("classifier.dense", "roberta.pooler.dense"), ("classifier.out_proj", "classifier")):
                for part in ("weight", "bias"):
                    weights[f"{here}.{part}"] = weights.pop(f"{there}.{part}")
        return weights

    return saved(folder, family, change, architectures=["DeeBertForSequenceClassification"])


def pabee(folder: Path, family: str = "bert") -> Weights:
    def change(weights: Weights) -> Weights:
        for part in ("weight", "bias"):
            weights.pop(f"classifier.{part}")
        for block in range(blocks_of(family)):
            weights |= linear(f"classifiers.{block}", HIDDEN, NUM_LABELS)
        return weights

    return saved(folder, family, change, architectures=["BertForSequenceClassificationWithPabee"])


def elasticbert(folder: Path) -> Weights:
    def change(weights: Weights) -> Weights:
        kept = {name.replace("bert.", "elasticbert."): each for name, each in weights.items() if "classif" not in name}
        kept = {name: each for name, each in kept.items() if ".pooler." not in name}
        for block in range(blocks_of("bert")):
            kept |= linear(f"elasticbert.encoder.pooler.{block}.dense", HIDDEN, HIDDEN)
            kept |= linear(f"classifiers.{block}", HIDDEN, NUM_LABELS)
        return kept

    return saved(
        folder, "bert", change, architectures=["ElasticBertForSequenceClassification"], model_type="elasticbert"
    )


def of_layer(weights: Mapping[str, Tensor], name: str, read: Tensor) -> Tensor:
    return read @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


@torch.inference_mode()
def states(family: str, text: str, folder: Path) -> tuple[tuple[Tensor, ...], Tensor]:
    """The hidden state after each block, and the logits, of Hugging Face's own network."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    tokens.pop("token_type_ids", None)
    output = hugging_face(family)(**tokens, output_hidden_states=True)
    return output.hidden_states[1:], output.logits


class Kind(NamedTuple):
    """What makes a checkpoint, and its names for the two layers of the exit after a block."""

    make: Callable[[Path], Weights]
    dense: str
    classifier: str
    family: str = "bert"


KINDS = {
    "deebert": Kind(deebert, "bert.encoder.highway.{}.pooler.dense", "bert.encoder.highway.{}.classifier"),
    "roberta": Kind(
        partial(deebert, family="roberta"),
        "roberta.encoder.highway.{}.pooler.dense",
        "roberta.encoder.highway.{}.classifier",
        "roberta",
    ),
    "pabee": Kind(pabee, "bert.pooler.dense", "classifiers.{}"),
    "albert": Kind(partial(pabee, family="albert"), "albert.pooler", "classifiers.{}", "albert"),
    "elasticbert": Kind(elasticbert, "elasticbert.encoder.pooler.{}.dense", "classifiers.{}"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ramps_and_head_give_what_plain_torch_gives(kind: str, tmp_path: Path) -> None:
    """DeeBERT's head is the network's own; those of others are their last exits."""
    source, plain, (make, dense, classifier, family) = tmp_path / "source", tmp_path / "plain", KINDS[kind]
    weights = make(source)
    own = names_in(source)
    assert own.kind == "pooler"
    plain.mkdir()
    heads = heads_of(own, without_exits(source, own, plain), [2 * HIDDEN] * blocks_of(family), NUM_LABELS)
    left = load_file(plain / "model.safetensors")
    assert not [name for name in left if "highway" in name or "classifiers" in name or ".encoder.pooler" in name]
    model = load(plain)
    assert sorted(heads) == list(range(blocks_of(family) - 1))
    for text in TEXTS:
        after, whole = states(family, text, source)
        read = [of_layer(weights, dense.format(block), hidden[:, 0]).tanh() for block, hidden in enumerate(after)]
        expected = [of_layer(weights, classifier.format(block), each) for block, each in enumerate(read)]
        with torch.inference_mode():
            pooled, logits = model.features(model.encode([text]))
            for block, head in heads.items():
                assert (head(pooled[block]) - expected[block]).abs().max() < 1e-4
            assert (logits - (whole if "highway" in dense else expected[-1])).abs().max() < 1e-4


def test_other_exits_are_named_in_a_file_and_read_the_first_token_or_the_mean(tmp_path: Path) -> None:
    source, plain = tmp_path / "source", tmp_path / "plain"

    def change(weights: Weights) -> Weights:
        kept = {name.replace("bert.", "backbone."): each for name, each in weights.items()}
        return kept | linear("branch_a.fc", HIDDEN, NUM_LABELS) | linear("branch_b.fc", HIDDEN, NUM_LABELS)

    weights = saved(source, "bert", change)
    names = {
        "exits": {"0": {"classifier": "branch_a.fc"}, "2": {"classifier": "branch_b.fc", "reads": "mean"}},
        "rename": {"backbone.": "bert."},
    }
    own = OwnExits.model_validate(names)
    plain.mkdir()
    heads = heads_of(own, without_exits(source, own, plain), [2 * HIDDEN] * 4, NUM_LABELS)
    model, (after, _) = load(plain), states("bert", TEXTS[1], source)
    with torch.inference_mode():
        pooled, _ = model.features(model.encode([TEXTS[1]]))
        first, mean = after[0][:, 0], after[2].mean(dim=1)
        assert (heads[0](pooled[0]) - of_layer(weights, "branch_a.fc", first)).abs().max() < 1e-4
        assert (heads[2](pooled[2]) - of_layer(weights, "branch_b.fc", mean)).abs().max() < 1e-4


def test_a_convolutional_networks_branch_reads_the_mean_over_the_image() -> None:
    weights = linear("exit1.fc", 8, NUM_LABELS)
    own = OwnExits(exits={1: OwnExit(classifier="exit1.fc")})
    (head,) = heads_of(own, weights, [8, 8, 16, 16], NUM_LABELS).values()
    image = torch.randn(2, 8, 4, 4)
    assert torch.equal(head(image.mean(dim=(2, 3))), of_layer(weights, "exit1.fc", image.mean(dim=(2, 3))))


def test_a_narrow_dense_layer_is_a_ramp_with_units_that_do_nothing() -> None:
    weights = linear("a", HIDDEN, 5) | linear("b", 5, NUM_LABELS)
    own = OwnExits(exits={0: OwnExit(classifier="b", dense="a", reads="mean")})
    (head,) = heads_of(own, weights, [2 * HIDDEN] * 2, NUM_LABELS).values()
    pooled = torch.randn(3, 2 * HIDDEN)
    expected = of_layer(weights, "b", of_layer(weights, "a", pooled[:, HIDDEN:]).tanh())
    assert (head(pooled) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("exits", "sentence"),
    [
        ({0: {"classifier": "no"}}, "the exit after block 0: no.weight must be that of a linear layer, but there"),
        ({0: {"classifier": "cube"}}, "cube.weight must be that of a linear layer, but it has the shape (2, 2, 2)"),
        ({0: {"classifier": "wide"}}, "the exit after block 0 reads 7 numbers, but 32 are known of a block's output"),
        ({1: {"classifier": "four"}}, "the exit after block 1 gives 4 logits, but the network has 3 labels"),
        ({9: {"classifier": "fits"}}, "no exit can stand after block 9: the blocks are numbered 0 to 3"),
        ({0: {"classifier": "fits"}, 1: {"classifier": "small", "dense": "big"}}, "block 0 has no dense layer, but"),
        ({0: {"classifier": "small", "dense": "big"}}, "the exit after block 0 has a layer of 20 x 16, and a ramp's"),
    ],
)  # fmt: skip
def test_heads_that_are_no_ramps_are_refused_in_one_sentence(exits: Any, sentence: str) -> None:
    weights = (
        linear("fits", 16, 3) | linear("wide", 7, 3) | linear("four", 16, 4) | {"cube.weight": torch.ones(2, 2, 2)}
    )
    weights |= linear("big", 16, 20) | linear("small", 20, 3)
    with pytest.raises(UserError) as error:
        heads_of(OwnExits.model_validate({"exits": exits}), weights, [2 * HIDDEN] * 4, NUM_LABELS)
    assert sentence in str(error.value)


def prepared(*arguments: object) -> str:
    return " ".join(command("prepare", *arguments).output.split())


@pytest.mark.usefixtures("cache", "no_picture")
@pytest.mark.parametrize("policy", ["entropy", "patience"])
def test_prepare_keeps_the_heads_and_chooses_thresholds(tmp_path: Path, policy: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    pabee(source)
    data = reviews(tmp_path / "a.csv")
    options = ("--own-exits", "--policy", policy, "--max-accuracy-loss", "40%")
    output = prepared(source, "--data", data, "--out", out, *options)
    assert "the network's own exits after blocks 0, 1, 2 become ramps as they are" in output
    assert "at most 40 % of accuracy lost, 95 % sure" in output
    rules, model, own = rules_in(out), load(out), names_in(source)
    assert rules["kind"] == "pooler"
    expected = heads_of(own, load_file(source / "model.safetensors"), [2 * HIDDEN] * 4, NUM_LABELS)
    for block, head in expected.items():
        made = model.ramps.heads[block].state_dict()
        assert all(torch.equal(made[name], each) for name, each in head.state_dict().items())
    answers = model.predict([*TEXTS, *TEXTS])
    assert {each.exit_block for each in answers} <= {0, 1, 2, 3}
    assert rules["notes"]["checkpoint"] == "source"


@pytest.mark.usefixtures("cache", "no_picture")
def test_blocks_without_an_exit_of_their_own_get_trained_ramps(tmp_path: Path) -> None:
    source, out, names = tmp_path / "source", tmp_path / "out", tmp_path / "names.json"
    weights = saved(source, "bert", lambda given: given | linear("branch", HIDDEN, NUM_LABELS))
    names.write_text(json.dumps({"exits": {"1": {"classifier": "branch"}}}))
    options = (source, "--data", reviews(tmp_path / "a.csv"), "--out", out, "--exit-names", names)
    with pytest.raises(UserError, match="--ramp pooler is not for a network whose own exits are light: leave it out"):
        prepared(*options, "--ramp", "pooler")
    output = prepared(*options)
    assert "own exits after blocks 1 become ramps as they are; 2 other ramps are trained" in output
    made = load_file(out / "ramps.safetensors")
    assert torch.equal(made["1.weight"][:, :HIDDEN], weights["branch.weight"])
    assert (made["1.weight"][:, HIDDEN:] == 0).all()
    assert made.keys() == {f"{block}.{part}" for block in range(3) for part in ("weight", "bias")}
    assert np.abs(made["0.weight"].numpy()).max() > 0


def test_a_network_without_exits_and_a_wrong_file_are_one_sentence(tmp_path: Path) -> None:
    source, out, names = tmp_path / "source", tmp_path / "out", tmp_path / "names.json"
    saved(source, "bert", lambda weights: weights)
    data = reviews(tmp_path / "a.csv")

    def refused(*options: object) -> str:
        with pytest.raises(UserError) as error:
            prepared(source, "--data", data, "--out", out, *options)
        return str(error.value)

    assert "has no exits with the names of DeeBERT, PABEE or ElasticBERT: --exit-names FILE" in refused("--own-exits")
    names.write_text('{"exits": {"0": {"clasifier": "a"}}}')
    assert f"{names}: exits.0.classifier" in refused("--exit-names", names)
    names.write_text('{"exits": {}}')
    assert f"{names}: exits" in refused("--exit-names", names)
    names.write_text('{"exits": {"0": {"classifier": "a"}}}')
    assert "the exit after block 0: a.weight must be that of a linear layer, but there is no" in refused(
        "--exit-names", names
    )
    names.write_text('{"exits": {"0": {"classifier": "bert.pooler.dense"}}}')
    (source / "tokenizer.json").unlink()
    assert f"{source}: has no tokenizer" in refused("--exit-names", names)
    assert not out.exists()
