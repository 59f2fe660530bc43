"""`flashqla warmup`: compile ahead of the first call, and into a cache that can be shipped."""

import logging
import os
import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from flashqla import device, signals
from flashqla.cases import suite
from flashqla.cli import console, options
from flashqla.errors import EnvironmentProblem

EXAMPLES = """\b
Examples:
  flashqla warmup --target sm_90a --dtype bfloat16 --dtype float16
  flashqla warmup fwd --heads 2,8
"""
OneWay = Literal["fwd", "bwd"]
SUITES: dict[OneWay, str] = {"fwd": "qwen", "bwd": "bwd"}  # whose head counts and layouts the peers are compiled for


class Direction(StrEnum):
    fwd = "fwd"
    bwd = "bwd"
    both = "fwd+bwd"


class DType(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"


def warmup(
    direction: Annotated[
        Direction, typer.Argument(help="What to compile: for inference (fwd), gradients (bwd), or both.")
    ] = Direction.both,
    dtype: Annotated[
        list[DType] | None, typer.Option("--dtype", help="Of q, k and v; bfloat16 by default. Repeatable.")
    ] = None,
    target: Annotated[
        options.Target | None,
        typer.Option("--target", help="Compile our kernels for it, without a GPU and without the peers."),
    ] = None,
    heads: options.HeadsOption = None,
    quiet: options.QuietOption = False,
    no_color: options.NoColorOption = False,
) -> None:
    """Compile everything ahead: our kernels, and those of the installed peers.

    Ours are few, whatever the sizes, for gates and states in float32 and beta in float32 or the dtype of q. Peers are
    compiled for the head counts and layouts of suites qwen (fwd) and bwd (bwd), which takes minutes; --heads keeps some
    of them.

    Kernels are kept on disk, ours in TILELANG_CACHE_DIR. An image for machines with a Hopper GPU can be built on a
    machine without one: set that variable, run this with --target sm_90a, and ship the folder.
    """
    begin = time.perf_counter()
    dtypes = tuple(dict.fromkeys(dtype or [DType.bfloat16]))
    directions: list[OneWay] = [one for one in SUITES if one in direction.split("+")]
    cases = options.chosen_cases([SUITES[one] for one in directions], heads=heads)
    card = device.gpu()
    if target is None and (card is None or card.capability != device.HOPPER):
        found = card.name if card else "no GPU"
        do = "flashqla warmup --target sm_90a compiles for one"
        raise EnvironmentProblem("no Hopper GPU here", given=found, do=do)
    progress = console.Progress() if quiet else console.Lines()
    with signals.handled(_leave), console.results_only():
        _our_kernels(dtypes, directions, progress)
        folders = {"TILELANG_CACHE_DIR": os.environ.get("TILELANG_CACHE_DIR") or Path.home() / ".tilelang" / "cache"}
        if target is None:
            from flashqla import backends, runner  # and with them torch
            from flashqla.worker import Watch

            peers = backends.create(list(device.PEERS), "cuda")
            for peer in peers:
                if reason := peer.missing():
                    progress.tell(f"{peer.name} is left out: {reason}", False)
            for one in directions:
                of_suite = {*suite(SUITES[one])}
                wanted = [replace(case, dtype=name.value) for name in dtypes for case in cases if case in of_suite]
                runner.warm_up(wanted, peers, "cuda", direction=one, watch=Watch(progress.tell), always=True)
            folders["TRITON_CACHE_DIR"] = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    console.result(f"ready in {time.perf_counter() - begin:.0f} s")
    for variable, folder in folders.items():
        console.result(f"{variable:<20}{folder}")


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process: threads that compile cannot be told to stop, and Python would wait for all of them.

    Kernels reach the cache as a whole or not at all, so those that are there stay good.
    """
    try:
        console.hint("interrupted: kernels compiled so far are kept; the same command goes on with the others")
    finally:  # the signal may have come amid another line, which then cannot be begun
        os._exit(130)


def _our_kernels(dtypes: tuple[DType, ...], directions: list[OneWay], progress: console.Progress) -> None:
    if device.nvcc() is None:
        do = "pip install 'flashqla[nvcc]', or set CUDA_HOME to a CUDA toolkit"
        raise EnvironmentProblem("there is no CUDA compiler", given="nvcc not found", do=do)
    try:
        from flashqla.ops.kernels import launch
    except (ImportError, OSError) as error:
        do = "see what is missing with: flashqla doctor"
        raise EnvironmentProblem("the kernels cannot be loaded", given=str(error), do=do) from error
    signals.keep_from_z3()
    logging.getLogger("tilelang").setLevel(logging.WARNING)  # which tells of every kernel, and asks for that on import
    for number, dtype in enumerate(dtypes, start=1):
        begin = time.perf_counter()
        progress.tell(f"compiling our kernels for {dtype}" + f" ({number} of {len(dtypes)})" * (len(dtypes) > 1), True)
        launch.compile_all((dtype.value,), directions)
        progress.tell(f"compiled our kernels for {dtype} in {time.perf_counter() - begin:.0f} s", False)
