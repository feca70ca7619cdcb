import json
from pathlib import Path
from typing import Any

import pytest

from experiments.e3 import page, run
from experiments.e3.suite import FIGURES, OURS


def made_up(x: str, setting: Any, backend: str, system: str) -> dict[str, Any]:
    goodput = 20.0 if system == OURS else 10.0
    return {"x": x, "backend": backend, "system": system, "goodput_per_s": goodput, "share": goodput / 25}


def test_a_figure_is_measured_once_and_its_page_is_made_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "DOCS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "e3.md")
    monkeypatch.setattr(run, "_row", made_up)
    figures = run.measure()
    assert figures["fig07_onnx_over_early_exit"] == figures["fig13_torch_over_no_exits"] == 2.0
    assert figures["fig07_torch_share_of_bound"] == pytest.approx(0.8)
    monkeypatch.setattr(run, "_row", None)  # nothing is measured again
    assert run.measure() == figures
    text = (tmp_path / "e3.md").read_text()
    assert "Up to 2.00 times early exit and 2.00 times no exits by eager PyTorch" in text
    assert all((tmp_path / f"e3-{figure.name}.png").exists() and figure.paper in text for figure in FIGURES)
    kept = tmp_path / "fig07.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "code": "of another code"}))
    with pytest.raises(TypeError):
        run.measure(only="fig07")


def test_every_system_has_a_plan_on_one_device() -> None:
    setting = FIGURES[0].settings[0][1]
    facts = setting.network.facts("v100=1", "float16", "onnx")
    for system in setting.systems:
        assert run._plan(setting, facts, system) is not None
