"""The backend of a network: the requested one, or the fastest one measured; errors are one line."""

import json
import logging
from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.models import checkpoint, choice, load
from isobatch.deployments.models.backends import (
    backend_of,
    block_ranges,
    make_ready,
    on_backend,
    planned_block_ranges,
    warn_of_other_times,
)
from isobatch.deployments.models.checkpoint import usual_dtype
from isobatch.deployments.models.onnx_model import OnnxModel, fingerprint
from isobatch.deployments.models.ramps import ExitRules, RampDtype, RampRule, make_head, save_ramps
from isobatch.deployments.models.served_model import BlockRange, RangeOutput
from isobatch.deployments.models.spans import Spans
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.replica import loading
from isobatch.deployments.replica.loading import cold_launches, load_model
from isobatch.deployments.replica.virtual import VirtualModel
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.model import Batch, Exits, Launched
from tests.helpers.backend_parity import batch_for
from tests.helpers.tiny_networks import DISTINCT_FAMILIES, hugging_face, network
from tests.helpers.virtual_device import SURVIVAL, table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ViTImageProcessor

    made = tmp_path_factory.mktemp("prepared") / "vit-ee"
    hugging_face("vit").save_pretrained(made)
    ViTImageProcessor(do_resize=False, do_normalize=False, rescale_factor=1 / 16).save_pretrained(made)
    prepare(made, 0.5)
    return made


def prepare(folder: Path, threshold: float, temperature: float = 1.0) -> None:
    torch.manual_seed(0)
    rules = ExitRules(ramps=(RampRule(block=1, threshold=threshold, temperature=temperature),))
    save_ramps(folder, rules, {1: make_head("light", 32, 3)})


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize(("found", "expected"), [(1.2, "onnx"), (0.8, "torch")])
def test_auto_takes_the_faster_one_and_measures_once(
    folder: Path, found: float, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []
    monkeypatch.setattr(choice, "over_torch", lambda *_: measured.append(found) or found)
    for _ in range(2):
        assert backend_of(on_backend(load(folder), folder, "auto")) == expected
    assert len(measured) == 1


def test_a_backend_that_errs_is_not_taken_however_fast(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hasty(TorchModel):
        backend = "onnx"

        def run(self, batch: Batch, stop: int, ramps: object) -> Launched:
            zeros = np.zeros((len(batch), self.num_labels), np.float32)
            return Launched(Exits(np.arange(len(batch)), np.full(len(batch), stop - 1), zeros), None)

    def hasty(model: TorchModel, *_: object) -> TorchModel:
        return Hasty(model.anatomy, model.encoder, model.ramps, model.labels, model.device, model.dtype)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = load(folder)
    assert choice.choose(model, {"onnx": lambda: hasty(model)}, folder, "a mark") == "torch"
    assert "its logits differ from torch's" in caplog.text


def test_what_will_be_served_is_exported_before_anybody_asks(folder: Path) -> None:
    model = load(folder)
    served = on_backend(model, folder, "onnx")
    make_ready(served, folder, [*block_ranges(served, 0, 4, model.ramp_blocks)])
    batch = model.encode([np.full((8, 8, 1), 3.0)])
    assert isinstance(served, OnnxModel)
    served.inner.through = lambda *_: pytest.fail("torch was asked")
    first = served.run(batch, 2, (1,))
    if first.survivors:
        served.run(first.survivors, 4, (1,))
    assert not served.exported.requested


@pytest.mark.parametrize("name", DISTINCT_FAMILIES)
def test_a_made_up_batch_looks_like_a_real_one_before_any_block(name: str) -> None:
    model = network(name, "entropy", [9.0])
    seen, through = list[object](), model.through

    def noted(block_range: BlockRange, arrays: Mapping[str, torch.Tensor], spans: Spans | None) -> RangeOutput:
        seen.append((block_range, {name: (each.shape, each.dtype) for name, each in arrays.items()}))
        return through(block_range, arrays, spans)

    model.through = noted
    batch, ramps = batch_for(model, name), model.ramp_blocks
    for start in range(model.num_blocks):
        here = batch if not start else model.run(batch, start, ()).survivors
        seen.clear()
        for stop in range(start + 1, model.num_blocks + 1):
            launched = model.run(here, stop, ramps, np.arange(len(batch)))
            here = launched.survivors or here
        expected = list(seen)
        seen.clear()
        model.warm_up(start, range(start + 1, model.num_blocks + 1), ramps, batch)
        assert seen[-len(expected) :] == expected, "though ramps would let all leave"
        if batch.lengths is not None:
            assert seen == expected, "blocks before the split did not run"


def test_a_replica_runs_full_batches_of_its_plan_before_it_is_ready(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan((Placement("cpu", 1, (Split(0, 3, 5, (1,)),)), Placement("v100", 1, (Split(3, 4, 8),))))
    (tmp_path / "plan.json").write_text(plan.to_json())
    save(Profile("vit", (replace(table(), kind="cpu"),), ExitProfile(SURVIVAL)), tmp_path / "profile.json")
    files = {name: str(tmp_path / f"{name}.json") for name in ("plan", "profile")}
    ran, run = list[tuple[int, int, int]](), TorchModel.run

    def noted(model: TorchModel, batch: Batch, stop: int, *others: Any) -> Launched:
        ran.append((batch.cursor, stop, len(batch)))
        return run(model, batch, stop, *others)

    monkeypatch.setattr(TorchModel, "run", noted)
    config, warm = checked(AppConfig, {"model": str(folder), **files}), dict[Hashable, int]()
    model = load_model(config, "cpu", str(folder), warm)
    assert ran == [(0, 2, 5), (2, 3, 5)]
    ran.clear()
    later = Plan((Placement("cpu", 1, (Split(0, 3, 6, (1,)), Split(3, 4, 2))),))
    assert not list(cold_launches(config, "cpu", str(folder), model, warm)(later)), "a CPU on torch is warm"
    monkeypatch.setattr(TorchModel, "exports", True)
    for _ in range(2):
        for launch in cold_launches(config, "cpu", str(folder), model, warm)(later):
            launch()
    assert ran == [(0, 2, 6), (2, 3, 6), (0, 3, 1), (3, 4, 2)], "one input gets to block 3"


@pytest.mark.parametrize(("backend", "expected"), [("torch", [6]), ("onnx", [2, 6]), ("graphs", [3, 2, 6])])
def test_a_launch_is_warm_if_all_that_it_needs_has_run_in_a_batch_as_large(
    backend: str, expected: list[int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported graphs have their ramps inside, recorded ones are of one shape."""
    model, warm, sizes = load(folder), dict[Hashable, int](), list[int]()
    monkeypatch.setattr(TorchModel, "backend", backend)
    monkeypatch.setattr(TorchModel, "exports", True)
    monkeypatch.setattr(TorchModel, "warm_up", lambda model, start, stops, ramps, batch: sizes.append(len(batch)))
    save(Profile("vit", (replace(table(), kind="cpu"),), ExitProfile(SURVIVAL)), tmp_path / "profile.json")
    config = checked(AppConfig, {"profile": str(tmp_path / "profile.json"), "devices": {"cpu": 1}})
    launches_of = cold_launches(config, "cpu", str(folder), model, warm)
    for size, ramps in ((5, (1,)), (3, (1,)), (2, ()), (6, (1,))):
        for launch in launches_of(Plan((Placement("cpu", 1, (Split(0, 4, size, ramps),)),))):
            launch()
    assert sizes == [5, *expected]


def test_block_ranges_go_from_ramp_to_ramp_and_include_all_ramps_that_the_policy_needs() -> None:
    alone, remembering = network("bert", "entropy", [0.5]), network("bert", "patience", [2])
    assert [*block_ranges(alone, 0, 4, (1,))] == [BlockRange(0, 2, (1,)), BlockRange(2, 4)]
    assert [*block_ranges(remembering, 0, 4, (1,))] == [BlockRange(0, 2, (0, 1)), BlockRange(2, 4)]
    plan = Plan((Placement("cpu", 1, (Split(0, 2, 8, (1,)),)), Placement("v100", 1, (Split(2, 4, 8),))))
    assert planned_block_ranges(alone, plan, "v100") == [BlockRange(2, 4)]


def test_the_fingerprint_is_of_what_is_computed(folder: Path) -> None:
    try:
        marks = []
        for threshold, temperature in ((0.5, 1.0), (0.7, 1.0), (0.5, 2.0)):
            prepare(folder, threshold, temperature)
            marks.append(fingerprint(folder, load(folder)))
        assert marks[0] == marks[1] != marks[2]
    finally:
        prepare(folder, 0.5)


@pytest.mark.parametrize(
    ("dtype", "backend", "int8", "message"),
    [
        ("bfloat16", "onnx", False, "does not run bfloat16"),
        ("float32", "torch", True, "int8 runs on ONNX Runtime only"),
        ("bfloat16", "auto", True, "does not run bfloat16"),
        ("float32", "graphs", False, "which cpu does not have: use backend: torch"),
        ("float32", "onnx-graphs", False, "which cpu does not have: use backend: onnx"),
        ("float32", "onnx-graphs", True, "int8 runs on ONNX Runtime only: use backend: onnx or auto"),
    ],
)
def test_what_cannot_be_served_is_one_line(folder: Path, dtype: str, backend: str, int8: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        on_backend(load(folder, dtype=dtype), folder, backend, int8=int8)


def test_auto_leaves_what_it_cannot_run_on_torch(folder: Path) -> None:
    brain, virtual = load(folder, dtype="bfloat16"), VirtualModel(table(), ExitProfile(SURVIVAL))
    assert on_backend(brain, folder, "auto") is brain
    assert on_backend(virtual, folder, "auto") is virtual
    with pytest.raises(UserError, match="backend onnx runs networks on torch only, not a VirtualModel"):
        on_backend(virtual, folder, "onnx")


def test_a_profile_of_another_backend_or_precision_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_other_times(replace(table(), backend="torch"), "torch", "float32")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        warn_of_other_times(replace(table(), backend="torch"), "onnx", "float32")
        warn_of_other_times(replace(table(), dtype="float16"), "torch", "bfloat16")
    assert "the times of v100 are measured with backend torch, but onnx serves" in caplog.text
    assert "isobatch profile --backend onnx" in caplog.text
    assert "the times of v100 are measured with dtype float16, but bfloat16 serves" in caplog.text
    assert "isobatch profile --dtype bfloat16" in caplog.text


def test_ramps_that_were_made_for_another_dtype_are_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(folder)
    on_backend(model, folder, "torch")
    assert not caplog.records
    on_backend(model, folder, "onnx", int8=True)
    assert "made for float32; in int8 inputs leave at other ramps" in caplog.text
    assert "isobatch prepare --dtype int8" in caplog.text
    caplog.clear()
    made_for_8_bits = model.with_ramps(
        replace(model.ramps, rules=model.ramps.rules.model_copy(update={"dtype": "int8"}))
    )
    on_backend(made_for_8_bits, folder, "onnx", int8=True)
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "ramps", "capability", "expected"),
    [
        ({"dtype": "float16"}, None, (9, 0), "float16"),
        ({"torch_dtype": "bfloat16"}, None, (8, 0), "bfloat16"),
        ({"dtype": "bfloat16"}, None, (7, 5), "float32"),
        ({"dtype": "float16"}, None, (6, 0), "float32"),
        ({"dtype": "float32"}, None, (9, 0), "float32"),
        ({}, None, (9, 0), "float32"),
        ({"dtype": "float16"}, "bfloat16", (9, 0), "bfloat16"),
        ({"dtype": "float16"}, "float32", (9, 0), "float32"),
        ({"dtype": "float16"}, "int8", (9, 0), "float32"),
    ],
)
def test_a_gpu_computes_in_the_precision_of_the_checkpoint_and_a_cpu_in_that_of_the_ramps(
    config: dict[str, str], ramps: RampDtype | None, capability: tuple[int, int], expected: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if ramps:
        rules = ExitRules(dtype=ramps, ramps=(RampRule(block=1, threshold=0.5, temperature=1.0),))
        save_ramps(tmp_path, rules, {1: make_head("light", 32, 3)})
    assert usual_dtype(tmp_path, torch.device("cpu")) == ("bfloat16" if ramps == "bfloat16" else "float32")
    assert not caplog.text
    assert usual_dtype(tmp_path, torch.device("cuda")) == expected
    assert f"is computed in {expected}, as " in caplog.text
    assert ("tensor cores need" in caplog.text) == (expected == "float32")


def test_a_replica_on_a_gpu_gets_that_precision_by_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def loader(directory: str, device: str, dtype: str) -> TorchModel:
        calls.append(dtype)
        return load(directory)

    monkeypatch.setattr(loading, "function_at", lambda path: loader)
    monkeypatch.setattr(
        checkpoint, "usual_dtype", lambda folder, device: {"cpu": "float32"}.get(device.type, "float16")
    )
    monkeypatch.setattr("isobatch.deployments.models.loading.resolve_device", torch.device)
    for arguments, kind in (({}, "l4"), ({"dtype": "bfloat16"}, "l4"), ({}, "cpu"), ({"loader": "a.b:c"}, "l4")):
        load_model(checked(AppConfig, {"model": str(folder), **arguments}), kind, str(folder))
    assert calls == ["float16", "bfloat16", "float32", "float32"]
