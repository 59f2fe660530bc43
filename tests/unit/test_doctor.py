"""`flashqla doctor`, on machines made up for it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from flashqla import device
from flashqla.cli import doctor
from flashqla.cli.app import app

H200 = device.Gpu("NVIDIA H200", device.HOPPER, 132, 141 * 2**30, "feed", "580.1")
A100 = device.Gpu("NVIDIA A100", (8, 0), 108, 40 * 2**30, "feed", "580.1")


class Machine:
    """What `examine` finds; a test changes what it is about."""

    def __init__(self) -> None:
        self.card: device.Gpu | None = None
        self.nvcc: Any = ("/cuda/bin/nvcc", "13.0")
        self.cuda: str | None = None
        self.cuda_usable = False
        self.broken: set[str] = set()
        self.versions: dict[str, str | None] = {}

    def load(self, name: str) -> Any:
        if name in self.broken:
            raise ImportError(f"no {name}")
        cuda = SimpleNamespace(is_available=lambda: self.cuda_usable)
        return SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda=self.cuda), cuda=cuda)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    versions = {**dict.fromkeys(device.PACKAGES, "1.0"), **dict.fromkeys(device.PEERS), "tilelang": "0.1.15"}
    machine.versions = versions
    monkeypatch.setattr(device, "gpu", lambda index=0: machine.card)
    monkeypatch.setattr(device, "nvcc", lambda: machine.nvcc)
    monkeypatch.setattr(device, "package_versions", lambda: versions)
    monkeypatch.setattr(doctor, "import_module", machine.load)
    return machine


def states() -> dict[str, str]:
    return {check.name: check.state for check in doctor.examine()}


@pytest.mark.parametrize(("version", "state"), [("0.1.15.post1", "ok"), ("0.1.150", "problem"), ("0.2.0", "problem")])
def test_kernels_need_the_tilelang_they_were_written_for(machine: Machine, version: str, state: str) -> None:
    machine.card, machine.versions["tilelang"] = H200, version
    (found,) = [check for check in doctor.examine() if check.name == "tilelang"]
    assert (found.state, found.fix) == (state, "" if state == "ok" else "pip install tilelang==0.1.15")
    requirement = f'"tilelang>={doctor.TILELANG},<0.1.16;'
    assert requirement in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_a_machine_without_a_gpu_has_notes_but_no_problem(machine: Machine) -> None:
    machine.nvcc = None
    assert {name: state for name, state in states().items() if state != "ok"} == dict.fromkeys(
        ("gpu", "nvcc", "fla", "flashinfer", "flash-qla"), "note"
    )
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "note     gpu         none that NVML reports\n                     hint: kernels need" in result.stdout


def test_peers_are_no_loss_without_a_gpu(machine: Machine) -> None:
    assert {check.fix for check in doctor.examine() if check.name in device.PEERS} == {""}


def test_hints_name_the_constraints_where_there_are_any(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.card, machine.cuda, machine.cuda_usable = H200, "13.0", True

    def hint() -> str:
        return next(check.fix for check in doctor.examine() if check.name == "fla")

    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert hint().startswith("pip install 'flashqla[peers]'; ")
    (tmp_path / "constraints.txt").touch()
    assert hint().startswith(f"pip install --constraint {tmp_path}/constraints.txt --editable '{tmp_path}[peers]'; ")


def test_a_hopper_machine_in_order(machine: Machine) -> None:
    machine.card, machine.cuda, machine.cuda_usable = H200, "13.0", True
    assert {name for name, state in states().items() if state != "ok"} == set(device.PEERS)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"nvcc": None}, "nvcc"),
        ({"cuda_usable": False}, "torch"),
        ({"broken": {"torch"}}, "torch"),
        ({"broken": {"flashqla.ops.kernels.launch"}}, "kernels"),
    ],
)
def test_what_keeps_a_hopper_gpu_idle_is_a_problem(machine: Machine, changes: dict[str, Any], problem: str) -> None:
    machine.card, machine.cuda, machine.cuda_usable = H200, "13.0", True
    for name, value in changes.items():
        setattr(machine, name, value)
    assert [name for name, state in states().items() if state == "problem"] == [problem]
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 3
    assert f"given      {problem}" in result.stderr
    assert "hint: " in result.stdout


def test_another_gpu_is_served_by_pytorch(machine: Machine) -> None:
    machine.card, machine.cuda, machine.cuda_usable = A100, "13.0", True
    assert states()["gpu"] == "note"
    assert "problem" not in states().values()


def test_json(machine: Machine) -> None:
    machine.broken = {"torch"}
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 3
    assert report["ok"] is False
    (torch,) = (check for check in report["checks"] if check["name"] == "torch")
    assert torch == {
        "name": "torch",
        "state": "problem",
        "found": "cannot be imported: no torch",
        "fix": "pip install 'torch>=2.8'",
    }
