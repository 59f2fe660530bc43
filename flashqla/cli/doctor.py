"""`flashqla doctor`: what was found on this machine, what is wrong, and the fix."""

import json as json_text
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

import flashqla
from flashqla import device
from flashqla.cli import console, options
from flashqla.errors import EnvironmentProblem

EXAMPLES = """\b
Examples:
  flashqla doctor
  flashqla doctor --json
"""


TILELANG = "0.1.15"  # whose releases the kernels were written for, as pyproject.toml says
ROOT = Path(flashqla.__file__).parents[1]  # of a checkout, or a folder of packages


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. A problem keeps the kernels from running on a GPU they were made for."""

    name: str
    state: Literal["ok", "note", "problem"]
    found: str
    fix: str = ""


def doctor(
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    no_color: options.NoColorOption = False,
) -> None:
    """Show what this machine has and lacks, and the fix.

    Looks at GPU, driver, CUDA compiler, packages and peers.

    Exits with 3 if something keeps this machine from doing what it could. No GPU is no problem: PyTorch serves then.
    """
    with console.results_only():
        checks = list(examine())
    problems = [check for check in checks if check.state == "problem"]
    if json:
        console.result(json_text.dumps({"ok": not problems, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            console.result(f"{check.state:<9}{check.name:<12}{check.found}")
            if check.fix:
                console.result(f"{'':<21}hint: {check.fix}")
    if problems:
        names = ", ".join(check.name for check in problems)
        raise EnvironmentProblem("this machine could do more", given=names, do="follow the hints above")


def examine() -> Iterator[Check]:
    """Look at everything that the kernels, the PyTorch path and the peers need."""
    versions, card = device.package_versions(), device.gpu()
    hopper = card is not None and card.capability == device.HOPPER
    # Where no kernel could run, what only kernels need is no loss.
    needed: Literal["note", "problem"] = "problem" if hopper else "note"

    yield Check("flashqla", "ok", f"{versions['flashqla'] or 'not installed'}, kernels {device.kernel_fingerprint()}")
    yield Check("python", "ok", platform.python_version())
    if card is None:
        yield Check("gpu", "note", "none that NVML reports", "kernels need a Hopper GPU (H100, H200) and its driver")
    else:
        capability = "{}.{}".format(*card.capability)
        found = f"{card.name}, capability {capability}, {card.memory_bytes / 2**30:.0f} GiB"
        fix = "" if hopper else "kernels need a Hopper GPU, capability 9.0; PyTorch serves the op here"
        yield Check("gpu", "ok" if hopper else "note", found, fix)
        yield Check("driver", "ok", card.driver)

    compiler = device.nvcc()
    if compiler is None:
        yield Check("nvcc", needed, "not found", f"{_install('nvcc')}, or set CUDA_HOME to a CUDA toolkit")
    else:
        yield Check("nvcc", "ok", f"{compiler[1]}, {compiler[0]}")
    yield _torch(card is not None)
    for name, fix in (
        ("triton", "it comes with a torch built for CUDA; fla needs it"),
        ("tilelang", f"pip install tilelang=={TILELANG}"),
        ("tvm_ffi", "it comes with tilelang"),
    ):
        version = versions[name]
        if version and name == "tilelang" and not f"{version}.".startswith(f"{TILELANG}."):
            yield Check(name, needed, f"{version}, the kernels were written for {TILELANG}", fix)
        else:
            yield Check(name, "ok", version) if version else Check(name, "note", "not installed", fix)
    yield _kernels(needed)
    for name in device.PEERS:
        yield _peer(name, versions[name], card is not None, hopper)


def _install(extra: str) -> str:
    """The command that installs an extra: in a checkout, the versions that were tested together."""
    constraints = ROOT / "constraints.txt"
    if constraints.is_file():
        return f"pip install --constraint {constraints} --editable '{ROOT}[{extra}]'"
    return f"pip install 'flashqla[{extra}]'"


def _torch(has_gpu: bool) -> Check:
    try:
        torch = import_module("torch")
    except (ImportError, OSError) as error:
        return Check("torch", "problem", f"cannot be imported: {error}", "pip install 'torch>=2.8'")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if has_gpu and not torch.cuda.is_available():
        fix = "install a torch whose CUDA version the driver supports: https://pytorch.org/get-started"
        return Check("torch", "problem", f"{torch.__version__}, {build}, cannot use the GPU", fix)
    return Check("torch", "ok", f"{torch.__version__}, {build}")


def _kernels(needed: Literal["note", "problem"]) -> Check:
    try:
        import_module("flashqla.ops.kernels.launch")
    except (ImportError, OSError) as error:
        return Check("kernels", needed, f"cannot be loaded: {error}", "pip install --force-reinstall flashqla")
    return Check("kernels", "ok", "load; they are compiled at the first call and kept on disk")


def _peer(name: str, version: str | None, has_gpu: bool, hopper: bool) -> Check:
    problem = None if version else "not installed"
    if version and hopper:  # where peers can run, an import tells more than a version
        from flashqla.backends import create

        problem = create([name], "cuda")[0].missing()
    if problem and not has_gpu:
        return Check(name, "note", f"{problem}; peers need a GPU")
    if problem:
        return Check(name, "note", problem, f"{_install('peers')}; without it the column says n/a")
    return Check(name, "ok", version or "")
