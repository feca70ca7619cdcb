"""From a checkpoint on disk to a network, through the checkpoint's own tokenizer or image processor."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from isobatch.deployments.decoding.engine_setup import load_tokenizer
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.models import checkpoint, load
from isobatch.deployments.models.encode import TextEncoder
from isobatch.deployments.models.families import families_by_type, family_of
from isobatch.deployments.models.loading import move_when_used, read_encoder
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.ramps import ExitRules, RampRule, make_head, save_ramps
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.errors import UserError
from isobatch.profiles.measure import facts_of
from isobatch.profiles.model import Batch
from tests.helpers.cascade_directories import edit
from tests.helpers.tiny_networks import FAMILIES, HEADS, hugging_face, network, random_inputs
from tests.helpers.tiny_tokenizers import save_tokenizer


@pytest.fixture
def text_checkpoint(tmp_path: Path) -> Path:
    hugging_face("bert").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def image_checkpoint(tmp_path: Path) -> Path:
    from transformers import ViTImageProcessor

    hugging_face("vit").save_pretrained(tmp_path)
    ViTImageProcessor(
        do_resize=False, do_rescale=True, rescale_factor=1 / 16, image_mean=[0.5], image_std=[0.5]
    ).save_pretrained(tmp_path)
    return tmp_path


@torch.inference_mode()
def test_the_end_of_a_text_is_read_as_by_transformers_where_it_is_padding(tmp_path: Path) -> None:
    """GPT-2 pads with the token that ends texts, and its head reads the last token that is no padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1, "good": 2, "film": 3}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(tmp_path)
    hugging_face("gpt2").save_pretrained(tmp_path)
    model, reference = load(tmp_path), AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    texts = ["good film", "good film <end>", "good <end> film <end> <end>", "<end>", "<end> <end>", "film"]
    expected = np.concatenate([reference(**tokenizer(text, return_tensors="pt")).logits.numpy() for text in texts])
    batch = model.encode(texts)
    assert batch.lengths.tolist() == [2, 2, 3, 1, 1, 1]
    assert np.abs(model.run(batch, model.num_blocks, ()).exits.logits - expected).max() < 1e-5


@torch.inference_mode()
def test_texts_and_pairs_are_encoded_as_hugging_face_does(text_checkpoint: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = load(text_checkpoint), AutoTokenizer.from_pretrained(text_checkpoint)
    reference = AutoModelForSequenceClassification.from_pretrained(text_checkpoint).eval()
    texts = ["the film is good", "dull", "not bad but not great and not dull"]
    pairs = [("the film", "is good"), ("dull", "but great"), ("a", "a")]
    for inputs, arguments in ((texts, [texts]), (pairs, [list(half) for half in zip(*pairs, strict=True)])):
        expected = reference(**tokenizer(*arguments, padding=True, return_tensors="pt")).logits.numpy()
        exits = model.run(model.encode(inputs), model.num_blocks, ()).exits
        assert np.abs(exits.logits - expected).max() < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("name", ["distilbert", "roberta"])
def test_a_network_without_types_of_tokens_takes_a_tokenizer_that_gives_them(tmp_path: Path, name: str) -> None:
    reference = hugging_face(name)
    reference.save_pretrained(tmp_path)
    tokenizer, model = save_tokenizer(tmp_path), load(tmp_path)
    assert "token_type_ids" in tokenizer("the film", "is good")
    tokens = tokenizer(["the film"], ["is good"], return_token_type_ids=False, return_tensors="pt")
    exits = model.run(model.encode([("the film", "is good")]), model.num_blocks, ()).exits
    assert np.abs(exits.logits - reference(**tokens).logits.numpy()).max() < 1e-5


@torch.inference_mode()
def test_gpt2_reads_the_types_of_tokens_of_a_tokenizer_that_gives_them(tmp_path: Path) -> None:
    """It embeds them as tokens. Chinese networks have BERT's tokenizer."""
    reference = hugging_face("gpt2")
    reference.save_pretrained(tmp_path)
    tokenizer, model = save_tokenizer(tmp_path), load(tmp_path)
    graphs = OnnxModel(model, tmp_path, cache=tmp_path / "graphs")
    graphs.prepare([BlockRange(0, model.num_blocks)], model.encode(["a"]))
    texts, pairs = ["the film is good", "dull"], [("the film", "is good"), ("dull", "but great"), ("a", "a")]
    for inputs, arguments in ((texts, [texts]), (pairs, [list(half) for half in zip(*pairs, strict=True)])):
        tokens = tokenizer(*arguments, padding=True, return_tensors="pt")
        assert "token_type_ids" in tokens
        batch, expected = model.encode(inputs), reference(**tokens).logits.numpy()
        for served in (model, graphs):
            exits = served.run(batch, model.num_blocks, ()).exits
            assert np.abs(exits.logits - expected).max() < 1e-5
    assert not graphs.exported.requested, "it was exported in time"


@pytest.mark.parametrize("name", ["convnext", "convnextv2"])
def test_a_network_of_convolutions_takes_images_of_the_size_that_its_preprocessor_makes(
    tmp_path: Path, name: str
) -> None:
    """Its configuration has another one, of which it makes no use."""
    from transformers import ViTImageProcessor

    hugging_face(name).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 16, "width": 24}).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.encode([np.zeros((20, 20, 3))]).arrays["pixel_values"].shape == (1, 3, 16, 24)


def test_a_network_of_convolutions_whose_preprocessor_makes_several_sizes_is_refused(tmp_path: Path) -> None:
    """The pictures of a launch have one size."""
    from transformers import CLIPImageProcessor

    hugging_face("resnet").save_pretrained(tmp_path)
    cuts = {"do_center_crop": True, "crop_size": {"height": 8, "width": 8}}
    CLIPImageProcessor(do_resize=False, **cuts).save_pretrained(tmp_path)
    assert load(tmp_path).encode([np.zeros((20, 30, 3))]).arrays["pixel_values"].shape == (1, 3, 8, 8)
    for options in ({"do_resize": False}, {"size": {"shortest_edge": 16}}):
        CLIPImageProcessor(**options, do_center_crop=False).save_pretrained(tmp_path)
        with pytest.raises(UserError, match="must bring images to one size: set do_resize, and height and width in"):
            load(tmp_path)


def test_who_is_cut_is_known(text_checkpoint: Path) -> None:
    model = load(text_checkpoint)
    fits, cut, endless = "good " * 22, "good " * 23, " " * 2000 + "bad"
    batch = model.encode(["good", fits, cut, endless, fits])
    assert batch.lengths.tolist() == [3, 24, 24, 2, 24]
    assert batch.truncated == {2, 3}
    assert model.encode([("good " * 10, "bad " * 11), ("good " * 10, "bad " * 12)]).truncated == {1}
    assert model.encode(["good"]).truncated == frozenset()


def test_images_are_encoded_with_the_checkpoints_own_processor(image_checkpoint: Path) -> None:
    model = load(image_checkpoint)
    image = np.arange(64).reshape(8, 8) / 4
    for same in (image, image.tolist(), image[:, :, None]):
        pixels = model.encode([same]).arrays["pixel_values"]
        assert isinstance(pixels, np.ndarray)
        assert np.allclose(pixels, (image / 16 - 0.5) / 0.5)


@pytest.mark.parametrize("wrong", [[1.0, 2.0], [[1.0], [2.0, 3.0]], [[[1, 2], [3, 4]]], [[float("nan")] * 2]])
def test_an_image_that_is_none_says_why(image_checkpoint: Path, wrong: Any) -> None:
    with pytest.raises(UserError, match="image 0 must"):
        load(image_checkpoint).encode([wrong])


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [(3, "a number"), (["one"], "a list of 1"), (("one", 2), "a list of 2"), (None, "null"), (b"\xff", "a file")],
)
def test_a_text_that_is_none_says_why(text_checkpoint: Path, wrong: Any, kind: str) -> None:
    with pytest.raises(UserError, match=f"text 1 must be a text or a pair of texts, got {kind}"):
        load(text_checkpoint).encode(["good", wrong])


def test_a_text_without_any_token_is_refused_and_takes_nobody_elses(text_checkpoint: Path) -> None:
    """Some tokenizers put nothing around a text. An empty one had the tokens of its neighbour, or stopped the batch."""
    encoder = load(text_checkpoint).encoder
    assert isinstance(encoder, TextEncoder)
    encoder.tokenizer.backend_tokenizer.post_processor = None
    assert encoder(["good", "dull film"]).lengths.tolist() == [1, 2]
    with pytest.raises(UserError, match="text 1 is empty: this network's tokenizer makes no token of it"):
        encoder(["good", "", "dull film"])


def test_a_text_without_any_token_is_named_by_its_place_among_all(text_checkpoint: Path) -> None:
    model = load(text_checkpoint)
    assert isinstance(model.encoder, TextEncoder)
    model.encoder.tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(UserError, match="text 70 is empty"):
        model.predict([*["good film"] * 70, "", "dull film"])


def test_ramps_beside_the_checkpoint_are_loaded_with_it(text_checkpoint: Path) -> None:
    assert load(text_checkpoint).ramp_blocks == ()
    heads = {block: make_head("light", 32, 3) for block in (0, 2)}
    save_ramps(text_checkpoint, ExitRules(ramps=tuple(RampRule(block=b, threshold=2.0) for b in heads)), heads)
    model = load(text_checkpoint)
    assert model.ramp_blocks == (0, 2)
    assert model.run(model.encode(["good", "a film"]), 4, ramps=[2]).exits.blocks.tolist() == [2, 2]


def test_what_cannot_be_loaded_says_why(text_checkpoint: Path, tmp_path: Path) -> None:
    for nowhere in (tmp_path / "nowhere", "./nowhere", "../a/b"):
        with pytest.raises(UserError, match=f"{nowhere}: no such directory$"):
            load(nowhere)
    with pytest.raises(UserError, match="is a file; give the directory"):
        load(text_checkpoint / "config.json")
    with pytest.raises(UserError, match="use one of float32, float16, bfloat16"):
        load(text_checkpoint, dtype="int3")
    with pytest.raises(UserError, match="device 'abacus' is not known"):
        load(text_checkpoint, device="abacus")
    save_ramps(text_checkpoint, ExitRules(policy="isobatch.deployments.exits:near"), {})
    with pytest.raises(UserError, match=r"exits\.json: policy near gives a score, but this network gives labels"):
        load(text_checkpoint)
    (text_checkpoint / "exits.json").unlink()
    (text_checkpoint / "exits.json").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"exits\.json: it is a device, not a file"):
        load(text_checkpoint)
    whole = (text_checkpoint / "model.safetensors").read_bytes()
    for wrong in (b"no tensors", whole[:-9]):
        (text_checkpoint / "model.safetensors").write_bytes(wrong)
        with pytest.raises(UserError, match="cannot be read as a checkpoint"):
            load(text_checkpoint)


def test_pickled_weights_and_ramps_alone_are_no_weights(text_checkpoint: Path) -> None:
    (text_checkpoint / "model.safetensors").rename(text_checkpoint / "ramps.safetensors")
    torch.save({}, text_checkpoint / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has no \*.safetensors weights; save it with save_pretrained\(\) first"):
        load(text_checkpoint)


def test_a_checkpoint_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    hugging_face("bert").base_model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"has no trained classifier: classifier.bias.* fine-tune it first"):
        load(tmp_path)


@pytest.mark.parametrize("load_or_check", [load, checkpoint.check])
def test_a_checkpoint_without_what_reads_its_inputs_is_refused(
    text_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, load_or_check: Any
) -> None:
    """Hugging Face makes a tokenizer that knows no word, and the network answers all the same."""
    (text_checkpoint / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer \(tokenizer.json, .*save_pretrained"):
        load_or_check(text_checkpoint)
    images = tmp_path_factory.mktemp("images")
    hugging_face("vit").save_pretrained(images)
    with pytest.raises(UserError, match=r"has no preprocessor_config.json"):
        load_or_check(images)


def test_a_sentencepiece_model_without_its_library_is_refused(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face would ask for another library, which cannot read it."""
    (text_checkpoint / "tokenizer.json").rename(text_checkpoint / "spiece.model")
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"its tokenizer is a SentencePiece model: pip install sentencepiece"):
        load(text_checkpoint)


def test_nobody_is_asked_whether_a_checkpoints_own_code_may_run(
    text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = list[str]()
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or "n")
    edit(text_checkpoint / "config.json", model_type="of_its_own", auto_map={"AutoConfig": "code.OwnConfig"})
    with pytest.raises(UserError, match=r"contains custom code which must be executed"):
        checkpoint.check(text_checkpoint)
    assert questions == []


def test_the_own_code_of_tokenizers_and_preprocessors_is_refused_at_every_place(
    text_checkpoint: Path, image_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = list[object]()

    def read(folder: Path, **options: object) -> None:
        trusted.append(options.get("trust_remote_code"))
        raise ValueError("read")

    for name in ("AutoTokenizer", "AutoImageProcessor"):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained", read)
    for reads, folder in (
        (read_encoder, text_checkpoint), (load_tokenizer, text_checkpoint),
        (read_encoder, image_checkpoint), (checkpoint.size_made, image_checkpoint),
    ):  # fmt: skip
        with pytest.raises((UserError, ValueError), match="read"):
            reads(folder)
    assert trusted == [False] * 4


@pytest.mark.parametrize("load_or_check", [load, checkpoint.check])
def test_a_configuration_that_does_not_fit_is_refused(text_checkpoint: Path, load_or_check: Any) -> None:
    for problem in ("single_label_classification", "multi_label_classification"):
        edit(text_checkpoint / "config.json", problem_type=problem)
        load_or_check(text_checkpoint)
    from_1 = {"id2label": {"1": "bad", "2": "so-so", "3": "good"}, "label2id": {"bad": 1, "so-so": 2, "good": 3}}
    for fields, sentence in (
        ({"problem_type": "regression"}, "problem_type is regression with 3 outputs: only heads that"),
        ({"problem_type": None} | from_1, "id2label numbers its 3 labels 1, 2, 3, not 0 to 2"),
        ({"model_type": "gptj"}, "'gptj' is not known; known are: albert, beit, bert, "),
    ):
        edit(text_checkpoint / "config.json", **fields)
        with pytest.raises(UserError, match=sentence):
            load_or_check(text_checkpoint)


def test_a_head_with_fewer_outputs_than_names_of_labels_is_one_sentence(text_checkpoint: Path) -> None:
    names = ("bad", "so-so", "good", "best")
    edit(text_checkpoint / "config.json", id2label=dict(enumerate(names)), label2id=dict.fromkeys(names, 0))
    sizes = r"classifier.bias is 3 in its weights, 4 by config.json: correct config.json \(id2label names the outputs"
    with pytest.raises(UserError, match=sizes):
        load(text_checkpoint)


def test_names_of_labels_may_be_numbers(text_checkpoint: Path) -> None:
    edit(text_checkpoint / "config.json", id2label={"0": 1, "1": 2, "2": 3})
    assert list(load(text_checkpoint).labels) == checkpoint.label_names(text_checkpoint) == ["1", "2", "3"]


def test_the_tokenizer_of_a_network_that_knows_more_words_is_one_sentence(text_checkpoint: Path) -> None:
    words = [f"word{number}" for number in range(1000)]
    save_tokenizer(text_checkpoint, words)
    with pytest.raises(UserError, match="its tokenizer has the token 1004, the network knows 40: save the tokenizer"):
        load(text_checkpoint)


def test_a_token_that_the_network_does_not_know_is_one_sentence(text_checkpoint: Path) -> None:
    """A tokenizer of the user's own may give it."""
    model = load(text_checkpoint)
    known = model.encode(["a film"])
    arrays = {**known.arrays, "input_ids": np.full_like(known.arrays["input_ids"], 40)}
    with pytest.raises(UserError, match="the network does not know the token 40: save the tokenizer beside it"):
        model.run(Batch(0, arrays, known.memory, known.lengths), 1, ())


def test_the_table_of_families_says_what_there_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "backends.md").read_text()
    table = page.partition("## Families")[2].partition("##")[0]
    named = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)]
    assert sorted(named) == sorted(["model_type", *families_by_type()])


@pytest.mark.parametrize("size", [8, [8, 8]])
def test_the_size_of_images_is_one_number_or_two(image_checkpoint: Path, size: Any) -> None:
    edit(image_checkpoint / "config.json", image_size=size)
    assert checkpoint.image_size(image_checkpoint) == (8, 1)
    assert load(image_checkpoint).encode([np.zeros((8, 8))]).arrays["pixel_values"].shape == (1, 1, 8, 8)


def test_images_may_be_wider_than_high(image_checkpoint: Path) -> None:
    edit(image_checkpoint / "config.json", image_size=[8, 32])
    network: Any = SimpleNamespace(reads_text=False, encode=read_encoder(image_checkpoint))
    assert checkpoint.example(network, image_checkpoint).arrays["pixel_values"].shape == (1, 1, 8, 32)
    assert checkpoint.image_size(image_checkpoint) == (16, 1), "as many pixels"


def test_an_image_of_another_size_is_refused_before_it_meets_others(image_checkpoint: Path) -> None:
    model = load(image_checkpoint)
    with pytest.raises(UserError, match="image 1 is 8 x 7, it must be 8 x 8"):
        model.encode([np.zeros((8, 8)), np.zeros((8, 7))])
    with pytest.raises(UserError, match="image 0 is 6 x 6, it must be 8 x 8"):
        model.encode([np.zeros((6, 6))])
    with pytest.raises(UserError, match="image 35 is 8 x 7"):
        model.predict([np.zeros((8, 8))] * 35 + [np.zeros((8, 7))])


def test_the_demo_has_a_name_unless_a_directory_bears_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint.locate("demo") == demo_directory()
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    with pytest.raises(UserError, match=r"demo: is not a checkpoint: it has no config\.json"):
        checkpoint.locate("demo")


@pytest.mark.parametrize("name", [*FAMILIES, *HEADS])
def test_a_device_holds_what_plans_say_of_the_blocks_that_it_runs(name: str) -> None:
    here, one = network(name), random_inputs(name, count=1, seed=1)[0]
    facts = facts_of(here, one, "cpu", None, "", "cpu")
    repeated, last = facts.repeated_bytes or (0,) * here.num_blocks, here.num_blocks
    whole, device = copy.deepcopy(hugging_face(name)), torch.device("meta")
    release = move_when_used(whole, device)
    on_host = copy.deepcopy(whole.state_dict())
    anatomy = family_of(whole.config.model_type).dissect(whole)
    there = TorchModel(anatomy, here.encoder, here.ramps, here.labels, device, here.dtype)
    survivors = here.run(one, 1, ()).survivors
    for start, stop, first in ((1, last, survivors), (0, 1, one)):
        with torch.inference_mode():
            there.through(BlockRange(start, stop), *there._enter(first))
        held = {id(tensor): tensor.nbytes for tensor in (*whole.parameters(), *whole.buffers()) if tensor.is_meta}
        assert sum(held.values()) == sum(facts.memory_bytes[start:]) - sum(repeated[start + 1 :])
    release()
    assert whole.state_dict().keys() == on_host.keys()
    assert all(torch.equal(tensor, on_host[name]) for name, tensor in whole.state_dict().items())
    with torch.inference_mode():
        there.through(BlockRange(0, 1), *there._enter(one))
    assert any(tensor.is_meta for tensor in whole.parameters()), "what is used moves again"


def test_on_the_host_weights_are_read_from_their_file_as_they_are_needed(text_checkpoint: Path) -> None:
    model = load(text_checkpoint)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [
        range(*(int(end, 16) for end in line[0].split("-")))
        for line in maps
        if line[-1].startswith(str(text_checkpoint))
    ]
    layer = model.anatomy.blocks[0].__closure__[0].cell_contents
    assert all(any(weight.data_ptr() in part for part in mapped) for weight in layer.parameters())
