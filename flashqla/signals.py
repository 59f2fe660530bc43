"""What Ctrl-C, SIGTERM and SIGHUP do: each ends a command with 130, and takes no finished row along."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last is what a lost terminal sends
SAME_S = 1.0  # signals within it are one: `timeout` sends two, and fingers on Ctrl-C are not sure

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


def handle(handler: Handler) -> dict[signal.Signals, Any]:
    """Handle them in this way, and return how they were handled before.

    What the caller ignores stays ignored, as Ctrl-C does in a job that a script has started with &, and SIGHUP below
    nohup. So does what C code handles, because Python could not put it back.
    """
    handled = [number for number in STOPPING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return {number: signal.signal(number, handler) for number in handled}


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Handle them in another way for a while."""
    before = handle(handler)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def keep_from_z3() -> None:
    """Leave Ctrl-C to Python while kernels compile, once TileLang is loaded.

    It proves with z3, which for each proof handles Ctrl-C in place of Python: one of four was lost.
    """
    import_module("z3").set_param("ctrl_c", False)


def leave(number: int, frame: FrameType | None) -> None:
    """End the process at once: for when it has nothing to lose.

    An exception, which is Python's way, comes up wherever the code happens to be. While torch is imported that may be
    below C++, which aborts or swallows it.
    """
    os._exit(130)


class Interrupt:
    """Raise KeyboardInterrupt, once: a second one would come up in the code that keeps what there is.

    None comes up before `release`: not while what has to be kept, or taken away, is half there. Calling that again
    brings up once more what code of others has swallowed.
    """

    def __init__(self) -> None:
        self._last_s = -SAME_S
        self._held, self._waiting = True, False

    def release(self) -> None:
        """From now on; at once for a signal that came before."""
        self._held = False
        if self._waiting:
            raise KeyboardInterrupt

    def __call__(self, number: int, frame: FrameType | None) -> None:
        before_s, self._last_s = self._last_s, time.monotonic()
        self._waiting = True
        if not self._held and self._last_s - before_s > SAME_S:
            raise KeyboardInterrupt
