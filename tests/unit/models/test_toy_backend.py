"""A backend that the project has never heard of takes one small file: it is this one."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from deployments.config import AppConfig
from deployments.models import TorchModel, backends, choice, seam
from deployments.models.backends import at_once, backend_of, make_ready, on_backend, stretches
from deployments.models.seam import BackedModel, Fingerprint, Passed, Stretch, backend_named
from profiles.errors import UserError
from tests.helpers.backend_parity import assert_same, batch_for, cuts
from tests.helpers.tiny_networks import network

PATH = f"{__name__}:TOY"


class ToyModel(TorchModel):
    """Computes one block at a time, and counts them."""

    backend = "toy"

    def __init__(self, inner: TorchModel) -> None:
        super().__init__(inner.anatomy, inner.encoder, inner.ramps, inner.labels, inner.device, inner.dtype)
        self.inner, self.computed = inner, 0

    @property
    def exact(self) -> TorchModel:
        return self.inner

    def twin(self) -> "ToyModel":
        return ToyModel(self.inner)

    def through(self, stretch: Stretch, arrays: Mapping[str, Tensor], present: Tensor | None) -> Passed:
        logits = dict[int, Tensor]()
        for block in range(stretch.start, stretch.stop):
            one = Stretch(block, block + 1, tuple(ramp for ramp in stretch.ramps if ramp == block))
            passed = self.inner.through(one, arrays, present)
            logits |= passed.ramps
            arrays = {} if passed.hidden is None else {"hidden": passed.hidden}
            self.computed += 1
        return Passed(passed.hidden, logits, passed.head)


class ToyBackend:
    tried_by_auto = True

    def obstacle(self, model: TorchModel, int8: bool) -> str | None:
        return None if model.num_blocks > 3 else "a toy runs no network of 3 blocks: use backend: torch"

    def serve(self, model: TorchModel, fingerprint: Fingerprint, int8: bool) -> BackedModel:
        return ToyModel(model)


TOY = ToyBackend()


def test_a_toy_backend_is_chosen_by_its_path_and_answers_as_torch_does() -> None:
    exact = network("bert", "entropy", [0.5, 0.5, 0.5])
    chosen = AppConfig(backend=PATH).backend
    model = on_backend(exact, "nowhere", chosen)
    assert (backend_of(model), model.exact) == ("toy", exact)
    make_ready(model, "nowhere", [*stretches(model, 0, 4, (1,))])
    batch = batch_for(exact, "bert")
    for stretch in cuts(exact):
        if stretch.start == 0:
            assert_same(model.run(batch, stretch.stop, stretch.ramps), exact.run(batch, stretch.stop, stretch.ramps))
    assert isinstance(model, ToyModel)
    assert model.computed > 0
    models, _ = at_once(model, 2)
    assert [backend_of(each) for each in models] == ["toy", "toy"]


def test_a_line_gives_it_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="'toy' is not known; known are: auto, torch, graphs, onnx, onnx-graphs"):
        on_backend(network("bert"), "nowhere", "toy")
    monkeypatch.setitem(seam.BACKENDS, "toy", PATH)
    assert backend_of(on_backend(network("bert"), "nowhere", "toy")) == "toy"
    assert backend_named("toy") is TOY


def test_what_a_toy_cannot_run_is_one_line() -> None:
    with pytest.raises(UserError, match="a toy runs no network of 3 blocks"):
        on_backend(network("roberta"), "nowhere", PATH)
    with pytest.raises(UserError, match="cannot be imported"):
        on_backend(network("bert"), "nowhere", "no_such_module:TOY")


def test_auto_measures_the_toy_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(seam.BACKENDS, "toy", PATH)
    monkeypatch.setattr(backends, "_mark", lambda directory, model: f"a mark of {model.num_blocks} blocks")
    rates = {"onnx": 1.2, "toy": 1.5}
    monkeypatch.setattr(choice, "over_torch", lambda model, other, batch_of: rates[other.backend])
    assert backend_of(on_backend(network("bert"), tmp_path, "auto")) == "toy"
    assert backend_of(on_backend(network("roberta"), tmp_path, "auto")) == "onnx", "a toy does not run that one"
