"""What worker processes do in tests/unit/test_worker.py. Processes import it by name, so it stands on its own."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from flashqla.worker import Lost, Watch, die_with_parent


def start(watch: Watch) -> Callable[[Any], Any]:
    """Tasks are (verb, argument)."""

    def do(task: tuple[str, Any]) -> Any:
        verb, argument = task
        watch.running("idle")
        return globals()[verb](watch, argument)

    return do


def start_badly(watch: Watch) -> Callable[[Any], Any]:
    watch.compiling("first", "warming up")
    os._exit(7)


def echo(watch: Watch, value: Any) -> Any:
    return value, os.getpid()


def hang(watch: Watch, name: str) -> None:
    watch.running(name)
    time.sleep(60)


def compile_for(watch: Watch, seconds: list[float]) -> str:
    for each in seconds:
        watch.compiling("first", "compiling first")
        time.sleep(each)
        watch.running("second", "running second")
        time.sleep(0.05)
    return "compiled"


def leave(watch: Watch, code: int) -> None:
    watch.running("second")
    os._exit(code)


def fault(watch: Watch, address: int) -> None:
    watch.running("first")
    ctypes.string_at(address)


def fail(watch: Watch, text: str) -> None:
    raise ZeroDivisionError(text)


def lose(watch: Watch, name: str) -> None:
    raise Lost("failed", "the GPU was lost", name)


def shout(watch: Watch, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
    os.write(1, text.encode())


def share(watch: Watch, path: str) -> None:
    """Start a pool of processes, note its ids beside our own, and hang."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, initializer=die_with_parent, initargs=(os.getpid(),)) as pool:
        ids = {pool.submit(os.getpid).result() for _ in range(4)}
        with open(path, "w") as file:
            print(os.getpid(), *ids, file=file)
        time.sleep(60)


def breed(watch: Watch, path: str) -> None:
    """Start a process as compilers do, note its id beside our own, and hang."""
    child = subprocess.Popen(["sleep", "60"])
    with open(path, "w") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    time.sleep(60)
