"""A process that does tasks for another one, to which its end, or a task without an end, is an answer like others.

The process has its descriptor 1 at stderr, is out of reach of Ctrl-C, and dies with its parent, however that ends. It
says where it stands through a Watch; the parent charges compiling and running to clocks of their own.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NoReturn

from flashqla.errors import FlashqlaError
from flashqla.signals import STOPPING, handled

Tell = Callable[[str, bool], None]  # what is being done now, and whether that is compiling
Do = Callable[[Any], Any]  # a task -> its result, both fit for pickle
Start = Callable[["Watch"], Do]  # runs once in the process, fit for pickle

GLANCE_S = 1.0  # how often the parent looks whether the process is still there
START_S = 300.0  # at least for a process to start: importing torch from a cold disk takes a minute
GOODBYE_S = 10.0  # for a process to end by itself; one whose GPU hangs may take longer
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NOBODY = -1


class Watch:
    """Where work stands. This one keeps it to itself and `tell`; the one in a worker process reports it."""

    def __init__(self, tell: Tell | None = None) -> None:
        self.now: str | None = None  # the name in hand: it gets the blame
        self.tell = tell or (lambda text, compiling: None)

    def compiling(self, name: str | None, text: str) -> None:
        """`name` compiles from now on, or is loaded."""
        self.now = name
        self.tell(text, True)

    def running(self, name: str | None, text: str = "") -> None:
        """`name` runs from now on. It takes under a microsecond to say so, and may stand between samples."""
        self.now = name
        if text:
            self.tell(text, False)


@dataclass
class Lost(Exception):
    """The process is gone, or no longer of use. `name` was in hand, None when nothing was."""

    status: Literal["timeout", "failed"]
    reason: str
    name: str | None = None
    starting: bool = False  # before it took any task


class Worker:
    """A process that is there when it is asked, and is replaced when it was lost."""

    def __init__(self, start: Start, names: Sequence[str], timeout_s: float, tell: Tell | None = None) -> None:
        """names: all that may be in hand. timeout_s: for a task to run, and for each name in it to compile.

        `start` may be changed; the next process is started with it.
        """
        self.start = start
        self._names, self._timeout_s = tuple(names), timeout_s
        self._tell = tell or (lambda text, compiling: None)
        self._process: Any = None
        self._hand: Any = None
        self._connection: Any = None

    def ask(self, task: Any) -> Any:
        """The result of a task. Raises Lost, after which the next task gets a new process."""
        if self._process is None:
            self._launch()
        with suppress(OSError):  # it has died since; waiting for the answer tells how
            self._connection.send(task)
        return self._answer()

    def close(self) -> None:
        """Let an idle process end by itself."""
        if self._process is not None:
            self._connection.close()
            self._process.join(GOODBYE_S)
            self.kill()

    def kill(self) -> None:
        """End the process and all that it started, now."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):  # it leads a group, with the compilers it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join(GOODBYE_S)
        self._connection.close()

    def _launch(self) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, theirs = context.Pipe()
        self._hand = context.RawValue("i", NOBODY)
        arguments = (theirs, self._hand, self._names, self.start, os.getpid())
        self._process = context.Process(target=_main, args=arguments, name="flashqla worker")
        self._tell("starting a process", True)
        resource_tracker.ensure_running()  # before, because where it is started CPython unblocks signals
        with _undisturbed():
            self._process.start()
        theirs.close()
        self._answer(starting=True)

    def _answer(self, *, starting: bool = False) -> Any:
        limit_s = max(self._timeout_s, START_S) if starting else self._timeout_s
        clock = _Clock(limit_s, compiling=starting)
        while True:
            if not wait([self._connection], max(0.0, min(GLANCE_S, clock.left()))):
                if not self._process.is_alive():  # and a child of its own holds the pipe open
                    self._mourn(starting)
                if clock.left() <= 0:
                    name = self._in_hand()
                    self.kill()
                    doing = "compiling" if clock.compiling else "running"
                    raise Lost("timeout", f"{doing} took more than {limit_s:g} s", name, starting)
                continue
            try:
                kind, *content = self._connection.recv()
            except (EOFError, OSError):
                self._process.join(GOODBYE_S)
                self._mourn(starting)
            if kind == "done":
                return content[0]
            if kind in ("compiling", "running"):
                clock.turn(compiling=kind == "compiling")
                self._tell(content[0], kind == "compiling")
                continue
            self.kill()
            if kind == "lost":
                reason, name = content
                raise Lost("failed", reason, name, starting)
            raise FlashqlaError("a bug in the worker process", given=content[0])

    def _mourn(self, starting: bool) -> NoReturn:
        """The process has ended by itself."""
        name, code = self._in_hand(), self._process.exitcode
        self.kill()
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
            if -code == signal.SIGKILL:
                how += ", as when the machine is out of memory"
        raise Lost("failed", f"the process died: {how}", name, starting)

    def _in_hand(self) -> str | None:
        index = self._hand.value
        return self._names[index] if index != NOBODY else None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and its like, here and in a process that starts meanwhile: a half started one would complain.

    Ctrl-C on a terminal reaches every process of the group, and a new one has not left it yet; it inherits what is
    blocked. Here blocking is not enough: another thread gets the signal, and Python handles it in the main one.
    """
    held: list[int] = []
    main = threading.current_thread() is threading.main_thread()  # no other may say what a signal does
    try:
        with handled(lambda got, frame: held.append(got)) if main else nullcontext():
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        for got in held:
            signal.raise_signal(got)


class _Clock:
    """Time left of a task: all its running counts, and compiling anew at each turn to it."""

    def __init__(self, limit_s: float, *, compiling: bool) -> None:
        self._limit_s, self._ran_s = limit_s, 0.0
        self._since, self.compiling = time.monotonic(), compiling

    def turn(self, *, compiling: bool) -> None:
        now = time.monotonic()
        if not self.compiling:
            self._ran_s += now - self._since
        self._since, self.compiling = now, compiling

    def left(self) -> float:
        taken = time.monotonic() - self._since
        return self._limit_s - (taken if self.compiling else self._ran_s + taken)


class _Report(Watch):
    """The Watch of a worker process: a number in shared memory, and a message when compiling begins or ends."""

    def __init__(self, connection: Connection, hand: Any, names: Sequence[str]) -> None:
        super().__init__()
        self._connection, self._hand = connection, hand
        self._index = {name: index for index, name in enumerate(names)}
        self._compiling = True  # as the parent takes it when a process starts

    def compiling(self, name: str | None, text: str) -> None:
        self._take(name)
        self._compiling = True
        self._connection.send(("compiling", text))

    def running(self, name: str | None, text: str = "") -> None:
        self._take(name)
        if self._compiling or text:
            self._compiling = False
            self._connection.send(("running", text))

    def _take(self, name: str | None) -> None:
        self.now = name
        self._hand.value = NOBODY if name is None else self._index[name]


def _main(connection: Connection, hand: Any, names: Sequence[str], start: Start, parent: int) -> None:
    """The life of a worker process."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # what it starts would inherit that
    die_with_parent(parent)
    faulthandler.enable()
    os.dup2(2, 1)
    watch = _Report(connection, hand, names)
    try:
        do = start(watch)
        watch.running(None)
        connection.send(("done", None))
        while True:
            try:
                task = connection.recv()
            except EOFError:
                return
            connection.send(("done", do(task)))
    except BrokenPipeError:  # the parent has gone
        return
    except Lost as lost:
        connection.send(("lost", lost.reason, lost.name))
        os._exit(0)  # taking down a broken CUDA context may hang
    except Exception:
        connection.send(("bug", traceback.format_exc()))


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the thread that started it ends. For a process just started by `parent`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which has ended before that
        os._exit(1)
