"""The example that trains a model: it says what ran, keeps its curves, and notices a gradient that is wrong."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_small.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_small", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_small", module)  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    def train(steps: int) -> tuple[int, Any]:
        """The exit code of a run, and what it keeps."""
        kept = tmp_path / "curves.json"
        sizes = ["--device", "cpu", "--steps", str(steps), "--tokens", "150", "--layers", "1"]
        monkeypatch.setattr("sys.argv", [str(EXAMPLE), *sizes, "--json", str(kept)])
        return example.main(), json.loads(kept.read_text(encoding="utf-8"))

    return train


def test_both_runs_agree_and_learn(train: Callable[..., tuple[int, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    code, kept = train(12)
    said = capsys.readouterr().out
    assert code == 0, said
    assert said.startswith("ours: torch, tensors are on cpu")
    assert kept["implementation"] == "torch"
    assert said.rstrip().endswith("the two runs agree")
    ours, reference = kept["losses"]["ours"], kept["losses"]["reference"]
    assert len(ours) == len(reference) == 12
    assert ours[-1] < ours[0] - 0.5
    assert {"layers.0.mixer.A_log", "layers.0.mixer.dt_bias"} <= {*kept["first_gradient_differences"]}


def test_a_wrong_gradient_is_noticed(
    train: Callable[..., tuple[int, Any]], example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = example.chunk_gated_delta_rule

    def with_half_of_dg(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        return right(q, k, v, g.detach() + 0.5 * (g - g.detach()), *rest, **options)

    monkeypatch.setattr(example, "chunk_gated_delta_rule", with_half_of_dg)
    code, kept = train(1)
    assert code == 1
    assert not kept["agree"]
    assert kept["first_gradient_differences"]["layers.0.mixer.A_log"] > 0.4
