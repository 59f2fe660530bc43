"""The package as a user gets it: what the wheel holds, what imports where, and how fast the command starts."""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).parent / "flashqla"

# Modules that must load without torch: they list cases, plan, and read and show results, at once and on any laptop.
TORCH_FREE = [
    "cases",
    "cli.app",
    "cli.compare",
    "cli.report",
    "compare",
    "device",
    "errors",
    "junit",
    "ops.plan",
    "plots",
    "records",
    "report",
    "roofline",
    "tables",
    "verdicts",
]


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    files = (path for path in (ROOT / "flashqla").rglob("*.*") if path.suffix in {".py", ".cuh", ".html"})
    sources = {path.relative_to(ROOT).as_posix() for path in files}
    packages = {path.rpartition("/")[0] for path in sources}
    assert {"flashqla/cli", "flashqla/ops", "flashqla/ops/kernels", "flashqla/reference"} < packages
    assert {f"{package}/__init__.py" for package in packages} <= sources
    assert "flashqla/ops/kernels/tiles.cuh" in sources

    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in packed if ".dist-info/" not in name} == sources | {"flashqla/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in packed)


def test_wheel_imports_from_any_folder_without_torch(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()
    code = f"""
import sys
sys.path.insert(0, {str(site)!r})
import flashqla
print(flashqla.__file__, flashqla.__version__, {{"torch", "tilelang"}} & {{*sys.modules}})
"""
    # -I keeps the working folder and PYTHONPATH out, so that the unpacked wheel is what gets imported.
    seen = run(sys.executable, "-I", "-c", code, cwd=elsewhere).stdout
    version = wheel.name.split("-")[1]
    assert seen.split() == [str(site / "flashqla" / "__init__.py"), version, "set()"]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_imports_without_torch(module: str, tmp_path: Path) -> None:
    code = f"import sys, flashqla.{module}; print({{'torch', 'tilelang'}} & {{*sys.modules}})"
    assert run(sys.executable, "-c", code, cwd=tmp_path).stdout.strip() == "set()"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_command_starts_at_once(option: str, starts_at_once: Callable[..., bool], tmp_path: Path) -> None:
    traced = run(COMMAND, option, cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in traced.stderr.splitlines()}
    assert "flashqla" in imported
    assert not {"torch", "tilelang", "numpy", "scipy"} & imported
    assert starts_at_once(COMMAND, option)


@pytest.mark.parametrize("fails", [False, True])
def test_setup_is_quiet_unless_it_fails(fails: bool, tmp_path: Path) -> None:
    """`make`, with a pip that talks unless told not to, as the real one does for hundreds of lines."""
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    talk = '[[ " $* " == *" --quiet "* ]] || echo "Collecting $*"'
    pip.write_text(f"#!/bin/bash\n{talk}\n" + 'echo "ERROR: no $*" >&2; exit 1\n' * fails)
    pip.chmod(0o755)
    fresh = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # these tests run under make
    command = ["make", "setup", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=fresh, capture_output=True, text=True)
    told, *errors = done.stderr.splitlines()
    assert (done.returncode == 0, done.stdout) == (not fails, "")
    assert told.startswith("installing torch and flashqla[dev")
    assert ("ERROR: no install --quiet" in done.stderr) == fails == bool(errors)


def test_examples_of_the_readme_run(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    shapes, plan = run(sys.executable, "-c", "".join(examples), cwd=tmp_path).stdout.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["call.pt"]
    assert shapes == "torch.Size([1, 1000, 8, 128]) torch.Size([2, 8, 128, 128])"
    assert plan.startswith(("tilelang ", "torch "))


def test_imports_point_down() -> None:
    kept = run(COMMAND.with_name("lint-imports"), "--no-cache", cwd=ROOT).stdout
    assert "0 broken" in kept
